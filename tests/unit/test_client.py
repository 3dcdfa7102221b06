"""sam.client with the real OpenAI SDK: the bodies that leave it, read by the server's parser."""

import logging
import math
import subprocess
import sys
import threading
import time

import pytest
from openai import OpenAI

from sam.client import AgentSessions, Timing, ToolTimes
from sam.client.sender import FAILURES_BEFORE_PAUSE
from sam.core.hints import parse_agent_hint
from tests.unit.client_endpoint import endpoint

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
EAGER = Timing(min_wait_s=0.0)


@pytest.fixture
def server():
    with endpoint() as server:
        yield server
        for hint in server.hints:
            assert parse_agent_hint(hint).unknown_keys == ()


@pytest.fixture
def client(server):
    with OpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
        yield client


def sessions(client, **options):
    return AgentSessions(client, **options)


def test_every_call_carries_the_lineage(server, client):
    task = sessions(client).session("task-7")
    coder = task.child("coder")
    assert task.create(**ASK).choices[0].message.content == "hello"
    coder.create(**ASK)
    coder.child("deep").create(**ASK)
    assert server.hints == [
        {"session_id": "task-7"},
        {"session_id": "task-7:coder", "parent_session_id": "task-7"},
        {"session_id": "task-7:coder:deep", "parent_session_id": "task-7:coder"},
    ]
    plain = {key: value for key, value in server.bodies[0].items() if key != "agent_hint"}
    assert plain == ASK


def test_a_session_is_one_object_while_somebody_holds_it(client):
    sam = sessions(client)
    held = sam.session("a").child("b")
    assert sam.session("a:b") is held and sam.session("a").child("b") is held
    assert held.parent_id == "a"


def test_the_callers_extra_body_stays_and_wins(server, client):
    own = {"agent_hint": {"cache_control": {"type": "ephemeral"}}, "top_k": 3}
    sessions(client).session("s").create(**ASK, extra_body=own, expected_idle_s=7)
    assert server.bodies[0]["top_k"] == 3
    assert server.hints[0] == {
        "session_id": "s",
        "expected_idle_s": 7,
        "cache_control": {"type": "ephemeral"},
    }
    assert own["agent_hint"] == {"cache_control": {"type": "ephemeral"}}


def test_streams_are_the_sdks_own(server, client):
    stream = sessions(client).session("s").create(**ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in stream) == "hello"
    assert server.hints == [{"session_id": "s"}]


def test_explicit_moves_and_the_end(server, client):
    sam = sessions(client)
    with sam.session("root") as root:
        root.create(**ASK)
        root.child("x").offload()
        root.offload(subtree=True)
        root.resume()
    root.end()
    assert sam.flush()
    assert server.managed() == [
        ("root:x", "offload", None),
        ("root", "offload", None),
        ("root", "prefetch", None),
        ("root", "evict", None),
    ]
    assert [hint.get("parent_session_id") for hint in server.hints[1:]] == [
        "root", "root", None, None,
    ]  # fmt: skip
    bodies = [body for body in server.bodies if not body["messages"]]
    assert len(bodies) == 4 and all(body["model"] == "m" for body in bodies)
    assert sam.stats.answered == 4


def test_a_session_that_ended_and_runs_again_can_end_again(server, client):
    sam = sessions(client)
    for _ in range(2):
        with sam.session("s") as session:
            session.create(**ASK)
    assert sam.flush()
    assert [edits for _, edits, _ in server.managed()] == ["evict", "evict"]


def test_a_tool_is_announced_once_its_duration_is_known(server, client):
    sam = sessions(client, timing=EAGER)
    session = sam.session("s")
    for _ in range(2):
        session.create(**ASK)
        with session.tool("sleep"):
            time.sleep(0.2)
    assert sam.flush()
    (told,) = server.managed()
    assert told[:2] == ("s", "")
    assert 0.19 < told[2] == pytest.approx(sam.tool_times.estimate_s("sleep"), rel=0.5)


def test_a_short_tool_costs_no_request(server, client):
    sam = sessions(client, tool_times=ToolTimes({"ls": 0.01}))
    with sam.session("s").tool("ls"):
        pass
    with sam.session("s").tool("never seen"):
        pass
    assert sam.flush() and server.bodies == []


