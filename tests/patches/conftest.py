"""Fixtures of the patch script tests: a toy series of three patches on a toy engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for entry in (HERE, HERE.parents[1] / "scripts"):
    if str(entry) not in sys.path:
        sys.path.insert(0, str(entry))

import patch_toys as toys  # noqa: E402
import patchtool  # noqa: E402
from patch_toys import CACHE, SERVER  # noqa: E402


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power loss is not what these tests can see; a killed process needs no fsync."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def series(tmp_path: Path) -> toys.ToyPatches:
    """step-hook changes the cache and adds a file and a test; the others build on it."""
    made = toys.ToyPatches(tmp_path / "patches", toys.BASE)
    one = toys.edited(
        made.top, CACHE, "        return 3\n", "        self.size += 1\n        return 3\n"
    )
    one["python/sglang/srt/extra/hooks.py"] = "HOOKS = []\n"
    one["test/test_toy.py"] = "def test_toy():\n    assert True\n"
    made.add("step-hook.patch", one, Marker="sglang.srt.extra.hooks:HOOKS")
    two = toys.edited(made.top, SERVER, "LINE_20 = 20\n", "LINE_20 = 21\n")
    made.add("server-line.patch", two, Test="test/test_toy.py")
    three = toys.edited(made.top, CACHE, "self.size += 1\n", "self.size += 2\n")
    made.add("step-two.patch", three)
    return made


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return toys.make_wheel(tmp_path / "site-packages")


@pytest.fixture
def tool(series: toys.ToyPatches) -> Callable[..., int]:
    """patchtool in this process, on the toy series."""

    def run(command: str, *args: object) -> int:
        extra = ["--no-doctor"] if command == "apply" else []
        return patchtool.main(
            [command, "--patches", str(series.directory), *map(str, args), *extra]
        )

    return run
