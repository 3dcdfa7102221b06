"""The patches directory: UPSTREAM, series, BASE.sha256 and the patches themselves.

Owns how the directory is read. Must never write it and never look at a target.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .diff import Applied, DiffError, FileDiff, apply_diff, diff_start, parse_diffs
from .errors import Exit, PatchToolError
from .header import Header, parse_header

PACKAGE_PREFIX = "python/sglang/"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_package_path(path: str) -> bool:
    """True for what a wheel holds; the rest (upstream-style tests) lives in a checkout only."""
    return path.startswith(PACKAGE_PREFIX)


def is_test_path(path: str) -> bool:
    return path.startswith("test/")


@dataclass(frozen=True)
class Upstream:
    project: str
    version: str
    tag: str
    wheel: str
    wheel_sha256: str


@dataclass(frozen=True)
class Patch:
    name: str
    raw: bytes
    header: Header
    diffs: tuple[FileDiff, ...]

    @cached_property
    def sha256(self) -> str:
        return sha256(self.raw)

    @property
    def paths(self) -> list[str]:
        return [diff.path for diff in self.diffs]


@dataclass(frozen=True)
class Series:
    directory: Path
    upstream: Upstream
    patches: tuple[Patch, ...]
    base_hashes: dict[str, str]

    def paths(self) -> list[str]:
        return sorted({path for patch in self.patches for path in patch.paths})

    def creates(self, path: str) -> bool:
        return any(d.creates for p in self.patches for d in p.diffs if d.path == path)

    def executable(self, path: str) -> bool:
        return any(d.executable for p in self.patches for d in p.diffs if d.path == path)

    def fold(self, path: str, content: bytes | None) -> bytes | None:
        """One file after the whole series; strict. The files of a series are independent."""
        for patch in self.patches:
            for diff in patch.diffs:
                if diff.path == path:
                    content = apply_strict(patch, diff, content)
        return content

    def unfold(self, path: str, content: bytes | None) -> bytes | None:
        """The inverse of `fold`; raises DiffError where the series is not in `content`."""
        for patch in reversed(self.patches):
            for diff in patch.diffs:
                if diff.path == path:
                    content = apply_diff(diff.reverse(), content).content
        return content


def apply_strict(patch: Patch, diff: FileDiff, content: bytes | None) -> bytes | None:
    try:
        return apply_diff(diff, content).content
    except DiffError as error:
        raise PatchToolError(
            Exit.DOES_NOT_APPLY,
            f"{patch.name}: {error}",
            "refresh this patch against the base plus the patches before it in the series"
            " (patchtool.py refresh repairs pure offsets)",
        ) from None


def apply_loose(diff: FileDiff, content: bytes | None) -> Applied:
    return apply_diff(diff, content, offsets=True)


def read_upstream(directory: Path) -> Upstream:
    path = directory / "UPSTREAM"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        keys = ("project", "version", "tag", "wheel", "wheel_sha256")
        return Upstream(*(str(table[key]) for key in keys))
    except FileNotFoundError:
        raise PatchToolError(
            Exit.USAGE, f"{path} is missing", "point --patches at the patches directory"
        ) from None
    except (KeyError, tomllib.TOMLDecodeError) as error:
        raise PatchToolError(
            Exit.USAGE,
            f"{path}: {error}",
            "it needs project, version, tag, wheel, wheel_sha256",
        ) from None


def read_series_names(directory: Path) -> list[str]:
    path = directory / "series"
    if not path.is_file():
        raise PatchToolError(
            Exit.USAGE, f"{path} is missing", "list the patches there, in order"
        )
    lines = (line.split("#", 1)[0].strip() for line in path.read_text("utf-8").splitlines())
    return [line for line in lines if line]


def read_patch(path: Path) -> Patch:
    try:
        raw = path.read_bytes()
        head = raw[: diff_start(raw)].decode("utf-8")
        return Patch(path.name, raw, parse_header(head), tuple(parse_diffs(raw)))
    except FileNotFoundError:
        raise PatchToolError(
            Exit.USAGE,
            f"{path.name} is in the series but not in {path.parent}",
            "fix the series",
        ) from None
    except (DiffError, UnicodeDecodeError) as error:
        raise PatchToolError(
            Exit.DOES_NOT_APPLY,
            f"{path.name}: {error}",
            "write it with git diff or format-patch",
        ) from None


def read_base_hashes(directory: Path) -> dict[str, str]:
    path = directory / "BASE.sha256"
    if not path.is_file():
        return {}
    pairs = (
        line.split(None, 1) for line in path.read_text("utf-8").splitlines() if line.strip()
    )
    return {name.strip(): digest for digest, name in pairs}


def load_series(directory: Path, *, up_to: str | None = None) -> Series:
    upstream = read_upstream(directory)
    names = read_series_names(directory)
    if up_to is not None:
        if up_to not in names:
            raise PatchToolError(
                Exit.USAGE, f"--up-to {up_to}: not in the series", f"one of: {', '.join(names)}"
            )
        names = names[: names.index(up_to) + 1]
    patches = tuple(read_patch(directory / name) for name in names)
    return Series(directory, upstream, patches, read_base_hashes(directory))


def same_series(recorded: Sequence[dict[str, str]], series: Series) -> bool:
    ours = [(patch.name, patch.sha256) for patch in series.patches]
    return [(entry["name"], entry["sha256"]) for entry in recorded] == ours
