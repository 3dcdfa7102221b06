"""`--sam-*` on SGLang's own command line."""

import argparse
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("sglang")

from sam.config import ConfigError, SamConfig, load_config
from sam.srt.entrypoints.cli_args import add_arguments, export

FIELDS = [field.name for field in msgspec.structs.fields(SamConfig)]


def parsed(*argv, backend="sam"):
    parser = argparse.ArgumentParser()
    parser.add_argument("--radix-cache-backend", default=backend)
    add_arguments(parser)
    return parser.parse_args(argv)


def config_of(*argv, env=None, **more):
    env = dict(env or {})
    export(parsed(*argv, **more), env)
    return load_config(env)


def test_options_become_settings_and_win_over_the_environment():
    assert config_of() == SamConfig()
    given = config_of(
        "--sam-strict-hints",
        "--sam-max-sessions=7",
        "--sam-prefetch-lease-s",
        "1.5",
        env={"SAM_MAX_SESSIONS": "5", "SAM_MAX_HINT_RESULTS": "3"},
    )
    assert given == SamConfig(
        strict_hints=True, max_sessions=7, prefetch_lease_s=1.5, max_hint_results=3
    )
    off = config_of("--sam-strict-hints", "false", env={"SAM_STRICT_HINTS": "1"})
    assert not off.strict_hints


@pytest.mark.parametrize(
    "argv", [("--sam-max-sessions", "many"), ("--sam-tree-core", "go"), ("--sam-nothing", "1")]
)
def test_unusable_options_are_refused_by_the_parser(argv, capsys):
    with pytest.raises(SystemExit):
        parsed(*argv)
    assert argv[0] in capsys.readouterr().err


def test_an_option_without_its_backend_is_an_error():
    with pytest.raises(ConfigError, match="--sam-strict-hints needs --radix-cache-backend sam"):
        config_of("--sam-strict-hints", backend="radix")
    assert config_of(backend="radix") == SamConfig()


SERVER = """
import os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
try:
    prepare_server_args(sys.argv[1:])
finally:
    print("strict:", os.environ.get("SAM_STRICT_HINTS"))
"""


def test_the_servers_own_parser_knows_them():
    base = [sys.executable, "-c", SERVER]
    shown = subprocess.run([*base, "--help"], capture_output=True, text=True, timeout=120)
    options = [f"--sam-{name.replace('_', '-')}" for name in FIELDS]
    assert all(option in shown.stdout for option in options), shown.stderr[-2000:]
    argv = ["--model-path", "none", "--radix-cache-backend", "sam", "--sam-strict-hints"]
    ran = subprocess.run([*base, *argv], capture_output=True, text=True, timeout=120)
    assert "strict: true" in ran.stdout, ran.stderr[-2000:]


def test_the_operating_guide_lists_every_setting_with_its_default():
    text = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `--sam-")]
    listed = {row[1].strip("`"): row[2] for row in rows}
    shown = {name: str(value) for name, value in msgspec.structs.asdict(SamConfig()).items()}
    defaults = {
        f"SAM_{name.upper()}": value.lower().removesuffix(".0") for name, value in shown.items()
    }
    assert listed == defaults
    assert [row[0] for row in rows] == [f"| `--sam-{n.replace('_', '-')}`" for n in FIELDS]
