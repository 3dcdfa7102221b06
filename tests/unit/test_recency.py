"""RecencyList against a sort, in long random runs; AccessClock; memory stays in proportion."""

import random

import pytest

from sam.core.recency import MAX_MARKS, AccessClock, RecencyList


@pytest.mark.parametrize("seed", range(8))
def test_the_head_is_the_one_a_sort_names(seed):
    rng, recency, naive, clock = random.Random(seed), RecencyList(), {}, 0
    for _ in range(5_000):
        node_id = rng.randrange(40)
        clock += 1
        op = rng.random()
        if op < 0.3:
            naive[node_id] = clock
            recency.put(node_id, clock)
        elif op < 0.5:
            naive[node_id] = rng.randrange(clock + 1)
            recency.put(node_id, naive[node_id])
        elif op < 0.85:
            naive.pop(node_id, None)
            recency.discard(node_id)
        elif (head := recency.head()) is not None:
            del naive[head[1]]
            recency.discard(head[1])
        expected = min(((when, i) for i, when in naive.items()), default=None)
        assert recency.head() == expected
        assert recency.at == naive and len(recency) == len(naive)


def test_old_places_are_forgotten():
    recency = RecencyList()
    for i in range(5):
        recency.put(i, 1_000_000 + i)
    for when in range(10_000):
        recency.put(0, 999_999 - when)
    assert len(recency._heap) < 100 and recency.head() == (990_000, 0)


def test_an_access_happened_at_the_newest_time_known_by_then():
    clock = AccessClock()
    assert clock.time_of(5) == 0.0
    for tick, time_s in ((10, 100.0), (20, 101.5), (20, 102.0), (30, 102.0), (40, 90.0)):
        clock.mark(tick, time_s)
    times = [clock.time_of(tick) for tick in (3, 10, 11, 20, 21, 99)]
    assert times == [100.0, 100.0, 100.0, 100.0, 102.0, 102.0]


def test_old_times_get_less_exact_not_lost():
    clock = AccessClock()
    for i in range(3 * MAX_MARKS):
        clock.mark(i, float(i))
    assert len(clock._ticks) <= MAX_MARKS
    assert clock.time_of(3 * MAX_MARKS - 5) == 3 * MAX_MARKS - 6
    for tick in range(1, 3 * MAX_MARKS, 997):
        assert 0.6 * tick - 100 <= clock.time_of(tick) < tick
