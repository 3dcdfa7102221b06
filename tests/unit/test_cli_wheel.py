"""The wheel, installed where the repository is not: patches inside, console script, licence."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from sam import __version__

pytest.importorskip("sglang", reason="patches are applied to a copy of it")

from sam.testing.unpatched import make_unpatched_site
from tests.unit.wheel_env import build_wheel, install_wheel

REPO = Path(__file__).resolve().parents[2]
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
SERIES = [
    line
    for line in (REPO / "patches" / "series").read_text().splitlines()
    if line.endswith(".patch")
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return install_wheel(wheel, tmp_path_factory.mktemp("venv"))


def sam(installed, *words):
    done = subprocess.run(
        [str(installed / "bin" / "sam"), *map(str, words)],
        capture_output=True, text=True, cwd="/", timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_what_is_inside(wheel):
    assert wheel.name == f"agent_sam-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (licence,) = (n for n in names if n.endswith("licenses/LICENSE"))
        assert hashlib.sha256(archive.read(licence)).hexdigest() == APACHE_2
        (notice,) = (n for n in names if n.endswith("licenses/NOTICE"))
        assert b"SGLang" in archive.read(notice)
        for name in ["series", "UPSTREAM", "BASE.sha256", *SERIES]:
            packed = archive.read(f"sam/_patchset/patches/{name}")
            assert packed == (REPO / "patches" / name).read_bytes()
    assert not [n for n in names if n.startswith(("tests/", "scripts/"))]


def test_it_runs_from_there(installed):
    assert sam(installed, "--version") == (0, f"sam {__version__}\n", "")
    code = "import sam; print(sam.__file__)"
    python = installed / "bin" / "python"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/")
    assert found.stdout.startswith(str(installed))
    assert sam(installed, "patch", "status", "--help")[0] == 0


def test_patches_from_the_wheel(installed, tmp_path):
    site = make_unpatched_site(tmp_path / "site")
    at = ("--target", site)
    assert sam(installed, "patch", "status", *at)[0] == 8
    code, out, _ = sam(installed, "patch", "apply", "--json", *at)
    report = json.loads(out)
    assert code == report["exit_code"] == 0 and report["status"]["verdict"] == "applied"
    assert [patch["name"] for patch in report["status"]["patches"]] == SERIES
    assert sam(installed, "patch", "check", *at)[0] == 0
    code, out, _ = sam(installed, "patch", "revert", "--json", *at)
    assert code == 0 and json.loads(out)["status"]["verdict"] == "not applied"
    code, out, err = sam(installed, "patch", "apply", "--json", "--target", tmp_path)
    assert code == json.loads(out)["exit_code"] != 0 and json.loads(out)["error"] in err


def test_doctor_is_content_with_it(installed):
    code, out, err = sam(installed, "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0, (checks, err)
