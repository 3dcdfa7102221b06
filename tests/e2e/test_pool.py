"""Sessions in the L3 pool of real servers: `file` across a restart, on one rank and on two."""

import json
import time

import pytest

from sam.testing.random_swarm import manage
from sam.testing.server import ServerProcess
from tests.e2e.conftest import STRICT_ENV

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
