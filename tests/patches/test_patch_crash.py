"""A run that is killed between any two changes is found and rolled back by the next one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import patch_toys as toys
from patch_toys import CACHE
from patchlib.errors import Exit

KILLER = Path(__file__).with_name("killed_tool.py")


def killed(series, site, command, after):
    """True if the run was killed, False if it came to its end."""
    args = [command, "--patches", str(series.directory), "--target", str(site)]
    if command == "apply":
        args.append("--no-doctor")
    env = os.environ | {"PATCHTOOL_TEST_KILL_AFTER": str(after)}
    done = subprocess.run([sys.executable, str(KILLER), *args], env=env, capture_output=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def every_point(series, template, tmp_path, command):
    """A fresh copy of the template for every possible point of death."""
    for after in range(100):
        site = tmp_path / f"killed-{after}"
        shutil.copytree(template, site)
        if not killed(series, site, command, after):
            assert after > 5
            return
        yield site
    raise AssertionError("the run never came to its end")


def holds(site, files):
    paths = [path for path in files if path.startswith("python/")]
    return all(
        (site / path.removeprefix("python/")).read_text() == files[path] for path in paths
    )


def twin(copy):
    """The same wreck once more, so that both ways out are tried."""
    other = copy.with_name(copy.name + "-twin")
    shutil.copytree(copy, other)
    return other


def test_apply_killed_anywhere(tool, series, site, tmp_path):
    base = toys.snapshot(site)
    seen = set()
    for copy in every_point(series, site, tmp_path, "apply"):
        code = tool("status", "--target", copy)
        seen.add(code)
        if code == Exit.NOT_APPLIED:
            assert toys.snapshot(copy) == base
        other = twin(copy)
        assert tool("revert", "--target", other) == Exit.OK
        assert toys.snapshot(other) == base
        assert not (other / "sglang/srt/extra").exists()
        assert tool("apply", "--target", copy) == Exit.OK
        assert holds(copy, series.top)
        assert tool("check", "--target", copy) == Exit.OK
        assert tool("revert", "--target", copy) == Exit.OK
        assert toys.snapshot(copy) == base
    assert seen == {Exit.NOT_APPLIED, Exit.HALF_APPLIED, Exit.OK}


def test_revert_killed_anywhere(tool, series, site, tmp_path):
    base = toys.snapshot(site)
    tool("apply", "--target", site)
    for copy in every_point(series, site, tmp_path, "revert"):
        assert tool("status", "--target", copy) in (0, Exit.HALF_APPLIED, Exit.NOT_APPLIED)
        other = twin(copy)
        assert tool("revert", "--target", other) == Exit.OK
        assert toys.snapshot(other) == base
        assert tool("apply", "--target", copy) == Exit.OK
        assert holds(copy, series.top)
        assert tool("revert", "--target", copy) == Exit.OK
        assert toys.snapshot(copy) == base


def test_half_applied_is_reported_and_left_alone(tool, series, site, tmp_path, capsys):
    for copy in every_point(series, site, tmp_path, "apply"):
        before = toys.snapshot(copy)
        if tool("status", "--target", copy) == Exit.HALF_APPLIED:
            assert "cut off" in capsys.readouterr().out
            assert tool("check", "--target", copy) == Exit.HALF_APPLIED
            assert toys.snapshot(copy) == before
            return
    raise AssertionError("no half-applied state was seen")


def test_rollback_that_may_not_write_stays_half_applied(
    tool, series, site, tmp_path, monkeypatch
):
    for copy in every_point(series, site, tmp_path, "apply"):
        if tool("status", "--target", copy) == Exit.HALF_APPLIED:
            with monkeypatch.context() as patched:
                patched.setattr(os, "replace", refuse)
                patched.setattr(os, "unlink", refuse)
                assert tool("apply", "--target", copy) == Exit.READ_ONLY
            assert tool("status", "--target", copy) == Exit.HALF_APPLIED
            assert tool("apply", "--target", copy) == Exit.OK
            return


def refuse(*args, **kwargs):
    raise PermissionError(13, "not here")


def test_rollback_never_destroys_later_edits(tool, series, site, tmp_path, capsys):
    for copy in every_point(series, site, tmp_path, "apply"):
        if tool("status", "--target", copy) == Exit.HALF_APPLIED:
            cache = copy / CACHE.removeprefix("python/")
            cache.write_text("MINE = 1\n")
            assert tool("apply", "--target", copy) == Exit.HALF_APPLIED
            assert tool("revert", "--target", copy) == Exit.HALF_APPLIED
            assert "remedy" in capsys.readouterr().err
            assert cache.read_text() == "MINE = 1\n"
            return
