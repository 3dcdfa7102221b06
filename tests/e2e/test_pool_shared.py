"""Two real servers on one Mooncake, routers in front of them, and the pool's master killed.

Needs `scripts/pool.sh install`, the routers `scripts/pool.sh router`. One pool and two servers
for all tests, which use sessions and texts of their own.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
from contextlib import contextmanager
from pathlib import Path

import pytest

from sam.testing.pool import MooncakePool, mooncake_folder
from sam.testing.server import ServerProcess, free_port
from tests.e2e.conftest import REPO
from tests.e2e.test_pool import ENV, FINAL, PAGE, SYSTEM, ask, outcome, pool_args

pytestmark = pytest.mark.e2e

UNTIL_S = 60.0
ROUTERS = Path(os.environ.get("SAM_ROUTER_LIB", REPO / ".cache" / "router"))


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    if mooncake_folder() is None:
        pytest.skip("no Mooncake: run scripts/pool.sh install")
    pool = MooncakePool(tmp_path_factory.mktemp("pool"))
    pool.start()
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def servers(server_args, pool):
    layout = ("--hicache-mem-layout", "page_first_direct")
    args = pool_args(server_args, "mooncake", *layout, **pool.extra_config())
    env = {**ENV, "PYTHONPATH": str(mooncake_folder())}
    with ServerProcess(args, env=env) as a, ServerProcess(args, env=env) as b:
        yield a, b


def text_of(name):
    return SYSTEM + f" This is for {name}. " + f"{name} works. " * 40


def prefetched(server, session_id):
    """The outcome of a prefetch by id, as soon as the pool has the session's manifest."""
    until = time.monotonic() + UNTIL_S
    while True:
        found = outcome(server, session_id, "prefetch")
        if found["status"] != "missing" or time.monotonic() > until:
            return found
        time.sleep(0.1)


def check_no_errors(servers):
    for server in servers:
        summary = server.request("/sessions")["summary"]
        assert (summary["errors"], summary["pool"]["errors"]) == (0, 0)


def test_two_servers_share_sessions(servers):
    """Offloaded on A, prefetched by id on B before its request, device hit on B; evicted
    there, A's next request is computed and says the same."""
    a, b = servers
    prompt = text_of("moving")
    first, meta = ask(a, "moving", prompt)
    n_tokens = meta["prompt_tokens"]
    assert outcome(a, "moving", "offload")["status"] == "done"
    found = prefetched(b, "moving")
    assert found["tokens"]["device"] >= n_tokens - PAGE, found
    again, meta = ask(b, "moving", prompt)
    assert again == first
    assert meta["cached_tokens_details"]["device"] >= n_tokens - PAGE
    ended = outcome(b, "moving", "evict")
    assert ended["status"] == "done" and ended["tokens"]["pool"] > 0
    a.flush_cache()
    cold, meta = ask(a, "moving", prompt)
    assert cold == first
    assert meta["cached_tokens"] <= 2 * PAGE
    check_no_errors(servers)


def test_a_sibling_keeps_what_it_shares(servers):
    """The one that ended is gone for B, the other comes there whole."""
    a, b = servers
    shared = text_of("family")
    texts = {name: shared + f" {name} goes on. " * 30 for name in ("gone", "stays")}
    answers = {name: ask(a, name, prompt) for name, prompt in texts.items()}
    assert outcome(a, "stays", "offload")["status"] == "done"
    assert outcome(a, "gone", "evict")["tokens"]["pool"] > 0
    assert outcome(b, "gone", "prefetch")["status"] == "missing"
    found = prefetched(b, "stays")
    n_tokens = answers["stays"][1]["prompt_tokens"]
    assert found["tokens"]["device"] >= n_tokens - PAGE, found
    for name, prompt in texts.items():
        assert ask(b, name, prompt)[0] == answers[name][0]
    check_no_errors(servers)


