"""Trace formats other than the project's own: what each is read into."""

import json
import os
from pathlib import Path

import pytest

from sam.sim import traces
from sam.sim.runner import Experiment, Question
from sam.sim.trace import TraceError

REPO = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SAM_SHARED", REPO.parent / "shared"))
CAPTURE = SHARED / "captures" / "d_deep.json"


def load(tmp_path, records, name="trace.jsonl"):
    file = tmp_path / name
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return traces.load(str(file))


def lru_hits(trace, capacity_pages=1_000):
    """Hit tokens of each request, as recorded, in a cache that holds everything."""
    question = Question(concurrent=0, capacity_pages=capacity_pages)
    experiment = Experiment(trace, question, [], seed=0)
    for _ in experiment.steps():
        pass
    return experiment.answer.outcomes["lru"].hit_tokens, experiment.answer.prompt_tokens


# -- Mooncake -----------------------------------------------------------------------------


def test_mooncake_prompts_share_what_their_hashes_share(tmp_path):
    trace = load(
        tmp_path,
        [
            {"timestamp": 0, "input_length": 1_100, "output_length": 9, "hash_ids": [1, 2, 3]},
            {"timestamp": 500, "input_length": 2_000, "output_length": 9, "hash_ids": [1, 2, 4, 5]},
            {"timestamp": 900, "input_length": 600, "output_length": 9, "hash_ids": [9, 2]},
            {"timestamp": 2_500, "input_length": 2_600, "hash_ids": [1, 2, 4, 5, 6, 7]},
        ],
    )
    assert trace.page_tokens == 512 and trace.as_recorded
    assert lru_hits(trace) == (2 * 512 + 4 * 512, 1_100 + 2_000 + 600 + 2_600)
    first = next(session for session in trace.sessions if session.start_s == 0.0)
    assert [turn.think_s for turn in first.turns] == [0.0, 0.5, 2.0]  # one prompt that grows


def test_mooncake_lines_keep_their_order_without_times(tmp_path):
    records = [{"input_length": 64, "block_size": 64, "hash_ids": [i % 3]} for i in range(9)]
    trace = load(tmp_path, records)
    assert trace.page_tokens == 64
    assert lru_hits(trace) == (6 * 64, 9 * 64)
    assert lru_hits(trace, capacity_pages=2)[0] == 0


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ({"hash_ids": [1], "input_length": 0}, "positive"),
        ({"hash_ids": [1], "input_length": 5, "block_size": 32}, "several block sizes"),
        ({"hash_ids": [1.5], "input_length": 5}, "line 2"),
    ],
)
def test_mooncake_errors_name_the_line(tmp_path, record, word):
    good = {"hash_ids": [1], "input_length": 5, "block_size": 16}
    with pytest.raises(TraceError, match=word):
        load(tmp_path, [good, record])


# -- kv-cache-tester ------------------------------------------------------------------------


def a_session(name, scope="local", **over):
    first = {"t": 0.0, "type": "s", "in": 130, "out": 5, "hash_ids": [1, 2], "stop": "tool_use"}
    sub = {"t": 4.0, "type": "subagent", "agent_id": "a1", "requests": [first]}
    second = {"t": 9.0, "in": 260, "out": 5, "hash_ids": [1, 2, 3, 4], "think_time": 6.5}
    third = {"t": 20.0, "in": 130, "out": 5, "hash_ids": [1, 7], "stop": "end_turn"}
    requests = [first | {"api_time": 2.5}, sub, second, third]
    return {"id": name, "block_size": 64, "hash_id_scope": scope, "requests": requests} | over


