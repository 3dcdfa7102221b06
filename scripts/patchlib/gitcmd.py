"""Calls git, confined to one directory.

Owns the environment of every git call: a repository above the directory is never used, and
variables that point git elsewhere are dropped. Must never change a work tree.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .errors import Exit, PatchToolError

_REDIRECTS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_NAMESPACE")


def git_env(root: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key not in _REDIRECTS}
    env["GIT_CEILING_DIRECTORIES"] = str(root.resolve().parent)
    env["LC_ALL"] = "C"
    env.update(extra or {})
    return env


def try_git(
    root: Path,
    *args: str,
    stdin: bytes | None = None,
    extra_env: Mapping[str, str] | None = None,
) -> bytes | None:
    """The output, or None if git is missing or fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *args],
            input=stdin,
            capture_output=True,
            env=git_env(root, extra_env),
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def git(
    root: Path,
    *args: str,
    stdin: bytes | None = None,
    extra_env: Mapping[str, str] | None = None,
) -> bytes:
    out = try_git(root, *args, stdin=stdin, extra_env=extra_env)
    if out is None:
        raise PatchToolError(
            Exit.INTERNAL, f"git {' '.join(args)} failed in {root}", "run it by hand to see why"
        )
    return out


def is_repository(root: Path) -> bool:
    """True only if `root` itself is the top of a work tree."""
    top = try_git(root, "rev-parse", "--show-toplevel")
    return top is not None and Path(os.fsdecode(top).strip()).resolve() == root.resolve()


def commit_of(root: Path, name: str) -> str | None:
    out = try_git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    return out.decode().strip() if out else None
