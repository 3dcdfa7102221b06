"""The real client as a process beside a real server. Run with `scripts/test.sh --client`.

The client lives in its own environment (scripts/setup_client_env.sh): its packages and the
server's do not fit into one.
"""

import json
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS, ServerProcess
from sam.testing.tiny_model import build_tiny_model

REPO = Path(__file__).resolve().parents[2]
ENVS = Path(os.environ.get("SAM_CLIENT_ENVS", REPO / ".cache" / "client"))
NEW, OLD = "0.1.19.post2", "0.1.17.post2"
TOTAL_TOKENS = 16_384
ANSWER_TOKENS = 8
API_KEY = "sk-client"


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    skip = pytest.mark.skip(reason="the real client: scripts/test.sh --client")
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if not os.environ.get("SAM_CLIENT_TESTS"):
                item.add_marker(skip)


class Client:
    """One client process. `client(command, **arguments)` returns its value or raises."""

    def __init__(self, version, url, folder):
        python = ENVS / f"openjiuwen-{version}" / "bin" / "python"
        assert python.exists(), f"run scripts/setup_client_env.sh {version}"
        self.version = version
        self.log = folder / f"client-{version}.log"
        driver = Path(__file__).with_name("driver.py")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [str(python), str(driver), url, str(ANSWER_TOKENS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
            )
        assert self._read() == {"ready": True}

    def __call__(self, command, **arguments):
        self.process.stdin.write(json.dumps({"do_": command, **arguments}) + "\n")
        self.process.stdin.flush()
        reply = self._read()
        if "error" in reply:
            raise RuntimeError(f"{command}: {reply['error']}")
        return reply["value"]

    def _read(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client ended\n{self.log.read_text()[-3_000:]}")
        return json.loads(line)

    def stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


class Watched(ServerProcess):
    """The server, seen from outside: what `/sessions`, `/kv_hints` and `/metrics` say."""

    def sessions(self):
        report = self.request("/sessions?limit=1000")["sessions"]
        return {session["session_id"]: session for session in report}

    def device(self, session_id):
        """Tokens of a session on the device, private and shared."""
        return self.sessions()[session_id]["tokens"]["device"]

    def host(self, session_id):
        return self.sessions()[session_id]["tokens"]["host"]

    def summary(self):
        return self.request("/sessions")["summary"]

    def settled(self):
        """The summary once no action is under way."""
        deadline = time.monotonic() + 20
        while True:
            summary = self.summary()
            if not summary["pending_actions"]:
                return summary
            assert time.monotonic() < deadline, summary
            time.sleep(0.02)

    def outcomes(self, told):
        """Final outcomes of the messages that the client was told of: one list of actions."""
        return [action for kv_hints in told for action in self._final(kv_hints["message_id"])]

    def _final(self, message_id):
        request = urllib.request.Request(f"{self.url}/kv_hints/{message_id}")
        request.add_header("Authorization", f"Bearer {API_KEY}")
        deadline = time.monotonic() + 10
        while True:
            with urllib.request.urlopen(request, timeout=30) as response:
                actions = json.load(response)["actions"]
            if not {"accepted", "deferred"} & {action["status"] for action in actions}:
                return actions
            assert time.monotonic() < deadline, f"not final: {actions}"
            time.sleep(0.02)

    def hit_tokens(self, tier):
        """Prompt tokens served from `device` or `host` since the start."""
        pattern = rf'^sglang:cached_tokens_total\{{[^}}]*cache_source="{tier}"[^}}]*\}} (\S+)$'
        found = re.findall(pattern, self.request("/metrics"), re.MULTILINE)
        return sum(float(value) for value in found)

    def press(self):
        """Traffic without sessions, as much as the device pool holds: what may go, goes."""
        for first in range(8):
            ids = [400 + first, *((300 + 7 * i + first) % 1_500 + 300 for i in range(2_000))]
            self.generate(ids, max_new_tokens=1)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    model = build_tiny_model(REPO / ".cache" / "models" / "tiny", preset="tiny")
    args = [
        *CPU_SERVER_ARGS, *CPU_HICACHE_ARGS, "--model-path", str(model),
        "--max-total-tokens", str(TOTAL_TOKENS), "--radix-cache-backend", "sam",
        "--enable-metrics", "--tool-call-parser", "pythonic",
        "--constrained-json-disable-any-whitespace",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Watched(args, env={"SAM_RAISE_ON_ERROR": "1"}, log_path=log) as process:
        yield process
        assert process.settled()["errors"] == 0
        assert "Traceback" not in process.log_text()


@pytest.fixture(scope="session", params=[NEW, OLD])
def client(request, server, tmp_path_factory):
    client = Client(request.param, server.url, tmp_path_factory.mktemp("client"))
    yield client
    switched_off = client("offload_switches")
    client("close")
    client.stop()
    assert switched_off == []


@pytest.fixture(autouse=True)
def nothing_cached(request, server, client):
    """Each test has session ids of its own, and starts with an empty cache."""
    server.settled()
    server.flush_cache()
    client("told")
    client("during_tools")


@pytest.fixture
def sid(request, client):
    """A prefix for session ids that no other test uses."""
    return f"{client.version}:{request.node.name.split('[')[0]}"


@pytest.fixture
def new_client_only(client):
    if client.version != NEW:
        pytest.skip("the older client has no such part")
