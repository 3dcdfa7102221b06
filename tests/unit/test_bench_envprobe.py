"""`scripts/envprobe.py`: when an environment counts as ready, and how a torn one heals."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "envprobe.py"


@pytest.fixture
def env(tmp_path, monkeypatch):
    """An environment of toys: two pinned packages, the engine, and this package, all whole."""
    spec = importlib.util.spec_from_file_location("envprobe", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root, site = tmp_path / "repo", tmp_path / "venv" / "site"
    (root / "requirements").mkdir(parents=True)
    (root / "requirements" / "cpu.txt").write_text("# why\nFoo.Bar==1.0  # here\nbaz[x]==2.0\n")
    (root / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"purelib": str(site)})
    for name, version in (("foo_bar", "1.0"), ("baz", "2.0+cpu"), ("sglang", "3")):
        add(site, name, version)
    add(site, "agent_sam", "0", url=root.as_uri())
    return module.Environment(root, ["sglang==3"], tests=False)


def add(site, name, version, url=None):
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / name).mkdir()
    (site / name / "code.py").write_text("pass")
    (info / "METADATA").write_text("x")
    if url:
        (info / "direct_url.json").write_text(json.dumps({"url": url}))
    (info / "RECORD").write_text(f'{name}/code.py,sha256=x,4\n{name}/"a,b".pyc,,\n')


def test_ready_needs_the_stamp_and_every_version(env):
    assert env.problems() == [] and not env.is_ready()
    env.write_stamp()
    assert env.is_ready()


def test_a_changed_pin_or_requirement_ends_readiness(env):
    env.write_stamp()
    requirements = env.root / "requirements" / "cpu.txt"
    requirements.write_text(requirements.read_text() + "# a comment\n")
    assert not env.is_ready()
    env.pins = ["sglang==4"]
    assert env.problems() == ["sglang: 3, not 4"]


def test_tests_and_missing_packages_are_problems(env):
    env.tests = True
    needed = ["pytest", "pytest-timeout", "pytest-rerunfailures", "hypothesis"]
    assert env.problems() == [f"{name}: missing" for name in needed]
    env.tests = False
    (env.root / "requirements" / "cpu.txt").write_text("qux==1\n")
    assert env.problems() == ["qux: missing, not 1"]


def test_another_checkout_is_a_problem(env):
    info = next(env.site.glob("agent_sam-*.dist-info"))
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///elsewhere"}))
    assert any("agent-sam" in problem for problem in env.problems())


def test_whole_packages_are_left_alone(env):
    assert env.heal() == []


@pytest.mark.parametrize("damage", ["file", "size", "record", "metadata"])
def test_torn_packages_become_missing(env, damage):
    info = next(env.site.glob("baz-*.dist-info"))
    if damage == "file":
        (env.site / "baz" / "code.py").unlink()
    elif damage == "size":
        (env.site / "baz" / "code.py").write_text("p")
    else:
        (info / damage.upper()).unlink()
    assert env.heal() == ["baz-2.0+cpu"]
    assert not info.exists() and "baz" not in env.installed()


def test_a_patched_engine_is_whole_and_a_torn_one_goes_for_good(env):
    (env.site / "sglang" / "code.py").write_text("patched")
    assert env.heal() == []
    (env.site / "sglang" / "code.py").unlink()
    (env.site / "sglang" / "state").write_text("x")
    assert env.heal() == ["sglang-3"]
    assert not (env.site / "sglang").exists()


def test_leftovers_of_pip_are_removed(env):
    (env.site / "~orch").mkdir()
    env.heal()
    assert not (env.site / "~orch").exists()
