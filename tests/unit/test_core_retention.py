"""Gaps, trust, regret, ghosts and the tracker; the orders have a model test of their own."""

import math
import random

import pytest

from sam.core.gaps import GapEstimator, GapParams, label_of
from sam.core.ghost import GhostCache, GhostPair
from sam.core.guard import EndTrust, RegretGuard
from sam.core.order import EvictionOrder, create_order, drain
from sam.core.policies import POLICY_NAMES
from sam.core.retention import DEFAULT_PLAIN_GAP_S, Standing, next_use
from sam.core.retention import NextUseRank as R
from sam.core.tracker import RetentionTracker

# -- gaps ------------------------------------------------------------------------------


def test_labels():
    assert label_of("tool_calls", "bash") == "bash"
    assert label_of("tool_calls") == label_of("tool_calls", "") == "tool"
    assert label_of("stop") == label_of("stop", "bash") == "human"
    assert label_of("length") == label_of(None) == "other"
    assert label_of("tool_calls", "human") == "tool:human"
    assert len(label_of("tool_calls", "x" * 10_000)) < 200


def test_priors():
    gaps = GapEstimator()
    for label, prior_s in (("tool", 20), ("bash", 20), ("human", 200), ("other", 200)):
        assert gaps.gap_s("s", label) == pytest.approx(prior_s)
    assert gaps.gap_s(None, "plain") == pytest.approx(DEFAULT_PLAIN_GAP_S)


def test_means_by_definition():
    gaps, xs = GapEstimator(), [3.0, 50.0, 0.0, 7.0]
    for x in xs:
        gaps.observe("s", "bash", x)
    total, weight, own = 20 * math.log(11), 20.0, None
    for v in (math.log(1 + x) for x in xs):
        total, weight = total * 0.998 + v, weight * 0.998 + 1
        own = v if own is None else 0.7 * own + 0.3 * v
    mean = total / weight
    assert gaps.gap_s("s", "bash") == pytest.approx(2 * math.expm1(0.5 * mean + 0.5 * own))
    assert gaps.gap_s("other session", "bash") == pytest.approx(2 * math.expm1(mean))
    assert gaps.gap_s("s", "grep") == pytest.approx(20)
    gaps.forget("s")
    assert gaps.gap_s("s", "bash") == pytest.approx(2 * math.expm1(mean))


@pytest.mark.parametrize(("seen_s", "expected_s"), [(1e9, 3600), (-5.0, 1), (0.0, 1)])
def test_gaps_are_clamped(seen_s, expected_s):
    gaps = GapEstimator()
    for _ in range(5_000):
        gaps.observe("s", "tool", seen_s)
    assert gaps.gap_s("s", "tool") == expected_s


def test_gaps_are_bounded():
    gaps = GapEstimator(GapParams(max_labels=10, max_labels_per_session=3))
    for i in range(100):
        gaps.observe("s", f"tool{i}", 500.0)
        gaps.observe(None, "tool0", 500.0)
    assert gaps.n_labels == 14 and len(gaps) == 1
    assert gaps.gap_s("t", "tool0") > 400
    assert gaps.gap_s("t", "tool50") == pytest.approx(20)
    gaps.forget("s")
    assert len(gaps) == 0


# -- brakes ----------------------------------------------------------------------------


def test_end_trust():
    trust = EndTrust()
    assert all(trust.ended() for _ in range(70))
    assert [trust.returned() for _ in range(4)] == [True, True, True, False]  # 3 % of 100 is 3
    assert [trust.ended() for _ in range(33)] == [False] * 33  # 4 = 3 % of 133.3
    assert trust.ended()


def test_equality_changes_nothing():
    trust = EndTrust()
    trust.n_ends, trust.n_returns = 70, 2
    assert trust.returned()  # 3 = 3 % of 100
    trust = EndTrust()
    trust.n_ends, trust.n_returns = 68, 3
    assert not trust.ended() and not trust.ended() and trust.ended()


def test_regret_fades():
    guard = RegretGuard(100)
    assert not any(guard.observe(1, 0) for _ in range(100))
    for _ in range(300):
        guard.observe(5, 5)
    assert guard.behind_pages == pytest.approx(43, abs=2)
    assert guard.n_switches == 0


