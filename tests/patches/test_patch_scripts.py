"""The thin entry points, bare interpreters, and the repository's own patches."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import patch_toys as toys
import pytest
from patchlib.errors import EXIT_HELP, Exit
from patchlib.rules import lint
from patchlib.series import load_series

OWN = sorted(
    {*toys.SCRIPTS.glob("patchlib/*.py")}
    | {toys.SCRIPTS / name for name in ("patchtool.py", "lint_patches.py", "check_drift.py")}
)


def shell(name, *args):
    env = os.environ | {"SAM_PYTHON": sys.executable}
    command = [str(toys.SCRIPTS / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd="/")


def test_apply_script(series, site):
    options = ("--patches", series.directory, "--target", site)
    assert shell("apply_patches.sh", *options, "--no-doctor").returncode == Exit.OK
    assert shell("apply_patches.sh", "status", *options).returncode == Exit.OK
    assert shell("apply_patches.sh", "revert", *options).returncode == Exit.OK
    assert shell("apply_patches.sh", "check", *options).returncode == Exit.NOT_APPLIED


def test_export_script(series, tmp_path):
    checkout = toys.make_checkout(tmp_path / "checkout")
    done = shell("export_upstream.sh", checkout, "--patches", series.directory)
    assert done.returncode == Exit.OK, done.stderr
    assert done.stdout.count("sam/") == 3


def test_help_documents_every_exit_code():
    for command in ([], ["apply"], ["status"], ["export"]):
        done = toys.run_script("patchtool.py", *command, "--help")
        assert done.returncode == 0
        assert EXIT_HELP in done.stdout
    for code in Exit:
        assert f"\n  {int(code)}  " in EXIT_HELP
    assert "SYMBOL" in toys.run_script("check_drift.py", "--help").stdout


def test_standard_library_only():
    """They run where nothing is installed."""
    for path in OWN:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top == "patchlib" or top in sys.stdlib_module_names, (path, name)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(toys.SCRIPTS / "patchtool.py"), "--help"],
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr


def test_sizes():
    for path in OWN:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < 45, (path, node.name)


@pytest.fixture(scope="module")
def own_series():
    if not (toys.REPO / "patches/series").is_file():
        pytest.skip("no series yet")
    return load_series(toys.REPO / "patches")


def test_own_series_is_clean(own_series):
    """The rules that need no base; the others run in the lint, where the wheel is."""
    findings = [str(f) for f in lint(own_series, toys.REPO) if not f.warning]
    assert findings == []