def test_a_long_tool_offloads_and_is_back_before_it_ends(server, client):
    timing = Timing(min_wait_s=0.1, offload_after_s=0.2, lead_s=0.2)
    sam = sessions(client, timing=timing, tool_times=ToolTimes({"build": 0.6}))
    session = sam.session("s")
    with session.tool("build"):
        deadline = time.monotonic() + 5
        while len(server.managed()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [edits for _, edits, _ in server.managed()] == ["offload", "prefetch"]


def test_the_next_call_takes_a_waiting_prefetch_back(server, client):
    timing = Timing(offload_after_s=0.1, lead_s=0.1, min_wait_s=0.0)
    sam = sessions(client, timing=timing)
    session = sam.session("s")
    with session.tool("build", expected_s=0.5):
        pass
    session.create(**ASK)
    assert sam.flush()
    time.sleep(0.6)
    assert [edits for _, edits, _ in server.managed()] == ["offload"]


def test_parallel_tools_wait_for_the_longest(server, client):
    sam = sessions(client)
    session = sam.session("s")
    with session.tool("a", expected_s=40), session.tool("b", expected_s=20):
        with session.tool("c", expected_s=80):
            pass
    assert sam.flush()
    assert told(server) == [("offload", 40), ("offload", 80), ("offload", 40)]


def told(server):
    """Seconds to the next 20: a busy machine takes its time between two of them."""
    return [(edits, idle and 20 * round(idle / 20)) for _, edits, idle in server.managed()]


def test_a_tool_that_ends_early_does_not_count_for_the_next(server, client):
    sam = sessions(client)
    session = sam.session("s")
    session.create(**ASK)
    with session.tool("long", expected_s=60):
        pass
    long = session._prefetch
    with session.tool("short", expected_s=20):
        pass
    assert sam.flush()
    assert told(server) == [("offload", 60), ("offload", 20)]
    assert long.cancelled and long.when - session._prefetch.when == pytest.approx(40, abs=5)


def test_the_rest_counts_when_the_longest_of_parallel_tools_ends_early(server, client):
    sam = sessions(client)
    session = sam.session("s")
    with session.tool("b", expected_s=20):
        with session.tool("a", expected_s=60):
            first = session._prefetch
        assert first.cancelled and session._prefetch.when < first.when - 30
        with session.tool("c", expected_s=10):
            pass
    assert sam.flush()
    assert told(server) == [("offload", 20), ("offload", 60), ("offload", 20)]


def test_a_session_moved_down_for_a_long_tool_is_back_after_a_short_one(server, client):
    sam = sessions(client)
    session = sam.session("s")
    with session.tool("long", expected_s=60):
        pass
    with session.tool("short", expected_s=1.2):
        deadline = time.monotonic() + 10
        while len(server.managed()) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [edits for _, edits, _ in server.managed()] == ["offload", "", "prefetch"]


def test_the_same_tool_again_is_not_told_again(server, client):
    sam = sessions(client, timing=Timing(min_wait_s=5.0))
    session = sam.session("s")
    for _ in range(3):
        with session.tool("long", expected_s=60):
            pass
    assert sam.flush()
    assert told(server) == [("offload", 60)]


def test_what_has_passed_since_the_answer_is_no_part_of_the_wait(server, client):
    """The server counts from the arrival of the request."""
    sam = sessions(client)
    session = sam.session("s")
    session.create(**ASK)
    time.sleep(0.3)
    session.idle(4)
    assert sam.flush()
    ((_, _, idle_s),) = server.managed()
    assert 0.0 < idle_s <= 4.0


def test_idle_with_and_without_a_guess(server, client):
    sam = sessions(client)
    sam.session("a").idle()
    sam.session("b").idle(2)
    sam.session("c").idle(60)
    assert sam.flush()
    told = [(s, edits, idle and math.ceil(idle)) for s, edits, idle in server.managed()]
    assert told[0] == ("a", "offload", None)
    assert told[1][:2] == ("b", "") and 0 < told[1][2] <= 2
    assert told[2][:2] == ("c", "offload") and 40 < told[2][2] <= 60


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_that_refuses_hints_is_left_alone(server, client, caplog, status):
    server.status = status
    sam = sessions(client)
    session = sam.session("s")
    with caplog.at_level(logging.WARNING, "sam.client"):
        for _ in range(FAILURES_BEFORE_PAUSE + 4):
            session.offload()
        assert sam.flush()
    assert len(server.bodies) == FAILURES_BEFORE_PAUSE
    assert (sam.stats.failed, sam.stats.dropped) == (FAILURES_BEFORE_PAUSE, 4)
    assert len(caplog.records) == 1


def test_a_slow_server_holds_nobody_up(server, client):
    server.delay_s = 5.0
    sam = sessions(client, timing=Timing(request_timeout_s=0.2))
    with sam.session("s") as session:
        session.offload()
    assert sam.session("t").create(**ASK).choices
    assert sam.flush()
    assert (sam.stats.failed, sam.stats.answered) == (2, 0)


def test_inference_errors_are_the_callers(server, client):
    server.status = 500
    with pytest.raises(Exception, match="500"):
        sessions(client).session("s").create(**ASK)


def test_many_threads_one_client(server, client):
    sam = sessions(client)

    def run(i):
        with sam.session(f"root-{i % 4}").child(f"{i}") as session:
            session.create(**ASK)
            with session.tool(f"tool-{i % 3}", expected_s=1 + i):
                pass

    threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sam.flush(20)
    ended = {s for s, edits, _ in server.managed() if edits == "evict"}
    assert ended == {f"root-{i % 4}:{i}" for i in range(16)}
    assert sam.stats.answered == len(server.managed()) == 32


def test_replies_can_be_seen(server, client):
    seen = []
    sam = sessions(client, on_reply=lambda session_id, reply: seen.append((session_id, reply)))
    sam.session("s").offload()
    assert sam.flush()
    assert [(s, r.choices[0].message.content) for s, r in seen] == [("s", "hello")]


def test_the_thread_goes_when_it_has_nothing_to_send(server, client, monkeypatch):
    monkeypatch.setattr("sam.client.sender.IDLE_THREAD_S", 0.05)
    sam, others = sessions(client), set(threading.enumerate())
    for n_sent in (1, 2):
        sam.session("s").offload()
        assert sam.flush() and len(server.bodies) == n_sent
        deadline = time.monotonic() + 10
        while "sam-client" in {t.name for t in threading.enumerate() if t not in others}:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_last_hint_leaves_before_the_program_does(server):
    program = f"""
from openai import OpenAI
from sam.client import AgentSessions
sam = AgentSessions(OpenAI(base_url={server.url!r}, api_key="k"), model="m")
sam.session("short").end()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert server.managed() == [("short", "evict", None)]


def test_it_needs_nothing_but_the_standard_library():
    program = """
import sys
import sam.client
banned = {"sglang", "torch", "msgspec", "openai", "httpx", "pydantic", "numpy", "sam.core"}
print(sorted(banned & set(sys.modules)))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == "[]"
