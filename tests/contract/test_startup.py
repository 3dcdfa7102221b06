"""What stops a start, and that its text says what to do."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness_pools import server_settings

from sam import plugin
from sam.config import ConfigError, load_config
from sam.srt import upstream
from sam.testing.unpatched import make_unpatched_site

VERIFY = "from sam.srt import upstream; upstream.verify()"


def run_python(*args, path):
    env = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@contextmanager
def serving_settings():
    settings = {"page_size": 1, "hicache": False, "host_ratio": 1.0}
    override = server_settings(write_policy="write_back", **settings)
    override.install()
    try:
        yield
    finally:
        override.restore()


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory):
    return make_unpatched_site(tmp_path_factory.mktemp("site"))


def test_this_environment_is_ready():
    upstream.verify()


def test_missing_patches_are_named_with_the_remedy(unpatched):
    run = run_python("-c", VERIFY, path=unpatched)
    assert run.returncode == 1
    assert "PatchMissing" in run.stderr and "scripts/apply_patches.sh" in run.stderr
    for name in upstream.PATCH_MARKERS:
        assert name in run.stderr


def test_doctor_fails_without_patches_and_says_why(unpatched):
    run = run_python("-m", "sam.doctor", path=unpatched)
    assert run.returncode == 1
    assert "FAIL patches" in run.stdout and "scripts/apply_patches.sh" in run.stdout
    assert "ok   sglang" in run.stdout


def test_plugin_leaves_an_unpatched_sglang_alone(unpatched):
    script = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.mem_cache.registry import registered_radix_cache_backends as names\n"
        "print(names())"
    )
    run = run_python("-c", script, path=unpatched)
    assert run.returncode == 0 and "'sam'" in run.stdout
    assert "Failed" not in run.stdout + run.stderr


def test_wrong_version_is_an_error_with_the_remedy(tmp_path):
    info = tmp_path / "sglang-0.5.22.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    run = run_python("-c", VERIFY, path=tmp_path)
    assert run.returncode == 1
    assert "needs sglang==0.5.23, found 0.5.22" in run.stderr and "pip install" in run.stderr


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"is_hybrid_swa": True}, "hybrid sliding-window models are not supported"),
        ({"is_hybrid_ssm": True}, "hybrid Mamba/linear-attention models are not supported"),
        ({"params": SimpleNamespace(eviction_policy="lfu")}, "--sam-retention-policy"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
    ],
)
def test_what_cannot_take_effect_is_refused(change, text):
    usual = {"is_hybrid_swa": False, "is_hybrid_ssm": False, "disable_radix_cache": False}
    with serving_settings(), pytest.raises(ValueError, match="cache-backend sam: ") as error:
        plugin.create_cache(SimpleNamespace(**usual | change))
    assert text in str(error.value) and "start without" in str(error.value)


def test_patch_markers_are_those_of_the_series():
    markers = {}
    for path in (Path(__file__).resolve().parents[2] / "patches").glob("*.patch"):
        line = next(x for x in path.read_text().splitlines() if x.startswith("Marker: "))
        markers[path.stem] = line.removeprefix("Marker: ")
    assert markers == upstream.PATCH_MARKERS


@pytest.mark.parametrize("value", ["many", "-1", "1.5"])
def test_bad_setting_names_itself(value):
    with pytest.raises(ConfigError, match="SAM_MAX_SESSIONS"):
        load_config({"SAM_MAX_SESSIONS": value})


@pytest.mark.parametrize(
    "params, components, reason",
    [
        ({"is_eagle": True}, None, "bigram keys"),
        ({}, ("FULL", "SWA"), "only full attention"),
    ],
)
def test_the_python_core_serves_where_the_rust_core_cannot(
    monkeypatch, caplog, params, components, reason
):
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from sam.srt.mem_cache import core_choice

    made = []
    monkeypatch.setattr(core_choice, "SessionTreeCore", lambda *args: made.append(args))
    names = components or ("FULL",)
    given = SimpleNamespace(**{"is_eagle": False} | params)
    core_choice.create_core(given, {ComponentType[name]: None for name in names})
    assert len(made) == 1 and reason in caplog.text


def test_the_python_core_serves_without_the_rust_extension(monkeypatch, caplog):
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from sam.srt.mem_cache import core_choice

    monkeypatch.setattr(core_choice, "resolve_tree_core_backend", lambda name, params: name)
    monkeypatch.setitem(sys.modules, "sam.srt.mem_cache.shadow_core", None)
    monkeypatch.setattr(core_choice, "SessionTreeCore", lambda *args: "python")
    given = SimpleNamespace(is_eagle=False)
    assert core_choice.create_core(given, {ComponentType.FULL: None}) == "python"
    assert "no Rust tree core here" in caplog.text