# -- keys and orders -------------------------------------------------------------------


def test_keys():
    idle = Standing(R.IDLE, 90.0, 10.0)
    assert next_use(idle, 100.0) == (R.IDLE, 20.0)
    hinted = Standing(R.OFFLOADED, 90.0, 10.0, 60.0)
    assert next_use(hinted, 100.0) == (R.IDLE, 51.0)
    assert next_use(hinted, 100.0, backed=True) == (R.OFFLOADED, 51.0)
    assert next_use(hinted, 490.0) == (R.IDLE, 201.0)
    ended = Standing(R.ENDED, 90.0, 10.0)
    assert next_use(ended, 100.0) == (R.ENDED, 10.0)
    assert next_use(ended, 100.0, trust_ends=False) == (R.IDLE, 20.0)
    ranks = [next_use(Standing(r, 1.0), 2.0, backed=True).rank for r in R]
    assert ranks == sorted(ranks) == list(R)


def test_wrong_calls_are_refused_and_change_nothing():
    for name in POLICY_NAMES:
        order = create_order(name)
        order.set_user("a", Standing(R.IDLE))
        order.add(1, ["a"], 1.0, 1, 1)
        with pytest.raises(ValueError, match="leaf 1 "):
            order.add(1, [], 1.0, 1, 1)
        with pytest.raises(KeyError):
            order.add(2, ["a", "nobody"], 1.0, 1, 1)
        for call, *args in ((order.remove,), (order.touch, 1.0), (order.update,)):
            with pytest.raises(KeyError):
                call(2, *args)
        order.discard(2)
        order.drop_user("nobody")
        assert len(order) == 1 and 2 not in order
        assert order.pop_victim(5.0).node_id == 1 and order.pop_victim(5.0) is None
    with pytest.raises(ValueError, match="next-use, lru, session-ref"):
        create_order("mru")


def test_session_ref():
    order = create_order("session-ref")
    for user in "abc":
        order.set_user(user, Standing(R.IDLE))
    order.add(1, "ab", 1.0, 1, 1)
    order.add(2, "a", 2.0, 1, 1)
    order.add(3, "", 9.0, 1, 1)
    order.add(4, "c", 1.5, 1, 1)
    order.set_user("c", Standing(R.ENDED))
    assert [order.pop_victim(10.0).node_id for _ in range(4)] == [4, 3, 2, 1]


def test_time_never_runs_back():
    order = EvictionOrder()
    order.set_user("a", Standing(R.IDLE, 0.0, 10.0, 30.0))
    order.add(1, "a", 0.0, 1, 1)
    assert order.peek(25.0).key == (R.IDLE, 13.5)
    assert order.peek(5.0).key == order.key_of_user("a", 5.0) == (R.IDLE, 13.5)


def test_a_leaf_of_many_users_goes_by_the_soonest():
    order = EvictionOrder()
    for i in range(1000):
        order.set_user(i, Standing(R.IDLE, float(i), 10.0))
    order.add(1, range(1000), 999.0, 1, 1)
    order.add(2, [500], 999.0, 1, 1)
    assert order.pop_victim(1000.0).key == (R.IDLE, 510.0)
    for i in range(999, 700, -1):
        order.drop_user(i)
    assert order.peek(1000.0).key == (R.IDLE, 310.0)


def test_timers_and_shelves_are_bounded():
    order = EvictionOrder()
    for i in range(20_000):
        user = f"u{i}" if i % 2 else "same"
        order.set_user(user, Standing(R.IDLE, float(i), 10.0, 80_000.0))
        if i < 2:
            order.add(i, [user], float(i), 1, 1)
        order.drop_user(f"u{i - 2}")
        order.touch(0, float(i))
        order.peek(float(i))
    queue = order.queue
    assert len(queue._timers) < 100
    assert all(len(s._heap) < 100 for s in (*queue._idle.shelves, queue._owned, queue._plain))


