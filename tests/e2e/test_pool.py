"""Sessions in the L3 pool of real servers: `file` across a restart, on one rank and on two;
Mooncake with two servers (needs `scripts/pool.sh install`).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sam.testing.random_swarm import manage
from sam.testing.server import ServerProcess, free_port
from tests.e2e.conftest import REPO, STRICT_ENV

pytestmark = pytest.mark.e2e

PAGE = 16
ENV = {**STRICT_ENV, "SAM_POOL_GROUP_PAGES": "2"}
SYSTEM = "You are one of several agents, and this is what all of them are told first. " * 6
FINAL = ("done", "clipped", "dropped", "missing", "rejected", "expired")


def pool_args(server_args, backend, *more, **extra):
    extra = {"prefetch_threshold": PAGE, **extra}
    return server_args(
        *("--radix-cache-backend", "sam", "--page-size", str(PAGE)),
        *("--hicache-write-policy", "write_through"),
        *("--hicache-storage-backend", backend),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
        *more,
    )


def ask(server, session_id, prompt):
    """One greedy answer of a session: (text, meta_info)."""
    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True},
        "agent_hint": {"session_id": session_id},
    }
    answer = server.request("/generate", body)
    return answer["text"], answer["meta_info"]


def outcome(server, session_id, kind):
    """What became of a management request, as soon as it is final."""
    kv_hints = manage(server, {"session_id": session_id}, kind)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        action = server.request(f"/kv_hints/{kv_hints['message_id']}")["actions"][0]
        if action["status"] in FINAL:
            return action
        time.sleep(0.02)
    raise AssertionError(f"{kind} of {session_id} does not end: {action}")


def wait_for_pages(folder, n_pages):
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.bin"))) < n_pages:
        assert time.monotonic() < deadline, "pages do not reach the pool"
        time.sleep(0.05)


RANKS = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
}


@pytest.mark.parametrize("n_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_session_survives_a_restart(server_args, tmp_path, n_ranks):
    """Prefetched by id on a server that never saw it, before its request; then reclaimed."""
    env = ENV if n_ranks == 1 else ENV | RANKS
    ranks = ("--tp-size", str(n_ranks))
    prompts = {name: SYSTEM + f" This is for {name}. " + f"{name} works. " * 40 for name in "ab"}
    args = pool_args(server_args, "file", *ranks, file_storage_path=str(tmp_path))
    with ServerProcess(args, env=env) as server:
        first = {name: ask(server, name, prompt) for name, prompt in prompts.items()}
        n_tokens = first["a"][1]["prompt_tokens"]
        assert outcome(server, "a", "offload")["status"] == "done"
        wait_for_pages(tmp_path, n_ranks * (n_tokens // PAGE))
        time.sleep(1.0)
    pages = set(tmp_path.glob("*.bin"))
    assert len(list(tmp_path.glob("*.manifest"))) == 2

    with ServerProcess(args, env=env) as server:
        found = outcome(server, "a", "prefetch")
        assert found["status"] == "done", found
        assert found["tokens"]["pool"] >= n_tokens - PAGE
        assert found["tokens"]["device"] == found["tokens"]["pool"]
        again, meta = ask(server, "a", prompts["a"])
        assert again == first["a"][0]
        assert meta["cached_tokens_details"]["device"] >= n_tokens - PAGE
        assert outcome(server, "nobody", "prefetch")["status"] == "missing"

        ended = outcome(server, "a", "evict")
        assert ended["status"] == "done" and ended["tokens"]["pool"] > 0
        left = set(tmp_path.glob("*.bin"))
        n_gone = len(pages - left) // n_ranks
        assert n_gone * PAGE >= ended["tokens"]["pool"] - 2 * PAGE
        server.flush_cache()
        again, meta = ask(server, "b", prompts["b"])
        assert again == first["b"][0]
        assert meta["cached_tokens_details"]["storage"] >= meta["prompt_tokens"] - PAGE
        cold, _ = ask(server, "a", prompts["a"])
        assert cold == first["a"][0]
        assert server.request("/sessions")["summary"]["errors"] == 0


@pytest.fixture
def mooncake(tmp_path):
    """Environment and extra config for servers on one Mooncake of this test."""
    lib = Path(os.environ.get("SAM_POOL_LIB", REPO / ".cache" / "mooncake"))
    if not (lib / "mooncake").is_dir():
        pytest.skip("no Mooncake: run scripts/pool.sh install")
    port = free_port()
    settings = {
        "SAM_POOL_RUN": str(tmp_path),
        "SAM_POOL_PORT": str(port),
        "SAM_PYTHON": sys.executable,
    }

    def script(command):
        path = str(REPO / "scripts" / "pool.sh")
        return subprocess.run([path, command], env={**os.environ, **settings}, check=False)

    assert script("start").returncode == 0
    extra = {
        "master_server_address": f"127.0.0.1:{port}",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "global_segment_size": 0,
        "local_hostname": "127.0.0.1",
    }
    yield {**ENV, "PYTHONPATH": str(lib)}, extra
    assert script("stop").returncode == 0


def test_two_servers_share_sessions(server_args, mooncake):
    """Offloaded on A, prefetched by id on B before its request, device hit on B; evicted
    there, A's next request is computed and says the same."""
    env, extra = mooncake
    layout = ("--hicache-mem-layout", "page_first_direct")
    args = pool_args(server_args, "mooncake", *layout, **extra)
    prompt = SYSTEM + "This moves. " * 40
    with ServerProcess(args, env=env) as a, ServerProcess(args, env=env) as b:
        first, meta = ask(a, "moving", prompt)
        n_tokens = meta["prompt_tokens"]
        offloaded = outcome(a, "moving", "offload")
        assert offloaded["status"] == "done"
        deadline = time.monotonic() + 60
        found = outcome(b, "moving", "prefetch")
        while found["status"] == "missing" and time.monotonic() < deadline:
            time.sleep(0.1)
            found = outcome(b, "moving", "prefetch")
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
        for server in (a, b):
            summary = server.request("/sessions")["summary"]
            assert (summary["errors"], summary["pool"]["errors"]) == (0, 0)
