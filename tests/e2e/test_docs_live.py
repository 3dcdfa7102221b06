"""The documents followed as they are written: the wheel in an environment of its own, the patches
out of it, a server, and the commands and programs of quick start, cookbook and command line."""

import json
import os
import re
import subprocess
import sys
import time

import psutil
import pytest

from sam.testing.server import ServerProcess
from sam.testing.unpatched import make_unpatched_site
from tests.e2e.conftest import REPO, STRICT_ENV
from tests.unit.docs_commands import SHELL
from tests.unit.docs_pages import blocks
from tests.unit.wheel_env import build_wheel, install_wheel

pytestmark = pytest.mark.e2e
KEY = "sk-docs"
LANGGRAPH = REPO / ".cache" / "langgraph"
QUICK = re.compile(r"^(export|curl|sam) ")
# Those that need more than a server: a trace, an hour, or another SGLang.
NOT_LIVE = re.compile(r"^sam (patch|bench|sim|doctor|top($| +#))")


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """bin/ of an environment with the wheel, and a fresh SGLang that its `sam` has patched."""
    place = tmp_path_factory.mktemp("clean")
    bin_dir = install_wheel(build_wheel(place), place / "venv") / "bin"
    site = make_unpatched_site(place / "site")
    for command in ("apply", "check"):
        line = [bin_dir / "sam", "patch", command, "--target", site]
        done = subprocess.run(line, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return bin_dir, site


@pytest.fixture(scope="module")
def server(server_args, clean, tmp_path_factory):
    """A server of that environment whose one key may do everything, as in the documents."""
    bin_dir, site = clean
    args = server_args("--radix-cache-backend", "sam", "--api-key", KEY, "--enable-metrics")
    env = STRICT_ENV | {"PYTHONPATH": str(site)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(bin_dir / "python"))
        patch.chdir(tmp_path_factory.mktemp("cwd"))
        process = ServerProcess(args, env=env)
        process.__enter__()
    try:
        yield process
        assert "Traceback" not in process.log_text()
    finally:
        process.stop()


@pytest.fixture
def run(server, clean, tmp_path):
    """Run a block in bash or Python, with the server as SAM_URL."""
    env = os.environ | {"SAM_URL": server.url, "SAM_API_KEY": KEY}
    env["PATH"] = f"{clean[0]}:{env['PATH']}"

    def run_text(text, *interpreter, **more):
        script = tmp_path / "block"
        script.write_text(text)
        done = subprocess.run(
            [*(interpreter or ("bash", "-euo", "pipefail")), str(script)],
            env=env | more,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run_text


def shell_of(page):
    """Blocks of a page that a server is enough for, without what sets the address."""
    for block in blocks(REPO / "docs" / page):
        if block.language in SHELL and not block.not_run:
            lines = [line for line in block.text.splitlines() if not NOT_LIVE.match(line)]
            text = "\n".join(line for line in lines if not line.startswith("export SAM_")) + "\n"
            if QUICK.match(text):
                yield text


def programs_of(page):
    return [
        block.text
        for block in blocks(REPO / "docs" / page)
        if block.language == "python" and not block.not_run
    ]


def sessions(run):
    """State by session, as the command line shows it."""
    report = json.loads(run("sam sessions --json\n"))
    return {one["session_id"]: one for one in report["sessions"]}


def test_the_server_is_the_wheels(server, clean):
    command = psutil.Process(server._process.pid).cmdline()
    assert command[0] == str(clean[0] / "python")
    code = "import sam, sglang; print(sam.__file__, sglang.__file__)"
    env = os.environ | {"PYTHONPATH": str(clean[1])}
    line = [clean[0] / "python", "-c", code]
    found = subprocess.run(line, env=env, cwd="/", capture_output=True, text=True).stdout.split()
    assert found[0].startswith(str(clean[0].parent)) and found[1].startswith(str(clean[1]))


def test_quick_start(run):
    *steps, last = shell_of("quickstart.md")
    assert len(steps) >= 3
    for step in steps:
        step = step.replace("curl -s ", f"curl -sf -H 'Authorization: Bearer {KEY}' ")
        run(step)
    assert sessions(run)["leader:coder"]["parent_session_id"] == "leader"
    run(last)
    assert sessions(run)["leader:coder"]["state"] == "ended"


def test_cookbook_with_curl(run):
    begin, tool, end = (text.replace("curl -s ", "curl -sf ") for text in shell_of("cookbook.md"))
    assert '"finish_reason"' in run(begin)
    assert '"session.demote"' in run(tool)
    assert sessions(run)["curl:fixer"]["state"] in ("idle", "offloaded")
    run(end)
    assert sessions(run)["curl:fixer"]["state"] == "ended"


def test_cookbook_in_python(run):
    by_hand, with_client, _ = programs_of("cookbook.md")
    run(by_hand, "python")
    assert sessions(run)["byhand:planner"]["state"] == "idle"
    assert "ignored=0" in run(with_client, "python")
    wait_until_ended(run, "cookbook")


def wait_until_ended(run, part):
    """All sessions in whose id `part` occurs, and there are some."""
    deadline = time.monotonic() + 30
    while {one["state"] for name, one in sessions(run).items() if part in name} != {"ended"}:
        assert time.monotonic() < deadline, sessions(run)


@pytest.mark.skipif(
    not (LANGGRAPH / ".sam-stamp").exists(), reason="run scripts/setup_langgraph.sh first"
)
def test_cookbook_with_langgraph(run, clean):
    """In LangGraph's environment, which has nothing of ours but the wheel's `sam`."""
    *_, program = programs_of("cookbook.md")
    assert "StateGraph" in program
    (wheel,) = clean[0].parent.glob("lib/python*/site-packages")
    said = run(program, str(LANGGRAPH / "bin" / "python"), PYTHONPATH=str(wheel))
    assert said.startswith("4 ") and "ignored=0" in said
    wait_until_ended(run, "thread-1")


def request():
    """A chat request with as many messages and tools as the page's ranges count."""
    roles = ("user", "assistant")
    words = "go on with the work"
    functions = [{"name": f"tool_{i}", "description": words, "parameters": {}} for i in range(4)]
    return {
        "model": "default",
        "max_tokens": 4,
        "messages": [{"role": roles[i % 2], "content": f"{i}: {words}"} for i in range(13)],
        "tools": [{"type": "function", "function": function} for function in functions],
    }


def test_every_command_of_the_command_line_page(run, tmp_path):
    (tmp_path / "request.json").write_text(json.dumps(request()))
    ask = ""
    for name in ("task-7", "task-7:coder"):
        lineage = {"session_id": name, "parent_session_id": "task-7"}
        (tmp_path / f"{name}.json").write_text(json.dumps(request() | {"agent_hint": lineage}))
        ask += (
            "curl -sf $SAM_URL/v1/chat/completions -H 'Content-Type: application/json'"
            f" -H 'Authorization: Bearer {KEY}' -d @{name}.json >/dev/null\n"
        )
    lines = [line for text in shell_of("cli.md") for line in text.splitlines()]
    commands = [line.split(" #")[0].strip() for line in lines if line.startswith("sam ")]
    assert len(commands) > 12
    # 6: nothing of it is in the cache, where the line before has moved it away.
    allowed = [f"{line} || [ $? -eq 6 ] || (echo {line!r} >&2; exit 1)\n" for line in commands]
    run("".join(ask + line if " hint " in line else line for line in [ask, *allowed]))
