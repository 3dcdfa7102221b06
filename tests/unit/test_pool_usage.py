"""Pages of a pool by state and tenant: each counted once, against sets of all pages."""

import random

from test_page_ledger import ledger, pages_of

from sam.core.pool_usage import SESSIONS_PER_PAUSE, SHARED, measure_usage


def usage_of(book, states, pauses=None):
    pauses = [] if pauses is None else pauses
    return measure_usage(
        book,
        lambda owner: states.get(owner, "idle"),
        lambda owner: owner.partition("/")[0],
        lambda: pauses.append(1),
    )


def test_private_pages_count_for_their_sessions_state_and_shared_ones_once():
    book = ledger(group=2)
    book.note("t/a", pages_of(0, 1, 2, 3, "a", "a", "a", "a"))
    book.note("t/b", pages_of(0, 1, 2, 3, "b", "b", "b", "b"))
    book.note("u/c", pages_of("c", 1, 2, 3, 4))
    found = usage_of(book, {"t/a": "running"})
    # Kept: four shared, the group behind them on either side, the first group of c.
    assert found.by_state == {"running": 2, "idle": 2 + 3, SHARED: 4 + 2 + 2 + 2}
    assert found.by_tenant == {"t": 12, "u": 5}
    assert found.n_pages == 17


def test_short_and_unknown_sessions():
    book = ledger(group=4)
    book.note("t/a", pages_of(0, 1, 2))
    book.note("t/b", pages_of(0, 1, 2))
    assert usage_of(book, {}).by_state == {SHARED: 3, "idle": 0}
    assert book.parts("t/nobody") == (0, {})
    book.forget("t/a")
    book.forget("t/b")
    assert usage_of(book, {}).n_pages == 0


def test_branches_that_were_left_count():
    book = ledger(group=2)
    book.note("t/a", pages_of(0, 1, 2, 3, 4, 5))
    book.note("t/a", pages_of(0, 1, 2, "x"))
    assert usage_of(book, {}).by_state == {SHARED: 2, "idle": 2 + 3}


def test_random_sessions_against_sets_of_pages():
    """Whole groups are looked up by their last page only: texts branch at group borders."""
    rng = random.Random(7)
    for _ in range(50):
        book, pages = ledger(group=2), {}
        for i in range(rng.randrange(1, 12)):
            other = pages.get(f"t{rng.randrange(2)}/{rng.randrange(12)}", [])
            stem = other[: 2 * rng.randrange(len(other) // 2 + 1)]
            owner = f"t{rng.randrange(2)}/{i}"
            own = pages_of(*(f"{i}-{n}" for n in range(2 * rng.randrange(1, 5))))
            pages[owner] = [*stem, *own]
            book.note(owner, pages[owner])
        found = usage_of(book, {})
        assert found.n_pages == len({page for of in pages.values() for page in of})
        for tenant, n_pages in found.by_tenant.items():
            mine = [of for owner, of in pages.items() if owner.startswith(tenant + "/")]
            assert n_pages == len({page for of in mine for page in of})


def test_it_gives_way_every_so_often():
    book, pauses = ledger(group=2), []
    for i in range(3 * SESSIONS_PER_PAUSE):
        book.note(f"t/{i}", pages_of(i, i))
    assert usage_of(book, {}, pauses).n_pages == 6 * SESSIONS_PER_PAUSE
    assert len(pauses) == 3
