"""Hints in other ways of running: two ranks, the Engine API, a busy scheduler, no host tier."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from sam.testing.random_swarm import make_plan, manage, run_swarm, settled_summary
from sam.testing.server import ServerFailed, ServerProcess
from tests.e2e.conftest import STRICT_ENV

pytestmark = pytest.mark.e2e

ENGINE_SCRIPT = """
import json, sys
import sglang

def main():
    engine = sglang.Engine(
        model_path=sys.argv[1], radix_cache_backend="sam", device="cpu", dtype="float32",
        max_total_tokens=2048, sampling_backend="pytorch", log_level="error",
    )
    key = {"session_id": "engine", "parent_session_id": "engine"}
    sampling = {"max_new_tokens": 3, "temperature": 0}
    first = engine.generate("an engine prompt " * 30, sampling, agent_hint=key)
    again = engine.generate("an engine prompt " * 30, sampling, agent_hint=key)
    edits = [{"type": "evict", "target": "session"}]
    hint = {**key, "context_management": {"manage_request": True, "edits": edits}}
    reply = engine.generate("", sampling, agent_hint=hint)
    cold = engine.generate("an engine prompt " * 30, sampling)
    metas = [r["meta_info"] for r in (first, again, reply, cold)]
    same = first["text"] == again["text"] == cold["text"]
    print("RESULT " + json.dumps({"metas": metas, "same": same, "text": reply["text"]}))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def summary_of(server):
    return server.request("/sessions")["summary"]


def test_engine_api_takes_hints(model, tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(ENGINE_SCRIPT)
    run = subprocess.run(
        [sys.executable, str(script), model],
        env={**os.environ, **STRICT_ENV},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stdout[-2_000:] + run.stderr[-4_000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    first, again, reply, cold = result["metas"]
    assert first["kv_hints"]["actions"][0]["action_type"] == "session.bind"
    assert again["cached_tokens"] == first["prompt_tokens"] - 1
    assert result["text"] == "" and reply["completion_tokens"] == 0
    assert cold["cached_tokens"] == 0 and result["same"]


def test_tokenizer_workers_are_refused_at_start(server_args):
    """They load no plugins: hints would be lost in them without a word."""
    args = server_args("--radix-cache-backend", "sam", "--tokenizer-worker-num", "2")
    with pytest.raises(ServerFailed, match="--tokenizer-worker-num") as error:
        with ServerProcess(args):
            pass
    assert "start without --radix-cache-backend sam" in str(error.value)


def test_management_is_answered_while_inference_runs(server_args):
    """And without a host tier, an offload says that there is none."""
    args = server_args("--radix-cache-backend", "sam", hicache=False)
    with ServerProcess(args, env=STRICT_ENV) as server:
        key = {"session_id": "busy", "parent_session_id": "busy"}
        ended = threading.Event()

        def generate():
            sampling = {"max_new_tokens": 400, "ignore_eos": True}
            body = {"text": "work", "agent_hint": key, "sampling_params": sampling}
            server.request("/generate", body)
            ended.set()

        worker = threading.Thread(target=generate)
        worker.start()
        while not summary_of(server)["device"]["protected"]:
            time.sleep(0.01)
        hints = [manage(server, key, kind) for kind in ("offload", "prefetch", "evict")]
        still_running = not ended.is_set()
        worker.join()
        assert still_running, "the inference ended before the management requests did"
        deadline = time.monotonic() + 10
        final = {}
        while len(final) < 3 and time.monotonic() < deadline:
            for i, kv_hints in enumerate(hints):
                action = server.request(f"/kv_hints/{kv_hints['message_id']}")["actions"][0]
                if action["status"] not in ("accepted", "deferred"):
                    final[i] = (action["status"], action["reason"])
        assert final == {
            0: ("dropped", "ended"),
            1: ("dropped", "already_running"),
            2: ("done", ""),
        }
        pools = summary_of(server)["device"]
        assert pools["protected"] == 0

        server.generate("another session, no hint")
        body = {"text": "idle", "agent_hint": {"session_id": "idle"}}
        server.request("/generate", {**body, "sampling_params": {"max_new_tokens": 1}})
        kv_hints = manage(server, {"session_id": "idle"}, "offload")
        summary_of(server)
        action = server.request(f"/kv_hints/{kv_hints['message_id']}")["actions"][0]
        assert (action["status"], action["reason"]) == ("clipped", "no_host_tier")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_other_write_policies(server_args, policy):
    args = server_args(
        "--radix-cache-backend", "sam", "--hicache-write-policy", policy, total_tokens=3_072
    )
    plan = make_plan(21)
    with ServerProcess(args, env=STRICT_ENV) as server:
        hinted = run_swarm(server, plan, hints=True)
        assert settled_summary(server)["errors"] == 0
        server.flush_cache()
        plain = run_swarm(server, plan, hints=False)
    outputs = [{t: a.output_ids for t, a in run.items()} for run in (hinted, plain)]
    assert outputs[0] == outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("core", "core_class"), [("python", "SessionTreeCore"), ("rust", "ShadowTreeCore")]
)
def test_two_ranks_decide_alike(server_args, core, core_class):
    args = server_args("--radix-cache-backend", "sam", "--tp-size", "2", total_tokens=3_072)
    env = {
        **STRICT_ENV,
        "SAM_TREE_CORE": core,
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    }
    plan = make_plan(31, n_sessions=4, n_turns=4)
    with ServerProcess(args, env=env) as server:
        hinted = run_swarm(server, plan, hints=True)
        summary = settled_summary(server)
        assert (summary["tree_core"], summary["tree_core_mismatches"]) == (core_class, 0)
        assert summary["errors"] == 0
        server.flush_cache()
        plain = run_swarm(server, plan, hints=False)
        assert server.request("/health") == ""
    outputs = [{t: a.output_ids for t, a in run.items()} for run in (hinted, plain)]
    assert outputs[0] == outputs[1]
