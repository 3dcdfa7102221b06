"""Toy engines and toy series for the tests of the patch scripts.

Owns the building of tiny wheel installs, git checkouts and patches directories. Must never
touch anything outside of the directory it is given.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = REPO / "scripts"
VERSION = "1.2.3"
CACHE = "python/sglang/srt/cache.py"
SERVER = "python/sglang/srt/server.py"

Files = dict[str, str]

BASE: Files = {
    "python/sglang/__init__.py": "",
    "python/sglang/srt/__init__.py": "",
    "python/sglang/srt/cache.py": "import os\n\n\nLIMIT = 10\n\n\n"
    + "class Cache:\n    def __init__(self):\n        self.size = 0\n\n"
    + "".join(f"    def step_{n}(self):\n        return {n}\n\n" for n in range(12))
    + "\ndef tail():\n    return 1\n",
    "python/sglang/srt/server.py": "".join(f"LINE_{n} = {n}\n" for n in range(40)),
}

BODY = """The cache has no way to tell anybody that a step was taken, so whoever wants to
know has to poll. This adds a call site. Why not a rung above: no registry holds the step, a
subclass cannot be selected, and a hook around it would replace the whole function."""


def edited(files: Files, path: str, old: str, new: str) -> Files:
    assert files[path].count(old) == 1, (path, old)
    return {**files, path: files[path].replace(old, new)}


def diff_text(before: Files, after: Files) -> str:
    parts = []
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if old == new or new is None:
            continue
        names = ("/dev/null" if old is None else f"a/{path}", f"b/{path}")
        parts.append(f"diff --git a/{path} b/{path}\n")
        if old is None:
            parts.append("new file mode 100644\n")
        lines = [(text or "").splitlines(keepends=True) for text in (old, new)]
        parts += difflib.unified_diff(*lines, *names)
    return "".join(parts)


def patch_text(
    diff: str, *, subject: str = "Tell who asked", body: str = BODY, **over: str
) -> str:
    """`over`: trailers by name with _ for -; an empty string leaves the trailer out."""
    trailers = {
        "Kind": "fix",
        "Upstream-Base": f"v{VERSION}",
        "Forwarded": "no",
        "Remove-When": "symbol sglang.srt.cache:notify_upstream",
        "Used-By": "sam/srt/upstream.py",
        "Test": "test/test_toy.py",
        "Last-Update": "2026-01-02",
    } | {key.replace("_", "-"): value for key, value in over.items()}
    tail = "\n".join(f"{key}: {value}" for key, value in trailers.items() if value)
    return (
        "From: A Person <person@example.org>\nDate: Fri, 2 Jan 2026 00:00:00 +0000\n"
        f"Subject: [PATCH] {subject}\n\n{body}\n\n{tail}\n---\n{diff}-- \n2.39.5\n"
    )


@dataclass
class ToyPatches:
    """A patches directory; `tops` holds the tree after each patch."""

    directory: Path
    base: Files
    version: str = VERSION
    names: list[str] = field(default_factory=list)
    tops: list[Files] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "UPSTREAM").write_text(
            f'project = "sglang"\nversion = "{self.version}"\ntag = "v{self.version}"\n'
            f'wheel = "sglang-{self.version}-py3-none-any.whl"\nwheel_sha256 = "0"\n'
        )
        self._write_series()

    @property
    def top(self) -> Files:
        return self.tops[-1] if self.tops else self.base

    def add(self, name: str, after: Files, **header: str) -> None:
        self.add_text(name, patch_text(diff_text(self.top, after), **header), after)

    def add_text(self, name: str, text: str, after: Files | None = None) -> None:
        (self.directory / name).write_text(text)
        self.names.append(name)
        self.tops.append(after or self.top)
        self._write_series()
        self.write_lock()

    def _write_series(self) -> None:
        lines = ["# the order", *self.names]
        (self.directory / "series").write_text("\n".join(lines) + "\n")

    def write_lock(self) -> None:
        touched = {path for path in self.base if self.base[path] != self.top.get(path)}
        lines = [
            f"{hashlib.sha256(self.base[p].encode()).hexdigest()}  {p}\n"
            for p in sorted(touched)
        ]
        (self.directory / "BASE.sha256").write_text("".join(lines))


def write_tree(root: Path, files: Files) -> None:
    for path, text in files.items():
        location = root / path
        location.parent.mkdir(parents=True, exist_ok=True)
        location.write_text(text)


def make_wheel(site: Path, files: Files = BASE, version: str = VERSION) -> Path:
    """What an installer leaves in site-packages; called again it is a re-install."""
    rows = []
    for path, text in files.items():
        if path.startswith("python/"):
            name = path.removeprefix("python/")
            write_tree(site, {name: text})
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            rows.append(f"{name},sha256={digest.decode().rstrip('=')},{len(text)}\n")
    info = site / f"sglang-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    rows.append(f"{info.name}/RECORD,,\n")
    (info / "RECORD").write_text("".join(rows))
    return site


def git(root: Path, *args: str) -> str:
    env = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    command = [
        "git",
        "-C",
        str(root),
        "-c",
        "user.name=T",
        "-c",
        "user.email=t@example.org",
        *args,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def make_checkout(root: Path, files: Files = BASE, tag: str | None = f"v{VERSION}") -> Path:
    write_tree(root, {**files, "test/test_old.py": "def test_old():\n    pass\n"})
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "config", "user.name", "Toy Author")
    git(root, "config", "user.email", "toy@example.org")
    git(root, "add", "-A")
    git(root, "commit", "--quiet", "-m", "base")
    if tag:
        git(root, "tag", tag)
    return root


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and mode of every file, bytecode and the state directory aside."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode)
        for path in sorted(root.rglob("*"))
        if path.is_file() and not {".git", ".sam_patches", "__pycache__"} & set(path.parts)
    }


def run_script(name: str, *args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)  # type: ignore
