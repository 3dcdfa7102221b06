"""sam.client when the agent passes what no hint can be made of: it goes on, and so do hints."""

import logging
import math
import threading
import time
import uuid
from decimal import Decimal

import pytest
from openai import OpenAI

from sam.client import AgentSessions, ToolTimes
from sam.client.hint import agent_hint, idle_seconds
from sam.core.hints import parse_agent_hint
from tests.unit.client_endpoint import endpoint

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Hostile:
    def __float__(self):
        raise RuntimeError("no")


@pytest.fixture
def server():
    with endpoint() as server:
        yield server
        for hint in server.hints:
            assert parse_agent_hint(hint).unknown_keys == ()


@pytest.fixture
def sam(server):
    with OpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
        yield AgentSessions(client)


@pytest.fixture
def died(monkeypatch):
    """Exceptions that ended a thread."""
    found = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_value))
    return found


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (5, 5.0),
        (Decimal("2.5"), 2.5),
        (-1, 0.0),
        (1e10, 86_400.0),
        (math.inf, None),
        (-math.inf, None),
        (math.nan, None),
        (10**400, None),
        ("5", None),
        (True, None),
        ([5], None),
        (Hostile(), None),
    ],
)
def test_seconds_are_finite_and_at_most_a_day(value, seconds):
    assert idle_seconds(value) == seconds
    assert agent_hint("s", expected_idle_s=value).get("expected_idle_s") == seconds


@pytest.mark.parametrize("expected_s", [math.inf, math.nan, 1e10, 1e300, "5", Hostile()])
def test_the_sender_outlives_any_expectation(server, sam, died, expected_s):
    with sam.session("t").tool("t", expected_s=expected_s):
        pass
    sam.session("i").idle(expected_s)
    assert sam.flush()
    sam.session("later").end()
    assert sam.flush()
    time.sleep(0.1)
    assert died == []
    assert server.managed()[-1] == ("later", "evict", None)
    is_day = expected_s in (1e10, 1e300)
    told = [(s, edits, idle and round(idle, -2)) for s, edits, idle in server.managed()[:-1]]
    day = [("t", "offload", 86_400), ("i", "offload", 86_400)]
    assert told == (day if is_day else [("i", "offload", None)])
    assert sam.stats.ignored == (0 if is_day else 2)


def test_a_job_far_away_does_not_end_the_thread(server, sam, died):
    sam._manage("far", agent_hint("far", edits=["prefetch"], manage_only=True), 1e12)
    sam.session("near").end()
    assert sam.flush()
    time.sleep(0.1)
    assert died == [] and sam._sender._thread.is_alive()
    assert server.managed() == [("near", "evict", None)]


def test_odd_values_are_counted_and_logged_once(server, sam, caplog):
    session = sam.session("s")
    with caplog.at_level(logging.WARNING, "sam.client"):
        for name in (["n"], {}, None):
            with session.tool(name):
                pass
        session.create(**ASK, expected_idle_s="5")
    assert sam.stats.ignored == 4 and len(caplog.records) == 1
    assert server.hints == [{"session_id": "s"}]
    assert sam.tool_times.estimates() == {}


def test_a_tool_without_a_usable_name_is_announced_where_its_time_is_known(server, sam):
    with sam.session("s").tool(["n"], expected_s=200):
        pass
    assert sam.flush()
    assert [(s, round(idle, -2)) for s, _, idle in server.managed()] == [("s", 200)]


def test_estimates_that_fail_do_not_reach_the_agent(server, sam):
    class Broken(ToolTimes):
        def estimate_s(self, name):
            raise OSError("disk")

        def learn(self, name, seconds):
            raise OSError("disk")

    sam.tool_times = Broken()
    with pytest.raises(KeyError), sam.session("s").tool("t"):
        raise KeyError("the tool's own")
    assert sam.stats.ignored == 2


def test_ids_need_not_be_strings(server, sam):
    key = uuid.UUID(int=7)
    assert sam.session(key) is sam.session(str(key))
    sam.session(key, parent=uuid.UUID(int=8)).create(**ASK)
    sam.session(["a"], parent=uuid.UUID(int=8)).create(**ASK)
    assert [hint["session_id"] for hint in server.hints] == [str(key), "['a']"]
