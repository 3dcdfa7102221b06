"""The simulated tier: victims by hand, and against a naive cache of single pages."""

import random

import pytest

from sam.core.order import EvictionOrder
from sam.core.tracker import RetentionTracker
from sam.sim.cache import TierCache

A, B, C, SHARED = 0, 1, 2, -1


def lru(capacity):
    return TierCache(capacity, EvictionOrder("lru"))


def ask(cache, path, time_s, session=None):
    """One whole request."""
    session = path[-1][0] if session is None else session
    hit = cache.access(path, time_s, session)
    cache.finish(session, time_s)
    return hit


def test_a_prompt_that_grows_hits_what_it_was():
    cache = lru(10)
    assert ask(cache, [(A, 3)], 1) == 0
    assert ask(cache, [(A, 5)], 2) == 3
    assert ask(cache, [(A, 5)], 3) == 5
    assert cache.used_pages == 5


def test_the_oldest_goes_from_its_tail():
    cache = lru(6)
    ask(cache, [(A, 3)], 1)
    ask(cache, [(B, 3)], 2)
    ask(cache, [(C, 1)], 3)
    assert [cache.peek([(s, 3)]) for s in (A, B, C)] == [2, 3, 1]


def test_a_branch_that_was_left_goes_before_the_shared_prefix():
    cache = lru(9)
    ask(cache, [(SHARED, 4), (A, 2)], 1)
    ask(cache, [(SHARED, 2), (B, 3)], 2)
    assert cache.used_pages == 9
    ask(cache, [(C, 2)], 3)
    assert cache.peek([(SHARED, 4), (A, 2)]) == 4
    assert cache.peek([(SHARED, 2), (B, 3)]) == 5


def test_a_running_request_is_locked():
    cache = lru(6)
    cache.access([(A, 3)], 1, "a")
    ask(cache, [(B, 3)], 2)
    ask(cache, [(C, 2)], 3)
    assert [cache.peek([(s, 3)]) for s in (A, B, C)] == [3, 1, 2]
    cache.finish("a", 4)
    ask(cache, [(B, 3)], 5)
    assert cache.peek([(C, 2)]) == 0
    assert cache.peek([(A, 3)]) == 3


def test_where_all_is_locked_the_oldest_request_gives_way():
    cache = lru(6)
    cache.access([(A, 3)], 1, "a")
    cache.access([(B, 3)], 2, "b")
    cache.access([(C, 2)], 3, "c")
    assert [cache.peek([(s, 3)]) for s in (A, B, C)] == [1, 3, 2]
    cache.finish("a", 4)


def test_a_request_larger_than_the_tier_keeps_its_head():
    cache = lru(4)
    ask(cache, [(SHARED, 2), (A, 5)], 1)
    assert cache.peek([(SHARED, 2), (A, 5)]) == 4
    assert cache.used_pages == 4


def tracked(capacity):
    order = EvictionOrder("next-use")
    tracker = RetentionTracker([order])
    return TierCache(capacity, order, tracker), tracker


def turn(cache, tracker, session, path, start_s, end_s, label="tool"):
    tracker.running(session, start_s)
    hit = cache.access(path, start_s, session)
    tracker.idle(session, end_s, label)
    cache.finish(session, end_s)
    return hit


def test_superseded_goes_before_idle_and_after_ended():
    cache, tracker = tracked(10)
    turn(cache, tracker, "a", [(A, 4)], 1, 2)
    turn(cache, tracker, "a", [(A, 1), (B, 2)], 3, 4)  # three pages of A were left
    turn(cache, tracker, "e", [(C, 2)], 5, 6)
    tracker.ended("e", 7)
    turn(cache, tracker, "n", [(9, 4)], 8, 9)
    assert cache.peek([(C, 2)]) == 0
    assert cache.peek([(A, 4)]) == 4
    turn(cache, tracker, "n", [(9, 6)], 10, 11)
    assert cache.peek([(A, 4)]) == 2
    assert cache.peek([(A, 1), (B, 2)]) == 3


def test_a_human_goes_before_a_tool():
    cache, tracker = tracked(6)
    turn(cache, tracker, "tool", [(A, 3)], 1, 2, "tool")
    turn(cache, tracker, "human", [(B, 3)], 3, 4, "human")
    turn(cache, tracker, "new", [(C, 2)], 5, 6)
    assert [cache.peek([(s, 3)]) for s in (A, B)] == [3, 1]


class NaiveLru:
    """Single pages, a scan for every victim: the least recently used page without a child."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.used_at = {}

    def ask(self, path, tick):
        pages, prefix = [], ()
        for stream, n in path:
            for i in range(n):
                prefix = (*prefix, (stream, i))
                pages.append(prefix)
        hit = 0
        while hit < len(pages) and pages[hit] in self.used_at:
            hit += 1
        for page in pages:
            self.used_at[page] = tick
        while len(self.used_at) > self.capacity:
            inner = {page[:-1] for page in self.used_at}
            leaves = [page for page in self.used_at if page not in inner]
            others = [page for page in leaves if page not in pages]
            victim = min(others or leaves, key=lambda page: (self.used_at[page], page))
            del self.used_at[victim]
        return hit


@pytest.mark.parametrize("seed", range(5))
def test_lru_equals_the_naive_cache(seed):
    rng = random.Random(seed)
    capacity = rng.randint(8, 30)
    cache, naive = lru(capacity), NaiveLru(capacity)
    for tick in range(400):
        path = [(SHARED, rng.randint(1, 4))]
        path += [(rng.randrange(3), rng.randint(1, 6))] if path[0][1] == 4 else []
        path += [(7, rng.randint(1, 3))] if len(path) == 2 and path[1] == (0, 2) else []
        assert ask(cache, path, float(tick), "s") == naive.ask(path, tick), tick
        assert cache.used_pages == len(naive.used_at)
