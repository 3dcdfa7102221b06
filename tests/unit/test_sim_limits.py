"""The clairvoyant limits: by hand, and against exhaustive search on tiny traces."""

import random
from functools import cache

import pytest

from sam.sim.limits import ceiling_hits, min_hits


def steps_of(paths):
    """Requests one after the other, each over before the next starts."""
    return lambda: (step for i, path in enumerate(paths) for step in ((i, path), (i, None)))


def hits(paths, capacity, may_refuse):
    return list(min_hits(steps_of(paths), capacity, may_refuse=may_refuse))


A, B, C = 0, 1, 2


def test_min_refuses_what_is_not_used_again():
    paths = [[(A, 2)], [(B, 2)], [(A, 2)], [(C, 2)], [(A, 2)]]
    assert hits(paths, 2, True) == [0, 0, 2, 0, 2]
    assert hits(paths, 2, False) == [0, 0, 0, 0, 0]


def test_min_keeps_the_head_of_what_comes_last():
    # After B, A returns with 4 pages, then B: three pages are free for A beside B's one.
    paths = [[(A, 4)], [(B, 1)], [(A, 4)], [(B, 1)]]
    assert hits(paths, 4, False) == [0, 0, 3, 0]
    assert hits(paths, 4, True) == [0, 0, 4, 0]  # B is refused


def test_a_running_request_is_held_until_its_answer():
    def steps():
        yield 0, [(A, 2)]
        yield 1, [(B, 2)]
        yield 0, None
        yield 1, None
        yield 2, [(C, 2)]
        yield 2, None
        yield 3, [(C, 2)]

    # A is never used again, but held while B starts: B's tail has no room.
    assert list(min_hits(steps, 3, may_refuse=False)) == [0, 0, 0, 2]


def test_shared_prefix_stays_for_its_next_user():
    shared = -1
    paths = [[(shared, 2), (A, 3)], [(B, 3)], [(shared, 2), (C, 1)]]
    assert hits(paths, 5, False) == [0, 0, 2]
    assert hits(paths, 3, False) == [0, 0, 0]


def test_ceiling_counts_from_the_first_page_on():
    paths = [[(-1, 4), (A, 2)], [(-1, 6)], [(-1, 4), (A, 5)], [(-1, 3), (B, 1)]]
    assert list(ceiling_hits(iter(paths))) == [0, 4, 6, 3]


def page_sets(paths):
    """Pages of each request: (stream, index), root first."""
    return [[(stream, i) for stream, pages in path for i in range(pages)] for path in paths]


def best_hits(paths, capacity, may_refuse):
    """Largest number of page hits that any prefix-closed cache of this size can have."""
    requests = page_sets(paths)
    parents = {}
    for pages in requests:
        for above, page in zip(pages, pages[1:], strict=False):
            parents[page] = above

    def closed(content):
        return all(parents.get(page) in content for page in content if page in parents)

    @cache
    def best(i, content):
        if i == len(requests):
            return 0
        hit = 0
        for page in requests[i]:
            if page not in content:
                break
            hit += 1
        everything = sorted(content | set(requests[i]))
        must = frozenset() if may_refuse else frozenset(requests[i])
        rest = [page for page in everything if page not in must]
        choices = [must]
        for page in rest:
            choices += [chosen | {page} for chosen in choices]
        options = [c for c in choices if len(c) <= capacity and closed(c)]
        largest = max(map(len, options))
        return hit + max(best(i + 1, c) for c in options if len(c) == largest or may_refuse)

    return best(0, frozenset())


def random_paths(rng):
    """Short paths over a shared stream and private ones that grow or shrink."""
    paths = []
    for _ in range(rng.randint(4, 6)):
        shared = rng.randint(0, 2)
        path = [(-1, shared)] if shared else []
        stream = rng.randrange(2) if shared == 2 else None
        pages = rng.randint(0 if path else 1, 2)
        if pages and stream is not None:
            path.append((stream, pages))
        paths.append(path or [(5, pages)])
    return paths


@pytest.mark.parametrize("may_refuse", [True, False])
def test_no_cache_does_better(may_refuse):
    rng = random.Random(7)
    for _ in range(150):
        paths, capacity = random_paths(rng), rng.randint(4, 6)
        found = sum(hits(paths, capacity, may_refuse))
        assert found == best_hits(tuple(paths), capacity, may_refuse), (paths, capacity)
