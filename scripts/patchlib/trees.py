"""Read-only views of upstream sources under their upstream paths.

Owns how a directory, a wheel file, a patched target or a set of pending edits is read as
one tree (`python/sglang/...`). Must never write.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Protocol

from .errors import Exit, PatchToolError
from .series import PACKAGE_PREFIX, Series, is_package_path
from .store import Store
from .survey import survey
from .target import Target


class Tree(Protocol):
    def read(self, path: str) -> bytes | None: ...

    def names(self, directory: str) -> list[str]:
        """The entries of a directory; empty where there is none."""
        ...


class DirTree:
    def __init__(self, root: Path, *, strip: str) -> None:
        self._root = root
        self._strip = strip

    def _locate(self, path: str) -> Path:
        return self._root / path.removeprefix(self._strip)

    def read(self, path: str) -> bytes | None:
        location = self._locate(path)
        return location.read_bytes() if location.is_file() else None

    def names(self, directory: str) -> list[str]:
        location = self._locate(directory)
        return sorted(entry.name for entry in location.iterdir()) if location.is_dir() else []


class WheelTree:
    def __init__(self, wheel: Path) -> None:
        self._zip = zipfile.ZipFile(wheel)
        self._names = frozenset(self._zip.namelist())

    def read(self, path: str) -> bytes | None:
        name = path.removeprefix("python/")
        return self._zip.read(name) if name in self._names else None

    def names(self, directory: str) -> list[str]:
        start = directory.removeprefix("python/").rstrip("/") + "/"
        inside = (name[len(start) :] for name in self._names if name.startswith(start))
        return sorted({name.split("/", 1)[0] for name in inside})


class BaseTree:
    """The base below a target, whether patched or not; only proven bytes of touched files."""

    def __init__(self, series: Series, target: Target) -> None:
        found = survey(series, target, Store(target.root, target.state_dir))
        found.require_unmodified()
        self._touched = {fact.path: fact.base for fact in found.facts}
        self._rest = tree_of(target.root)

    def read(self, path: str) -> bytes | None:
        return self._touched[path] if path in self._touched else self._rest.read(path)

    def names(self, directory: str) -> list[str]:
        start = directory.rstrip("/") + "/"
        added = {
            path.removeprefix(start)
            for path, base in self._touched.items()
            if base is None and path.startswith(start)
        }
        return [name for name in self._rest.names(directory) if name not in added]


class EditedTree:
    """Another tree with some files replaced; None = removed."""

    def __init__(self, below: Tree) -> None:
        self._below = below
        self.edits: dict[str, bytes | None] = {}

    def read(self, path: str) -> bytes | None:
        return self.edits[path] if path in self.edits else self._below.read(path)

    def names(self, directory: str) -> list[str]:
        start = directory.rstrip("/") + "/"
        found = set(self._below.names(directory))
        for path, content in self.edits.items():
            if path.startswith(start) and content is not None:
                found.add(path.removeprefix(start).split("/", 1)[0])
        return sorted(found)


def tree_of(location: Path) -> Tree:
    """A wheel file, a checkout, or a directory that holds `sglang/`."""
    if location.is_file() and location.suffix == ".whl":
        return WheelTree(location)
    if (location / "python" / "sglang").is_dir():
        return DirTree(location, strip="")
    if (location / "sglang").is_dir():
        return DirTree(location, strip="python/")
    raise PatchToolError(
        Exit.USAGE,
        f"{location}: no wheel, no checkout of upstream, no directory that holds sglang/",
        "pass one of these, or a version number",
    )


def tree_version(tree: Tree, location: Path) -> str | None:
    """The version a wheel or an installation says it has; None for a checkout."""
    if location.is_file():
        parts = location.name.split("-")
        return parts[1] if len(parts) > 2 else None
    found = sorted(location.glob("sglang-*.dist-info"))
    if found:
        return found[0].name.removeprefix("sglang-").removesuffix(".dist-info")
    content = tree.read(PACKAGE_PREFIX + "_version.py")
    marker = b"__version__ = version = '"
    if content and marker in content:
        return content.split(marker, 1)[1].split(b"'", 1)[0].decode()
    return None


def visible(tree: Tree, path: str) -> bool:
    """False for paths outside of a wheel, where absence proves nothing."""
    return is_package_path(path) or bool(tree.names("test"))
