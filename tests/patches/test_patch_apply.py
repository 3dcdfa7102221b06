"""apply, status, check and revert on a toy wheel install."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import patch_toys as toys
import pytest
from patch_toys import CACHE, SERVER
from patchlib import store as store_module
from patchlib.errors import Exit

HOOKS = "python/sglang/srt/extra/hooks.py"


def installed(site, path):
    return site / path.removeprefix("python/")


def state_of(site):
    return json.loads((site / "sglang/.sam_patches/state.json").read_text())


def expect_top(site, files):
    for path, text in files.items():
        if path.startswith("python/"):
            assert installed(site, path).read_text() == text


def test_round_trip_is_byte_exact(tool, series, site):
    before = toys.snapshot(site)
    assert tool("status", "--target", site) == Exit.NOT_APPLIED
    assert tool("check", "--target", site) == Exit.NOT_APPLIED
    assert toys.snapshot(site) == before
    assert tool("apply", "--target", site) == Exit.OK
    expect_top(site, series.top)
    assert tool("status", "--target", site) == Exit.OK
    assert tool("check", "--target", site) == Exit.OK
    assert tool("revert", "--target", site) == Exit.OK
    assert toys.snapshot(site) == before
    assert not (site / "sglang/.sam_patches").exists()
    assert not (site / "sglang/srt/extra").exists()
    assert tool("status", "--target", site) == Exit.NOT_APPLIED
    assert tool("revert", "--target", site) == Exit.OK


def test_apply_twice_changes_nothing(tool, site, capsys):
    tool("apply", "--target", site)
    stats = {p: p.stat().st_mtime_ns for p in site.rglob("*.py")}
    state = state_of(site)
    capsys.readouterr()
    assert tool("apply", "--target", site) == Exit.OK
    assert "already applied" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in site.rglob("*.py")} == stats
    assert state_of(site) == state


def test_state_names_patches_and_hashes(tool, series, site):
    tool("apply", "--target", site)
    state = state_of(site)
    assert [entry["name"] for entry in state["patches"]] == series.names
    entry = state["files"][CACHE]
    assert entry["result"] == store_module.sha256(series.top[CACHE].encode())
    blob = site / "sglang/.sam_patches/blobs" / entry["base"]
    assert blob.read_text() == toys.BASE[CACHE]
    assert state["files"][HOOKS]["base"] is None


def test_tests_are_skipped_on_a_wheel(tool, site, capsys):
    assert tool("apply", "--target", site) == Exit.OK
    assert "outside of the wheel, skipped: test/test_toy.py" in capsys.readouterr().out
    assert not (site / "test").exists()


def test_json(tool, site, capsys):
    tool("apply", "--target", site)
    capsys.readouterr()
    assert tool("status", "--json", "--target", site) == Exit.OK
    value = json.loads(capsys.readouterr().out)
    assert value["verdict"] == "applied" and value["exit_code"] == 0
    assert value["target"]["kind"] == "wheel" and value["target"]["version"] == toys.VERSION
    assert {f["path"]: f["kind"] for f in value["files"]}[CACHE] == "patched"
    assert all(p["recorded"] for p in value["patches"])
    assert value["skipped"] == ["test/test_toy.py"]
    assert tool("check", "--json", "--target", site / "nowhere") == Exit.WRONG_VERSION
    assert json.loads(capsys.readouterr().out)["exit_code"] == Exit.WRONG_VERSION


def test_stale_bytecode_goes(tool, site):
    cache = installed(site, CACHE)
    pyc = cache.parent / "__pycache__" / "cache.cpython-311.pyc"
    pyc.parent.mkdir()
    for command in ("apply", "revert"):
        pyc.write_bytes(b"old")
        old = int(cache.stat().st_mtime)
        tool(command, "--target", site)
        assert not pyc.exists()
        assert int(cache.stat().st_mtime) != old


def test_mode_is_kept(tool, site):
    installed(site, SERVER).chmod(0o600)
    tool("apply", "--target", site)
    assert installed(site, SERVER).stat().st_mode & 0o777 == 0o600


def test_hard_links_are_not_written_through(tool, site, tmp_path):
    """Installers may link files into a cache that others share."""
    shared = tmp_path / "shared.py"
    os.link(installed(site, SERVER), shared)
    tool("apply", "--target", site)
    assert shared.read_text() == toys.BASE[SERVER]


# --- refusals ---------------------------------------------------------------------------


def test_modified_base_is_refused(tool, site, capsys):
    installed(site, SERVER).write_text(toys.BASE[SERVER] + "# mine\n")
    before = toys.snapshot(site)
    assert tool("apply", "--target", site) == Exit.MODIFIED
    error = capsys.readouterr().err
    assert SERVER in error and "remedy: pip install --no-deps --force-reinstall" in error
    assert tool("status", "--target", site) == Exit.MODIFIED
    assert tool("check", "--target", site) == Exit.MODIFIED
    assert tool("revert", "--target", site) == Exit.MODIFIED
    assert toys.snapshot(site) == before


def test_edit_after_apply_is_never_lost(tool, series, site, capsys):
    tool("apply", "--target", site)
    installed(site, SERVER).write_text(series.top[SERVER] + "# mine\n")
    before = toys.snapshot(site)
    for command in ("apply", "revert", "status", "check"):
        assert tool(command, "--target", site) == Exit.MODIFIED
    assert toys.snapshot(site) == before


def test_foreign_new_file_is_refused(tool, site):
    toys.write_tree(site, {HOOKS.removeprefix("python/"): "MINE = 1\n"})
    assert tool("apply", "--target", site) == Exit.MODIFIED


def test_wrong_version(tool, tmp_path, capsys):
    site = toys.make_wheel(tmp_path / "other", version="1.2.4")
    for command in ("apply", "status", "check"):
        assert tool(command, "--target", site) == Exit.WRONG_VERSION
    assert "sglang==1.2.3" in capsys.readouterr().err


def test_other_build_of_the_version(tool, tmp_path):
    files = {**toys.BASE, SERVER: toys.BASE[SERVER] + "# other build\n"}
    site = toys.make_wheel(tmp_path / "other", files)
    assert tool("apply", "--target", site) == Exit.WRONG_VERSION


def test_not_installed(tool, tmp_path):
    (tmp_path / "empty").mkdir()
    assert tool("status", "--target", tmp_path / "empty") == Exit.WRONG_VERSION
    assert tool("status", "--python", tmp_path / "no-python") == Exit.USAGE


def test_two_versions_side_by_side(tool, site):
    toys.make_wheel(site, version="1.2.2")
    assert tool("apply", "--target", site) == Exit.WRONG_VERSION


def test_usage(tool, series, site):
    with pytest.raises(SystemExit) as caught:
        tool("explode")
    assert caught.value.code == Exit.USAGE
    assert tool("status", "--up-to", "no.patch", "--target", site) == Exit.USAGE
    (series.directory / "UPSTREAM").unlink()
    assert tool("status", "--target", site) == Exit.USAGE


@pytest.mark.parametrize("shift", ["fuzz", "offset"])
def test_patch_that_does_not_apply(tool, series, site, capsys, shift):
    path = series.directory / "server-line.patch"
    text = path.read_text()
    if shift == "fuzz":
        text = text.replace(" LINE_19 = 19\n", " LINE_19 = 1900\n")
    else:
        text = text.replace("@@ -18,7 +18,7 @@", "@@ -19,7 +19,7 @@")
    assert text != path.read_text()
    path.write_text(text)
    before = toys.snapshot(site)
    assert tool("apply", "--target", site) == Exit.DOES_NOT_APPLY
    assert "server-line.patch" in capsys.readouterr().err
    assert tool("check", "--target", site) == Exit.DOES_NOT_APPLY
    assert tool("status", "--target", site) == Exit.NOT_APPLIED
    assert toys.snapshot(site) == before
    assert not (site / "sglang/.sam_patches").exists()


def test_refresh_repairs_offsets_only(tool, series, site):
    path = series.directory / "server-line.patch"
    good = path.read_text()
    path.write_text(good.replace("@@ -18,7 +18,7 @@", "@@ -15,7 +15,7 @@"))
    assert tool("refresh", "--target", site) == Exit.OK
    assert path.read_text() == good
    path.write_text(good.replace(" LINE_19 = 19\n", " LINE_19 = 1900\n"))
    assert tool("refresh", "--target", site) == Exit.DOES_NOT_APPLY


def test_read_only_is_seen_before_anything_is_touched(tool, site, monkeypatch, capsys):
    real = os.access
    frozen = installed(site, CACHE).parent
    monkeypatch.setattr(os, "access", lambda p, mode: p != frozen and real(p, mode))
    before = toys.snapshot(site)
    assert tool("apply", "--target", site) == Exit.READ_ONLY
    assert "read-only target" in capsys.readouterr().err
    assert toys.snapshot(site) == before
    assert not (site / "sglang/.sam_patches").exists()


def test_read_only_mount(series, site):
    """For real, also for root: the target is bind-mounted read-only in a mount namespace."""
    script = (
        'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 77; shift; exec "$@"'
    )
    tool = [sys.executable, toys.SCRIPTS / "patchtool.py"]
    args = ["apply", "--no-doctor", "--patches", series.directory, "--target", site]
    command = ["unshare", "-m", "sh", "-c", script, "sh", site, *tool, *args]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("mounting is not permitted here")
    assert done.returncode == Exit.READ_ONLY, done.stderr
    assert not (site / "sglang/.sam_patches").exists()


def test_error_in_the_middle_undoes(tool, site, monkeypatch):
    before = toys.snapshot(site)
    real, calls = os.replace, []

    def failing(source, target):
        if str(target).endswith(".py"):
            calls.append(target)
            if len(calls) == 2:
                raise PermissionError(13, "no")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    assert tool("apply", "--target", site) == Exit.READ_ONLY
    assert toys.snapshot(site) == before
    assert tool("status", "--target", site) == Exit.NOT_APPLIED


def test_result_is_verified(tool, site, monkeypatch):
    before = toys.snapshot(site)
    real = store_module.Store._put

    def lossy(self, path, content, executable):
        real(
            self,
            path,
            content and content.replace(b"LINE_20 = 21", b"LINE_20 = 22"),
            executable,
        )

    monkeypatch.setattr(store_module.Store, "_put", lossy)
    # The damage is foreign to the rollback too, so it must not be papered over.
    assert tool("apply", "--target", site) == Exit.HALF_APPLIED
    assert tool("status", "--target", site) == Exit.HALF_APPLIED
    assert toys.snapshot(site) != before


# --- life after apply -------------------------------------------------------------------


def test_reinstall_is_noticed(tool, series, site, capsys):
    tool("apply", "--target", site)
    toys.make_wheel(site)
    capsys.readouterr()
    assert tool("status", "--target", site) == Exit.NOT_APPLIED
    assert "re-installed" in capsys.readouterr().out
    assert tool("apply", "--target", site) == Exit.OK
    expect_top(site, series.top)
    before_patches = toys.BASE[CACHE]
    tool("revert", "--target", site)
    assert installed(site, CACHE).read_text() == before_patches


def test_revert_after_reinstall_removes_what_was_added(tool, site):
    before = toys.snapshot(site)
    tool("apply", "--target", site)
    toys.make_wheel(site)
    assert tool("revert", "--target", site) == Exit.OK
    assert toys.snapshot(site) == before


def test_revert_after_upgrade(tool, site):
    tool("apply", "--target", site)
    shutil.rmtree(site / f"sglang-{toys.VERSION}.dist-info")
    newer = {path: text + "# newer\n" for path, text in toys.BASE.items()}
    toys.make_wheel(site, newer, version="1.2.4")
    assert tool("status", "--target", site) == Exit.WRONG_VERSION
    assert tool("revert", "--target", site) == Exit.OK
    assert not installed(site, HOOKS).exists()
    assert installed(site, CACHE).read_text() == newer[CACHE]


def test_partial_reinstall_is_completed(tool, series, site):
    tool("apply", "--target", site)
    installed(site, SERVER).write_text(toys.BASE[SERVER])
    assert tool("status", "--target", site) == Exit.HALF_APPLIED
    assert tool("apply", "--target", site) == Exit.OK
    expect_top(site, series.top)


def test_lost_state_is_rebuilt(tool, series, site):
    before = toys.snapshot(site)
    tool("apply", "--target", site)
    shutil.rmtree(site / "sglang/.sam_patches")
    assert tool("status", "--target", site) == Exit.OK
    assert tool("apply", "--target", site) == Exit.OK
    assert [p["name"] for p in state_of(site)["patches"]] == series.names
    shutil.rmtree(site / "sglang/.sam_patches")
    assert tool("revert", "--target", site) == Exit.OK
    after = toys.snapshot(site)
    assert after == before


def test_moving_to_another_series(tool, series, site):
    before = toys.snapshot(site)
    assert tool("apply", "--up-to", "server-line.patch", "--target", site) == Exit.OK
    expect_top(site, series.tops[1])
    assert tool("status", "--up-to", "server-line.patch", "--target", site) == Exit.OK
    assert tool("status", "--target", site) == Exit.OUTDATED
    assert tool("check", "--target", site) == Exit.OUTDATED
    assert tool("apply", "--target", site) == Exit.OK
    expect_top(site, series.top)
    assert tool("apply", "--up-to", "step-hook.patch", "--target", site) == Exit.OK
    expect_top(site, series.tops[0])
    assert installed(site, SERVER).read_text() == toys.BASE[SERVER]
    assert tool("revert", "--target", site) == Exit.OK
    assert toys.snapshot(site) == before


def test_damaged_state_is_reported(tool, site):
    tool("apply", "--target", site)
    (site / "sglang/.sam_patches/state.json").write_text("{")
    assert tool("status", "--target", site) == Exit.HALF_APPLIED


def test_below_another_git_repository(tool, series, tmp_path):
    """git itself would skip every hunk here and report success."""
    outer = toys.make_checkout(tmp_path / "outer", {"x.py": "1\n"}, tag=None)
    site = toys.make_wheel(outer / "venv/site-packages")
    assert tool("apply", "--target", site) == Exit.OK
    expect_top(site, series.top)
    assert tool("revert", "--target", site) == Exit.OK


def test_target_found_through_its_interpreter(tool, site, tmp_path, monkeypatch):
    """The interpreter is the test's own; what it imports is the toy."""
    monkeypatch.setenv("PYTHONPATH", str(site))
    assert tool("apply", "--python", sys.executable) == Exit.OK
    assert (site / "sglang/.sam_patches/state.json").is_file()


def test_doctor_informs_and_never_decides(series, site, tmp_path, monkeypatch, capsys):
    import patchtool

    fake = tmp_path / "overlay"
    toys.write_tree(fake, {"sam/__init__.py": "", "sam/doctor.py": "raise SystemExit(3)\n"})
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{fake}")
    monkeypatch.chdir(tmp_path)
    args = ["apply", "--patches", str(series.directory), "--python", sys.executable]
    assert patchtool.main(args) == Exit.OK
    assert "doctor failed (3); the patches stay applied" in capsys.readouterr().out
    assert (site / "sglang/.sam_patches/state.json").is_file()
