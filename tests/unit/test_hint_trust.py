"""Which expected idle times are believed: judged at each return, by the time in force."""

import pytest

from sam.core.guard import HintTrust
from sam.core.order import EvictionOrder
from sam.core.retention import NextUseRank as R
from sam.core.tracker import RetentionTracker


def tracked():
    order = EvictionOrder()
    return order, RetentionTracker([order])


def announce_a_long_wait(tracker, now):
    tracker.queued("s", now)
    tracker.expect("s", now, 1_000.0)
    tracker.idle("s", now, "tool")


def returns(tracker, hinted_s, gaps_s):
    """A session that announces and takes these idle times; the time of its last answer."""
    now = 0.0
    for hint_s, gap_s in zip(hinted_s, gaps_s, strict=True):
        tracker.queued("s", now)
        tracker.running("s", now)
        tracker.expect("s", now, hint_s)
        tracker.idle("s", now, "tool")
        now += gap_s
    announce_a_long_wait(tracker, now)
    return now


@pytest.mark.parametrize(
    ("hints_s", "believed"),
    [([10.0] * 4, True), ([25.0, 4.0, 25.0, 4.0], True), ([3_600.0], False), ([0.01] * 4, False)],
)
def test_hints_are_believed_while_they_beat_the_estimate(hints_s, believed):
    order, tracker = tracked()
    now = returns(tracker, hints_s, [10.0] * len(hints_s))
    use_in_s = order.key_of_user("s", now).use_in_s
    assert (use_in_s == pytest.approx(1_001.0)) == believed
    assert believed or use_in_s < 100.0


def test_a_client_that_stops_lying_is_believed_again():
    order, tracker = tracked()
    now = returns(tracker, [3_600.0] * 3 + [10.0] * 12, [10.0] * 15)
    assert order.key_of_user("s", now) == (R.IDLE, pytest.approx(1_001.0))


def returns_after(tracker, said, gap_s, n=1):
    """`n` idle times of `gap_s` in which hints are given: (age, expected). Then one more idle
    time with a hint of 1,000 s; when that starts."""
    now = 0.0
    for _ in range(n):
        tracker.queued("s", now)
        tracker.running("s", now)
        tracker.idle("s", now, "tool")
        for age_s, hint_s in said:
            tracker.expect("s", now + age_s, hint_s)
        now += gap_s
    announce_a_long_wait(tracker, now)
    return now


@pytest.mark.parametrize(
    ("said", "gap_s", "believed"),
    [
        ([(0.0, 3_600.0), (9.9, 0.1)], 10.0, False),  # a lie, taken back just before the return
        ([(0.0, 3_600.0), (0.1, 9.9)], 10.0, True),  # a mistake, corrected at once
        ([(0.0, 10.0), (9.9, 3_600.0)], 10.0, True),
        ([(0.0, 0.01), (0.01, 3_600.0), (9.9, 0.1)], 10.0, False),
        ([(2.0 * i, 10.0 - 2.0 * i) for i in range(5)], 10.0, True),  # a countdown
        ([(float(i), 1.0) for i in range(10)], 10.0, True),  # always late: half of its age
        ([(0.1 * i, 3_600.0) for i in range(99)] + [(9.91, 0.09)], 10.0, False),
        ([(0.1 * i, 10.0 - 0.1 * i) for i in range(31)] + [(9.0, 3_600.0)] * 60, 10.0, True),
    ],
)
def test_a_hint_is_judged_by_the_time_in_which_it_was_in_force(said, gap_s, believed):
    order, tracker = tracked()
    now = returns_after(tracker, said, gap_s, n=3)
    use_in_s = order.key_of_user("s", now).use_in_s
    assert (use_in_s == pytest.approx(1_001.0)) == believed
    assert believed or use_in_s < 100.0


def test_only_so_many_hints_of_one_idle_time_are_listened_to():
    order, tracker = tracked()
    for start_s in (0.0, 100.0):
        tracker.queued("s", start_s)
        tracker.idle("s", start_s, "tool")
        refused = [tracker.expect("s", start_s, 60.0 + i) for i in range(40)]
        assert refused == [""] * 32 + ["too_many_hints"] * 8
        assert order.key_of_user("s", start_s) == (R.IDLE, 60.0 + 31 + 1)


def test_a_hint_that_is_replaced_before_the_idle_time_is_not_judged():
    order, tracker = tracked()
    now = 0.0
    for _ in range(5):
        tracker.queued("s", now)
        tracker.expect("s", now, 3_600.0)
        tracker.expect("s", now, 10.0)
        tracker.idle("s", now, "tool")
        now += 10.0
    tracker.queued("s", now)
    tracker.expect("s", now, 1_000.0)
    tracker.idle("s", now, "tool")
    assert order.key_of_user("s", now) == (R.IDLE, pytest.approx(1_001.0))


def test_a_return_at_once_is_judged_by_the_last_hint():
    trust = HintTrust()
    trust.returned(0.0, [(0.0, 50_000.0), (0.0, 0.0)], 20.0)
    assert trust.trusted and trust.regret == 0.0
    trust.returned(0.0, [(0.0, 0.0), (0.0, 50_000.0)], 20.0)
    assert not trust.trusted


def test_a_hint_given_at_the_return_was_never_in_force():
    trust = HintTrust()
    trust.returned(5.0, [(0.0, 5.0), (5.0, 50_000.0), (7.0, 50_000.0)], 20.0)
    assert trust.regret == 0.0