def test_kv_cache_tester_sessions(tmp_path):
    trace = load(tmp_path, [a_session("x"), a_session("y")])
    x, y = trace.sessions
    assert not trace.as_recorded and trace.page_tokens == 64
    assert [turn.think_s for turn in x.turns] == [0.0, 6.5, 11.0]
    assert [turn.label for turn in x.turns] == ["tool", "other", "human"]
    assert [turn.says_end for turn in x.turns] == [False, False, True]
    ((after_s, sub),) = x.turns[1].subs
    assert after_s == 1.5 and sub.name == "x/a1" and len(sub.turns) == 1
    assert {s for turn in x.turns for s, _ in turn.path}.isdisjoint(
        s for turn in y.turns for s, _ in turn.path
    )
    stream = x.turns[0].path[0][0]
    assert x.turns[1].path == ((stream, 4),)
    assert x.turns[2].path[0] == (stream, 1) and x.turns[2].pages == 2


def test_kv_cache_tester_hashes_may_be_global(tmp_path):
    file = tmp_path / "one.json"
    file.write_text(json.dumps(a_session("x", "global"), indent=1))
    (x,) = traces.load(str(file)).sessions
    assert x.turns[1].subs[0][1].turns[0].path == x.turns[0].path
    both = [a_session("x", "global"), a_session("y", "global")]
    one, two = load(tmp_path, both).sessions
    assert one.turns[0].path == two.turns[0].path


# -- request logs ---------------------------------------------------------------------------


def chat(session, *texts, t=0.0, **over):
    messages = [{"role": "user", "content": text * 100} for text in texts]
    body = {"messages": messages, "agent_hint": {"session_id": session}} | over
    return {"path": "/v1/chat/completions", "t": t, "body": body}


def test_openai_bodies_become_sessions(tmp_path):
    end = {"manage_request": True, "edits": [{"type": "evict", "target": "session"}]}
    trace = load(
        tmp_path,
        [
            chat("a", "alpha", t=1.0),
            chat("b", "alpha", "beta", t=2.0),
            chat("a", "alpha", "gamma", t=4.0),
            chat("a", t=5.0, agent_hint={"session_id": "a", "context_management": end}),
        ],
    )
    a, b = trace.sessions
    assert (a.name, len(a.turns), b.name, len(b.turns)) == ("a", 2, "b", 1)
    assert a.turns[1].think_s == 3.0
    assert [turn.says_end for turn in a.turns] == [False, True]
    shared = a.turns[0].pages - 1  # its last page is a partial one
    hits, total = lru_hits(trace)
    assert shared >= 2 and hits == 2 * shared * 64 and total > hits


def test_sglang_request_log(tmp_path):
    def line(event, n, at, **more):
        obj = {"input_ids": list(range(n)), "session_id": "s"}
        return {"timestamp": f"2026-01-01T00:00:{at:02d}", "event": event, "obj": obj} | more

    meta = {"completion_tokens": 7, "finish_reason": {"type": "stop", "matched": None}}
    records = []
    for n, at in ((100, 1), (300, 11)):
        records.append(line("request.received", n, at))
        records.append(line("request.finished", n, at + 2, out={"meta_info": meta}))
    (session,) = load(tmp_path, records).sessions
    first, second = session.turns
    assert (first.input_tokens, first.output_tokens, first.label) == (100, 7, "human")
    assert second.think_s == 10.0 and second.path[0][1] == 1 and second.pages == 5


def test_a_log_without_prompts_says_how_to_get_them(tmp_path):
    with pytest.raises(TraceError, match="log-requests-level 3"):
        load(tmp_path, [{"event": "request.finished", "obj": {"rid": "x"}, "timestamp": 1}])


@pytest.mark.skipif(not CAPTURE.is_file(), reason=f"no {CAPTURE} (set SAM_SHARED)")
def test_a_capture_of_the_real_client_is_a_trace():
    trace = traces.load(str(CAPTURE))
    records = json.loads(CAPTURE.read_text())["records"]
    bodies = [record["body"] for record in records]
    hints = [body.get("agent_hint") or {} for body in bodies]
    managing = [(hint.get("context_management") or {}).get("manage_request") for hint in hints]
    asking = [b for b, m in zip(bodies, managing, strict=True) if b.get("messages") and not m]
    assert trace.n_requests == len(asking) > 10
    assert len(trace.sessions) > 2
    assert any(turn.says_end for turn in trace.turns())
    hits, total = lru_hits(trace)
    assert 0 < hits < total