def test_drain_trims_the_last_victim():
    order = EvictionOrder("lru")
    for i in range(3):
        order.add(i, (), float(i), 1, 10)
    gone = []
    assert drain(order, 14, 9.0, gone.append) == [(0, 10), (1, 4)]
    assert gone == [0] and order.peek(9.0).pages == 6
    assert drain(order, 99, 9.0, gone.append) == [(1, 6), (2, 10)]


# -- ghosts ----------------------------------------------------------------------------


def test_ghost_of_lru_by_hand():
    ghost = GhostCache(10, EvictionOrder("lru"))
    assert ghost.access([("sys", 2), ("a", 3)], 1.0) == 5
    assert ghost.access([("sys", 2), ("b", 3)], 2.0) == 3
    assert ghost.access([("sys", 2), ("a", 5)], 3.0) == 2
    assert ghost.access([("sys", 2), ("c", 2)], 4.0) == 2  # b is trimmed to 1
    assert ghost.access([("sys", 2), ("b", 3)], 5.0) == 2  # and a to 3
    assert ghost.access([("sys", 2), ("a", 5)], 6.0) == 2
    assert ghost.access([("huge", 50)], 7.0) == 50 and ghost.used_pages == 10
    assert ghost.access([("huge", 50)], 8.0) == 40


def check_ghost(ghost):
    pages = sum(s.pages for s in ghost._segments.values())
    assert pages == ghost.used_pages <= ghost.capacity_pages
    assert all(s.pages > 0 for s in ghost._segments.values())
    leaves = {i for i, s in ghost._segments.items() if not s.children}
    assert leaves == set(ghost.order._leaves)
    listed = {(u, i) for i, s in ghost._segments.items() for u in s.users}
    assert listed == {(u, s.node_id) for u, path in ghost._path_of.items() for s in path}
    for node_id in leaves:
        assert ghost.order._leaves[node_id].pages == ghost._segments[node_id].pages


def test_ghost_accounts_are_exact():
    rng = random.Random(1)
    pair = GhostPair(60)
    tracker = RetentionTracker([pair])
    for i in range(3_000):
        user, now_s = f"u{rng.randrange(12)}", float(i)
        path = [("sys", 5), (rng.randrange(2), rng.randrange(0, 8)), (user, rng.randrange(30))]
        tracker.running(user, now_s)
        pair.access(path[: rng.randrange(4)], now_s, rng.choice((user, user, None)))
        tracker.idle(user, now_s, rng.choice(("tool", "human")))
        if rng.random() < 0.2:
            tracker.ended(user, now_s)
        if rng.random() < 0.05:
            tracker.forget(f"u{rng.randrange(12)}")
        check_ghost(pair.ours)
        check_ghost(pair.lru)
    for i in range(12):
        tracker.forget(f"u{i}")
    assert not pair.ours._path_of and not pair.ours.order._of_user


def test_the_guard_fires_when_labels_lie_and_lets_go():
    """Tools stay away, humans come back at once: swapped against the priors."""
    pair = GhostPair(60)
    gaps = GapEstimator(GapParams(prior_weight=1e9))
    tracker = RetentionTracker([pair], gaps=gaps)
    used, n_often = [], 0
    for i in range(1_500):
        honest = i >= 500
        often = bool(i % 2 if honest else i % 4)
        n_often += often
        user = f"often{n_often % 4}" if often else f"once{i}"
        tracker.running(user, float(i))
        used.append(pair.access([(user, 10)], float(i), user))
        tracker.idle(user, float(i), "tool" if often == honest else "human")
    assert used[499] and not used[-1] and pair.guard.n_switches == 2


# -- the tracker -----------------------------------------------------------------------


def tracked():
    order = EvictionOrder()
    return order, RetentionTracker([order])


