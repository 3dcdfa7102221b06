"""The scheduler's memory for the page: events, stories, what changed, counts by time."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sam.core.actions import ActionKind, ActionStatus, SessionAction, TierTokens
from sam.core.sessions import SessionKey, SessionRef, SessionTable
from sam.core.tracker import LeftBranches
from sam.srt.mem_cache.tier_tasks import Outcome
from sam.srt.observability import timeline as module
from sam.srt.observability.timeline import Timeline, as_dicts
from sam.srt.observability.timeline_series import BUCKET_S, N_BUCKETS, TimeSeries

KEY = SessionKey("t", "s")


@pytest.fixture
def now():
    return [1_000.0]


@pytest.fixture
def timeline(now):
    return Timeline(clock=lambda: now[0])


@pytest.fixture
def table(timeline):
    table = SessionTable()
    table.watch(timeline.state_changed)
    return table


def request(n_in=100, n_out=5, device=60, host=20, pool=0):
    return SimpleNamespace(
        origin_input_ids=range(n_in),
        output_ids=range(n_out),
        cached_tokens=device + host + pool,
        cached_tokens_device=device,
        cached_tokens_host=host,
        cached_tokens_storage=pool,
    )


def kinds(timeline, key=KEY):
    return [event.kind.value for event in timeline.story(key)]


def test_the_life_of_a_session_is_its_story(timeline, table):
    table.bind(KEY, None, 1.0)
    generation = table.request_queued(KEY, "r", 1.0)
    table.request_finished(KEY, "r", generation, 2.0, "tool_calls")
    timeline.turn_over(KEY, request(), "tool_calls", False)
    timeline.waiting_tool(KEY, "bash")
    table.mark_offloaded(KEY, 3.0)
    table.mark_resuming(KEY, 4.0, 1.0)
    table.expire(9.0)
    table.end(KEY, 10.0)
    table.bind(KEY, None, 11.0)
    assert kinds(timeline) == [
        "opened",
        "queued",
        "finished",
        "waiting_tool",
        "offloaded",
        "resuming",
        "offloaded",
        "ended",
        "opened",
    ]
    finished = as_dicts(timeline.story(KEY))[2]
    assert (finished["input_tokens"], finished["cached_tokens"]) == (100, 80)
    assert (finished["device_tokens"], finished["host_tokens"]) == (60, 20)
    assert timeline.story(KEY)[-1].generation == 2


def test_hints_are_told_with_their_outcome_and_binds_are_not(timeline):
    done = Outcome(status=ActionStatus.CLIPPED, tokens=TierTokens(device=7), reason="budget")
    for kind in (ActionKind.BIND, ActionKind.PREFETCH):
        action = SessionAction(action_id="a", kind=kind, key=KEY, time_s=1.0)
        timeline.hint(action, done)
    (event,) = timeline.story(KEY)
    assert (event.action, event.status, event.reason) == ("prefetch", "clipped", "budget")
    assert event.device_tokens == 7


def test_what_changed_is_named_newest_first_and_bounded(timeline, table):
    for i in range(5):
        table.bind(SessionKey("t", f"s{i}"), None, 1.0)
    seq = timeline.seq
    assert timeline.changed_since(seq, 10) == []
    timeline.touch(SessionKey("t", "s1"))
    table.end(SessionKey("t", "s3"), 2.0)
    names = [key.session_id for key in timeline.changed_since(seq, 10)]
    assert names == ["s3", "s1"]
    assert len(timeline.changed_since(0, 3)) == 3


def test_memory_is_bounded(timeline, monkeypatch):
    monkeypatch.setattr(module, "MAX_STORIES", 3)
    monkeypatch.setattr(module, "MAX_CHANGED", 4)
    for i in range(10):
        for _ in range(2 * module.EVENTS_PER_STORY):
            timeline.waiting_tool(SessionKey("t", f"s{i}"), None)
    assert [len(timeline.story(SessionKey("t", f"s{i}"))) for i in (0, 6, 7, 9)] == [
        0,
        0,
        module.EVENTS_PER_STORY,
        module.EVENTS_PER_STORY,
    ]
    assert len(timeline.changed_since(0, 100)) == 4
    assert len(timeline.events) <= module.MAX_EVENTS


def test_evictions_go_into_the_stories_of_few_users_and_merge(timeline, now):
    users = [SessionRef(KEY, 1), LeftBranches(KEY), KEY]
    timeline.victim("device", 30, "idle", users, True)
    timeline.victim("device", 12, "idle", users, True)
    now[0] += 10 * module.MERGE_S
    timeline.victim("device", 5, "ended", [KEY], False)
    timeline.victim("host", 9, "shared", [SessionKey("t", f"s{i}") for i in range(99)], False)
    told = [(e.kind.value, e.device_tokens) for e in timeline.story(KEY)]
    assert told == [("demoted_tokens", 42), ("evicted_tokens", 5)]
    assert timeline.story(SessionKey("t", "s1")) == [] and len(timeline.events) == 0
    first, second = timeline.series.since(0.0)
    assert first["evicted_device_idle"] == 42
    assert (second["evicted_device_ended"], second["evicted_host_shared"]) == (5, 9)


def test_all_requests_count_by_tier(timeline):
    timeline.request_over(request())
    timeline.request_over(request(n_in=50, device=0, host=0, pool=40))
    (bucket,) = timeline.series.since(0.0)
    found = [bucket[name] for name in ("requests", "prompt", "hit_device", "hit_host", "hit_pool")]
    assert found == [2, 150, 60, 20, 40]


def test_buckets_are_bounded_and_hold_counts_and_levels():
    series = TimeSeries()
    for i in range(3 * N_BUCKETS):
        series.add(i * BUCKET_S, n=1)
        series.add(i * BUCKET_S + 0.5 * BUCKET_S, n=2)
    series.level(3 * N_BUCKETS * BUCKET_S, free=4)
    series.level(3 * N_BUCKETS * BUCKET_S + 1, free=3)
    buckets = series.since(0.0)
    assert len(buckets) == N_BUCKETS
    assert buckets[-1] == {"t": 3 * N_BUCKETS * BUCKET_S, "free": 3}
    assert buckets[-2]["n"] == 3
    assert series.since(buckets[-1]["t"]) == buckets[-1:]