@contextmanager
def running(command, url, env=None):
    """A router, as something to send requests to."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    router = ServerProcess([], url=url)
    try:
        until = time.monotonic() + UNTIL_S
        while True:
            try:
                router.request("/v1/models", timeout_s=5)
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None and time.monotonic() < until, "no router"
                time.sleep(0.2)
        yield router
    finally:
        process.terminate()
        process.wait(timeout=30)


def where(servers, session_id):
    """Which of the servers know the session."""
    listed = [json.dumps(server.request("/sessions")) for server in servers]
    return [i for i, text in enumerate(listed) if f'"{session_id}"' in text]


def test_haproxy_keeps_sessions_together(servers):
    """With the file in scripts/: by the id in the body, management requests with
    `messages: []` too. Moved by hand to the other server, a session goes on there."""
    if shutil.which("haproxy") is None:
        pytest.skip("no haproxy: run scripts/pool.sh router")
    address = f"127.0.0.1:{free_port()}"
    a, b = (server.url.removeprefix("http://") for server in servers)
    env = {"SAM_ROUTER": address, "SAM_SERVER_A": a, "SAM_SERVER_B": b}
    config = str(REPO / "scripts" / "router.cfg")
    answers = {}
    with running(["haproxy", "-f", config], f"http://{address}", env) as router:
        for name in [f"routed{i}" for i in range(6)]:
            answers[name] = [ask(router, name, text_of(name))[0] for _ in range(2)]
            body = {"model": "default", "messages": [], "agent_hint": manage_hint(name)}
            reply = router.request("/v1/chat/completions", body)
            assert reply["choices"][0]["message"]["content"] == ""
            (place,) = where(servers, name)
            wait_final(servers[place], reply["kv_hints"]["message_id"])
    places = {name: where(servers, name)[0] for name in answers}
    assert set(places.values()) == {0, 1}
    name, place = next(iter(places.items()))
    other = servers[1 - place]
    found = prefetched(other, name)
    moved, meta = ask(other, name, text_of(name))
    assert [moved] * 2 == answers[name]
    assert meta["cached_tokens_details"]["device"] >= meta["prompt_tokens"] - PAGE, found
    check_no_errors(servers)


def manage_hint(session_id):
    edits = [{"type": "offload", "target": "session"}]
    management = {"manage_request": True, "edits": edits}
    return {"session_id": session_id, "context_management": management}


def wait_final(server, message_id):
    until = time.monotonic() + UNTIL_S
    while server.request(f"/kv_hints/{message_id}")["actions"][0]["status"] not in FINAL:
        assert time.monotonic() < until, "the offload does not end"
        time.sleep(0.02)


def test_smg_passes_hints_on_and_refuses_empty_messages(servers):
    """What docs/pool.md says of it."""
    if not (ROUTERS / "smg").is_dir():
        pytest.skip("no smg: run scripts/pool.sh router")
    address = ("--host", "127.0.0.1", "--port", str(port := free_port()))
    command = [sys.executable, "-m", "smg.launch_router", *address]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--policy", "consistent_hashing", "--worker-urls", *(s.url for s in servers)]
    url = f"http://127.0.0.1:{port}"
    with running(command, url, {"PYTHONPATH": str(ROUTERS)}) as router:
        until = time.monotonic() + UNTIL_S
        while True:
            try:
                ask(router, "through-smg", text_of("smg"))
                break
            except urllib.error.HTTPError as error:  # it does not know the servers yet
                assert time.monotonic() < until, error.read()
                time.sleep(0.2)
        assert len(where(servers, "through-smg")) == 1
        body = {"model": "default", "messages": [], "agent_hint": manage_hint("through-smg")}
        with pytest.raises(urllib.error.HTTPError) as refused:
            router.request("/v1/chat/completions", body)
        assert refused.value.code == 400


def flush_when_idle(server):
    """As soon as nothing is on its way to the pool any more."""
    until = time.monotonic() + UNTIL_S
    while True:
        try:
            server.flush_cache()
            return
        except urllib.error.HTTPError:
            assert time.monotonic() < until, "the server does not come to rest"
            time.sleep(0.1)


def test_the_master_dies_and_comes_back(servers, pool):
    """The same answers without the pool; both servers use it again when it is back."""
    a, b = servers
    first, _ = ask(a, "lucky", text_of("lucky"))
    flush_when_idle(a)
    pool.kill("master")
    again, meta = ask(a, "lucky", text_of("lucky"))
    assert again == first and meta["cached_tokens"] == 0
    pool.start()
    until, n, found = time.monotonic() + UNTIL_S, 0, {}
    while not found.get("device") and time.monotonic() < until:
        n += 1
        answer, _ = ask(a, f"after{n}", text_of(f"after{n}"))
        outcome(a, f"after{n}", "offload")
        time.sleep(0.2)
        found = outcome(b, f"after{n}", "prefetch")["tokens"]
    assert found["device"] > 0
    assert ask(b, f"after{n}", text_of(f"after{n}"))[0] == answer
    check_no_errors(servers)
    log = a.log_text()
    assert 0 < log.count("sam: the pool refuses") <= 3 and "sam: the pool takes" in log