def test_a_life():
    order, tracker = tracked()
    tracker.queued("s", 0.0)
    assert order.key_of_user("s", 1.0).rank == R.QUEUED
    tracker.running("s", 1.0)
    assert order.key_of_user("s", 1.0).rank == R.RUNNING
    tracker.idle("s", 2.0, "bash")
    assert order.key_of_user("s", 5.0) == (R.IDLE, pytest.approx(23.0))
    tracker.queued("s", 32.0)
    assert tracker.gaps.gap_s("t", "bash") > 20.0
    tracker.idle("s", 33.0, "bash")
    expected = 1.0 + tracker.gaps.gap_s("s", "bash")
    tracker.gaps.observe(None, "bash", 3000.0)  # g stands until the session returns
    assert order.key_of_user("s", 34.0) == (R.IDLE, pytest.approx(expected))
    tracker.ended("s", 50.0)
    assert order.key_of_user("s", 53.0) == (R.ENDED, 20.0)
    tracker.idle("s", 60.0)  # a late finish
    assert order.key_of_user("s", 63.0).rank == R.ENDED
    tracker.forget("s")
    assert not order.has_user("s") and "s" not in tracker and len(tracker.gaps) == 0


def test_hints_belong_to_one_idle_time():
    order, tracker = tracked()
    tracker.expect("s", 0.0, 5.0)
    assert not order.has_user("s")
    tracker.queued("s", 0.0)
    tracker.expect("s", 0.0, 60.0)
    tracker.running("s", 1.0)
    tracker.idle("s", 10.0, "tool")
    assert order.key_of_user("s", 30.0) == (R.IDLE, 41.0)
    tracker.expect("s", 30.0, 60.0)  # counts from now on: 80 s after the answer
    assert order.key_of_user("s", 30.0) == (R.IDLE, 61.0)
    tracker.queued("s", 40.0)
    tracker.idle("s", 50.0, "tool")
    assert order.key_of_user("s", 50.0).use_in_s < 40.0


def test_offload_and_resume():
    order, tracker = tracked()
    tracker.offloaded("s")
    tracker.resuming("s")
    tracker.idle("s", 0.0, "tool")
    order.add(1, ["s"], 0.0, 1, 1, backed=True)
    order.add(2, [], 0.0, 1, 1)
    tracker.offloaded("s")
    assert order.peek(0.0).key.rank == R.OFFLOADED
    order.update(1, backed=False)
    assert order.peek(0.0).node_id == 2
    tracker.resuming("s")
    assert order.key_of_user("s", 0.0).rank == R.QUEUED
    tracker.resuming("s", False)
    order.update(1, backed=True)
    assert order.peek(0.0).key.rank == R.OFFLOADED
    tracker.queued("s", 1.0)
    tracker.idle("s", 1.0, "tool")
    assert order.peek(1.0).node_id == 2


def test_left_branches_end_and_return_with_the_session():
    order, tracker = tracked()
    with pytest.raises(KeyError):
        tracker.left_branches("s")
    tracker.idle("s", 0.0)
    left = tracker.left_branches("s")
    order.add(1, [left], 0.0, 1, 1)
    assert order.peek(1.0).key.rank == R.SUPERSEDED
    tracker.ended("s", 1.0)
    assert order.peek(1.0).key.rank == R.ENDED
    tracker.queued("s", 2.0)
    assert order.peek(2.0).key.rank == R.SUPERSEDED
    tracker.forget("s")
    assert order.peek(2.0).key.rank == R.IDLE


def test_false_ends_lose_trust_in_all_orders():
    device, host = EvictionOrder(), EvictionOrder()
    tracker = RetentionTracker([device, host])
    tracker.idle("e", 0.0, "tool")
    tracker.ended("e", 0.0)
    tracker.idle("a", 0.0, "human")
    for order in (device, host):
        order.add(1, ["e"], 0.0, 1, 1)
        order.add(2, ["a"], 0.0, 1, 1)
    assert device.peek(1.0).node_id == host.peek(1.0).node_id == 1
    tracker.ended("f", 1.0)
    tracker.queued("f", 2.0)
    assert device.peek(2.0).node_id == host.peek(2.0).node_id == 2
    for i in range(40):
        tracker.ended(f"g{i}", 3.0)
    assert device.peek(3.0).node_id == host.peek(3.0).node_id == 1


def test_a_lease_outlives_other_hints():
    order, tracker = tracked()
    tracker.queued("s", 0.0)
    tracker.idle("s", 1.0)
    tracker.resuming("s")
    tracker.expect("s", 2.0, 300.0)
    tracker.retain("s", 2.0, 5.0)
    tracker.retain("s", 2.0, 0.0)
    tracker.relabel("s", "tool")
    assert order.key_of_user("s", 2.0).rank == R.QUEUED
    tracker.resuming("s", False)
    assert order.key_of_user("s", 2.0) == (R.IDLE, 301.0 + 0.0)


