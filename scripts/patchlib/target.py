"""What the patches are applied to: a wheel install, or a checkout of the upstream source.

Owns how a target is found, which files it holds, and what proves that they are the base.
Must never write to a target.
"""

from __future__ import annotations

import base64
import csv
import os
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import Exit, PatchToolError
from .gitcmd import commit_of, is_repository, try_git
from .series import PACKAGE_PREFIX, Series, is_package_path

STATE_DIR = ".sam_patches"
_FIND = (
    "import importlib.util as u; s = u.find_spec('sglang');"
    " print((s and s.origin and s.submodule_search_locations or [''])[0])"
)


@dataclass(frozen=True)
class Target:
    root: Path
    python: Path | None

    kind = ""

    @property
    def package(self) -> Path:
        raise NotImplementedError

    @property
    def state_dir(self) -> Path:
        return self.package / STATE_DIR

    def locate(self, path: str) -> Path | None:
        """The file behind an upstream path; None if this kind of target has no such file."""
        raise NotImplementedError

    def base_hash(self, path: str) -> str | None:
        """The sha256 that proves the base; None if the base has no such file."""
        raise NotImplementedError

    def version(self) -> str | None:
        raise NotImplementedError

    def prove_version(self, series: Series) -> None:
        raise NotImplementedError

    def read(self, path: str) -> bytes | None:
        location = self.locate(path)
        return location.read_bytes() if location and location.is_file() else None


@dataclass(frozen=True)
class WheelTarget(Target):
    kind = "wheel"

    @property
    def package(self) -> Path:
        return self.root / "sglang"

    def locate(self, path: str) -> Path | None:
        if not is_package_path(path):
            return None
        return self.package / path.removeprefix(PACKAGE_PREFIX)

    @cached_property
    def _dist_info(self) -> Path:
        found = sorted(self.root.glob("sglang-*.dist-info"))
        if len(found) != 1 or not (found[0] / "RECORD").is_file():
            names = ", ".join(path.name for path in found) or "none"
            raise PatchToolError(
                Exit.WRONG_VERSION,
                f"{self.root}: needs one sglang-*.dist-info with a RECORD, found: {names}",
                "pip install --no-deps --force-reinstall the pinned sglang wheel",
            )
        return found[0]

    @cached_property
    def _record(self) -> dict[str, str]:
        hashes = {}
        with (self._dist_info / "RECORD").open(newline="", encoding="utf-8") as file:
            for row in csv.reader(file):
                if len(row) >= 2 and row[1].startswith("sha256="):
                    digest = row[1].removeprefix("sha256=")
                    padded = digest + "=" * (-len(digest) % 4)
                    hashes[row[0]] = base64.urlsafe_b64decode(padded).hex()
        return hashes

    def base_hash(self, path: str) -> str | None:
        return self._record.get(path.removeprefix("python/"))

    def version(self) -> str:
        return self._dist_info.name.removeprefix("sglang-").removesuffix(".dist-info")

    def prove_version(self, series: Series) -> None:
        pin = series.upstream.version
        if self.version() != pin:
            raise PatchToolError(
                Exit.WRONG_VERSION,
                f"{self.root} has sglang {self.version()}, the patches are for {pin}",
                f"pip install --no-deps --force-reinstall sglang=={pin}",
            )
        for path, digest in series.base_hashes.items():
            if is_package_path(path) and self.base_hash(path) not in (None, digest):
                raise PatchToolError(
                    Exit.WRONG_VERSION,
                    f"{path}: this build of sglang {pin} differs from {series.upstream.wheel}",
                    "install the published wheel; patches/UPSTREAM has its sha256",
                )


@dataclass(frozen=True)
class CheckoutTarget(Target):
    series_hashes: dict[str, str]

    kind = "checkout"

    @property
    def package(self) -> Path:
        return self.root / "python" / "sglang"

    def locate(self, path: str) -> Path | None:
        return self.root / path

    def base_hash(self, path: str) -> str | None:
        if path in self.series_hashes:
            return self.series_hashes[path]
        if try_git(self.root, "cat-file", "-e", f"HEAD:{path}") is not None:
            raise PatchToolError(
                Exit.MODIFIED,
                f"{path}: nothing proves what the base holds; it is not in BASE.sha256",
                "run 'patchtool.py lock' against the pinned wheel and commit the result",
            )
        return None

    def version(self) -> str | None:
        out = try_git(self.root, "describe", "--tags", "--always")
        return out.decode().strip() if out else None

    def prove_version(self, series: Series) -> None:
        """By the tag where it is known; the hashes of the files decide in any case."""
        tag = series.upstream.tag
        if commit_of(self.root, tag) is None:
            return
        if try_git(self.root, "merge-base", "--is-ancestor", tag, "HEAD") is None:
            raise PatchToolError(
                Exit.WRONG_VERSION,
                f"{self.root}: HEAD ({self.version()}) does not descend from {tag}",
                f"git checkout {tag}",
            )


def find_target(
    series: Series, *, directory: Path | None, python: Path | None, repo: Path, running: Path
) -> Target:
    """`directory` wins over `python`; without both, this interpreter or the repo's venv."""
    if directory is not None:
        return _from_directory(series, directory, python)
    venv = repo / ".venv" / "bin" / "python"
    choices = [python] if python else [running, *([venv] if venv.exists() else [])]
    for choice in choices:
        package = _package_of(choice)
        if package is not None:
            return _from_package(series, package, choice)
    raise PatchToolError(
        Exit.WRONG_VERSION,
        f"sglang is not installed for {', '.join(map(str, choices))}",
        f"pip install sglang=={series.upstream.version}, or pass another --python or --target",
    )


def _package_of(python: Path) -> Path | None:
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", _FIND],
            capture_output=True,
            text=True,
            cwd="/",
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise PatchToolError(
            Exit.USAGE,
            f"{python} does not run: {error}",
            "pass --python a Python 3.11 or newer",
        ) from None
    line = done.stdout.strip().splitlines()[-1:]
    return Path(line[0]) if line else None


def _from_package(series: Series, package: Path, python: Path) -> Target:
    if package.parent.name == "python" and not any(package.parent.glob("sglang-*.dist-info")):
        return _checkout(series, package.parent.parent, python)
    return WheelTarget(package.parent, python)


def _checkout(series: Series, root: Path, python: Path | None) -> Target:
    if not is_repository(root):
        raise PatchToolError(
            Exit.WRONG_VERSION,
            f"{root} holds upstream sources but is not the top of a git checkout",
            f"use a clone of upstream at {series.upstream.tag}, or the wheel",
        )
    return CheckoutTarget(root, python, series.base_hashes)


def _from_directory(series: Series, directory: Path, python: Path | None) -> Target:
    root = Path(os.path.abspath(directory))
    if (root / "python" / "sglang").is_dir():
        return _checkout(series, root, python)
    if (root / "sglang").is_dir():
        return WheelTarget(root, python)
    raise PatchToolError(
        Exit.WRONG_VERSION,
        f"{root} holds neither sglang/ (a site-packages directory) nor python/sglang/",
        "pass a site-packages directory or a checkout of upstream",
    )
