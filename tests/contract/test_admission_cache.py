"""The order of service through SGLang's own SchedulePolicy, over the real cache."""

import pytest

pytest.importorskip("sglang")

from types import SimpleNamespace

from harness_pools import server_settings
from sglang.srt.managers.schedule_policy import WAITING_QUEUE_PREFIX_MATCH_MAX, SchedulePolicy
from sglang.srt.runtime_context import get_schedule

from sam import plugin
from sam.config import SamConfig

SHORTEST = SamConfig(raise_on_error=True, admission="shortest", admission_aging=0.05)


def schedule(rig, queue, *, policy="fcfs", processed=0):
    SchedulePolicy(policy, rig.cache, True, False, False).calc_priority(
        queue, processed_tokens=processed
    )
    return [req.rid for req in queue]


def queued(rig, rid, ids, *, arrived=0):
    req = rig.queue(ids, rid=rid)
    req.arrival_processed_tokens = arrived
    return req


def serve(rig, queue):
    """All of them, one after the other."""
    for req in queue:
        assert rig.admit(req)
        rig.finish(req)


def three(rig):
    """After an answer of 60 tokens: 50 new tokens; 10 after the 60; 30 new ones."""
    return [
        queued(rig, "long", range(1_000, 1_050)),
        queued(rig, "hit", [*range(60), *range(2_000, 2_010)]),
        queued(rig, "short", range(3_000, 3_030)),
    ]


@pytest.mark.parametrize("page_size", [1, 4])
def test_least_to_compute_first(make_rig, page_size):
    rig = make_rig(config=SHORTEST, page_size=page_size)
    rig.run(range(60))
    queue = three(rig)
    assert schedule(rig, queue) == ["hit", "short", "long"]
    serve(rig, queue)


def test_what_lies_on_the_host_counts_as_held(make_rig):
    rig = make_rig(config=SHORTEST, write_policy="write_through")
    rig.run(range(60), session="s")
    assert rig.outcome("demote", "s", release="now").status == "done"
    device, host = rig.on_tiers("s")
    assert device == 0 and host >= 60
    queue = three(rig)
    assert schedule(rig, queue) == ["hit", "short", "long"]
    serve(rig, queue)


def test_off_leaves_the_queue_to_the_server(make_rig):
    rig = make_rig()
    assert rig.cache.waiting_queue_order() is None
    rig.run(range(60))
    queue = three(rig)
    assert schedule(rig, queue) == ["long", "hit", "short"]
    assert schedule(rig, queue, policy="lpm") == ["hit", "long", "short"]
    serve(rig, queue)


def test_a_wait_earns_credit(make_rig):
    rig = make_rig(config=SHORTEST)
    queue = [
        queued(rig, "new", range(1_000, 1_010), arrived=1_000),
        queued(rig, "old", range(2_000, 2_050), arrived=0),
    ]
    assert schedule(rig, queue, processed=1_000) == ["old", "new"]
    assert schedule(rig, queue, processed=0) == ["new", "old"]
    serve(rig, queue)


def test_of_equal_prefixes_one_goes_first(make_rig):
    rig = make_rig(config=SHORTEST)
    queue = [
        queued(rig, "first", range(40)),
        queued(rig, "same", [*range(40), 7]),
        queued(rig, "other", range(1_000, 1_060)),
    ]
    assert schedule(rig, queue) == ["first", "other", "same"]
    serve(rig, queue[:1])
    assert schedule(rig, queue[1:]) == ["same", "other"]
    serve(rig, queue[1:])


def test_a_large_queue_is_left_as_it_came(make_rig):
    rig = make_rig(config=SHORTEST)
    n = WAITING_QUEUE_PREFIX_MATCH_MAX + 1
    queue = [queued(rig, str(i), range(1_000 * i, 1_000 * i + n - i)) for i in range(n)]
    assert schedule(rig, queue) == [str(i) for i in range(n)]
    rest = queue[1:]
    assert schedule(rig, rest) == [str(i) for i in reversed(range(1, n))]
    for req in queue:
        rig.abort_queued(req)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"schedule_policy": "lpm"}, "--schedule-policy lpm"),
        ({"enable_priority_scheduling": True}, "--enable-priority-scheduling"),
    ],
)
def test_another_order_is_refused_at_start(monkeypatch, setting, text):
    monkeypatch.setenv("SAM_ADMISSION", "shortest")
    params = SimpleNamespace(eviction_policy="lru")
    off = dict.fromkeys(("is_hybrid_swa", "is_hybrid_ssm", "disable_radix_cache"), False)
    settings = {"page_size": 1, "hicache": False, "host_ratio": 1.0}
    with server_settings(write_policy="write_back", **settings), get_schedule().override(**setting):
        with pytest.raises(ValueError, match="cache-backend sam: ") as error:
            plugin.create_cache(SimpleNamespace(params=params, **off))
    assert text in str(error.value) and "--sam-admission off" in str(error.value)