def test_a_hint_older_than_the_newest_request_is_over():
    order, tracker = tracked()
    tracker.queued("s", 5.0, 1.0)
    tracker.queued("s", 7.0, 6.0)
    tracker.expect("s", 1.0, 3_000.0)
    tracker.idle("s", 8.0, "tool")
    assert order.key_of_user("s", 8.0) == (R.IDLE, pytest.approx(20.0))
    tracker.expect("s", 6.0, 50.0)
    assert order.key_of_user("s", 8.0) == (R.IDLE, 51.0)


def test_a_warm_up_teaches_nothing():
    _, tracker = tracked()
    before = tracker.gaps.gap_s(None, "other")
    for i in range(30):
        tracker.queued(i, float(i))
        tracker.idle(i, float(i), learns=False)
        tracker.queued(i, float(i))
    assert tracker.gaps.gap_s(None, "other") == before and len(tracker.gaps) == 0


def test_an_offloaded_tail_follows_its_session():
    order, tracker = tracked()
    tracker.queued("s", 0.0)
    tracker.idle("s", 1.0, "tool")
    tail = tracker.offloaded_tail("s", 2.0)
    order.add(1, [tail], 0.0, 1, 1, backed=True)
    assert order.peek(3.0).key.rank == R.OFFLOADED
    tracker.queued("s", 3.0)
    assert order.peek(3.0).key.rank == R.QUEUED
    tracker.idle("s", 4.0, "tool")
    assert order.peek(4.0).key.rank == R.OFFLOADED
    order.discard(1)
    tracker.forget("s")
    assert not order.has_user(tail)


def test_retained_until_its_time():
    order, tracker = tracked()
    tracker.queued("s", 0.0)
    tracker.retain("s", 0.0, 10.0)
    tracker.idle("s", 1.0)
    assert order.key_of_user("s", 2.0).rank == R.QUEUED
    tracker.retain("s", 3.0, 10.0)
    assert tracker.advance(12.0) == []
    assert tracker.advance(13.0) == ["s"]
    assert order.key_of_user("s", 13.0).rank == R.IDLE
    tracker.retain("nobody", 1.0, 10.0)
    assert tracker.advance(99.0) == []


def test_keep_alives_are_bounded():
    _, tracker = tracked()
    for i in range(2_000):
        tracker.queued(i % 7, float(i))
        tracker.retain(i % 7, float(i), 10_000.0)
    assert len(tracker._retained) < 100
    for i in range(2_000):
        tracker.queued(("gone", i), 2_000.0)
        tracker.retain(("gone", i), 2_000.0, 10_000.0)
        tracker.ended(("gone", i), 2_000.0)
        tracker.forget(("gone", i))
    assert len(tracker._retained) < 200
    assert sorted(tracker.advance(99_999.0)) == list(range(7))


def test_who_came_last_to_the_queue_is_served_last_and_goes_first():
    order = EvictionOrder("next-use")
    tracker = RetentionTracker([order])
    for i, name in enumerate(("promised", "late", "early", "again")):
        tracker.idle(name, float(i))
        order.add(i, [name], float(i), 1, 1)
    tracker.resuming("promised")
    tracker.queued("again", 10.0)
    tracker.queued("early", 11.0)
    tracker.queued("late", 12.0)
    tracker.queued("again", 13.0)  # its first request still waits
    keys = [order.pop_victim(20.0).key.use_in_s for _ in range(4)]
    assert keys == [float("inf"), -8.0, -9.0, -10.0]


def test_a_leaf_that_waits_under_an_earlier_request_moves_up_with_the_next():
    order = EvictionOrder("next-use")
    tracker = RetentionTracker([order])
    for i, name in enumerate("ab"):
        tracker.queued(name, float(i))
        order.add(i, [name], float(i), 1, 1)
    tracker.running("a", 2.0)
    tracker.queued("a", 3.0)
    assert order.peek(4.0).key.use_in_s == -1.0
