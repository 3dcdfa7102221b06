"""The ledger never names a page that two sessions had, against a record of everything."""

import hashlib
import random

import pytest

from sam.core.page_ledger import PAGE_BYTES, PageLedger


def pages_of(*texts):
    """Digest per page of one token, each of its whole prefix."""
    out, digest = [], b""
    for text in texts:
        digest = hashlib.sha256(digest + str(text).encode()).digest()
        out.append(digest)
    return out


def ledger(group=2, max_bytes=1 << 20):
    return PageLedger(group, max_bytes)


def test_first_group_stays_and_the_rest_is_private():
    book, pages = ledger(group=2), pages_of(*range(7))
    book.note("a", pages)
    assert book.private_pages("a") == pages[:1:-1]
    assert book.n_pages("a") == (7, 5)
    assert book.private_pages("a", start=5) == pages[6:4:-1]


def test_shared_pages_are_nobodys_and_stay_so():
    book = ledger(group=2)
    a, b = pages_of(0, 1, 2, 3, "a", "a", "a", "a"), pages_of(0, 1, 2, 3, "b", "b", "b", "b")
    book.note("a", a)
    book.note("b", b)
    # The group behind the last shared mark could be shared in part.
    assert book.private_pages("a") == a[:5:-1] and book.private_pages("b") == b[:5:-1]
    book.forget("b")
    assert book.private_pages("a") == a[:5:-1]
    book.note("c", pages_of(0, 1, 2, 3, "c"))
    assert book.private_pages("c") == []


def test_who_turns_out_to_share_is_told():
    book, pages = ledger(group=2), pages_of(*range(8))
    assert book.note("a", pages) == []
    assert book.note("b", pages[:5]) == ["a", "a"]
    assert book.note("c", pages[:5]) == [] and book.n_shared("c") == 4
    assert (book.n_shared("a"), book.n_shared("b"), book.n_shared("x")) == (4, 4, 0)


def test_what_is_known_to_be_shared_stays():
    book, pages = ledger(group=2), pages_of(*range(9))
    book.note("a", pages[:6], n_shared=4)
    book.note("a", pages)
    assert book.private_pages("a") == pages[:5:-1]
    assert book.pages("a") == pages and book.pages("x") == []


def test_sharing_is_found_when_the_second_one_grows_into_it():
    book, pages = ledger(group=2), pages_of(*range(10))
    book.note("a", pages)
    book.note("b", pages[:3])
    book.note("b", pages[:8])
    assert book.private_pages("a") == []
    assert book.private_pages("b") == []
    assert len(set(book.private_pages("a"))) == 0


def test_left_branches_go_with_the_session():
    book = ledger(group=2)
    old, new = pages_of(*"abcdefgh"), pages_of(*"abcdEFGHIJ")
    book.note("a", old)
    book.note("a", new)
    assert set(book.private_pages("a")) == set(new[2:]) | set(old[4:])
    book.note("a", old)
    assert set(book.private_pages("a")) == set(new[4:]) | set(old[2:])
    book.check()


def test_a_left_branch_that_somebody_forks_off_is_shared():
    book = ledger(group=2)
    old = pages_of(*"abcdefgh")
    book.note("a", old)
    book.note("a", pages_of(*"abXX"))
    book.note("b", [*old[:6], *pages_of("z")])
    assert not set(book.private_pages("a")) & set(old[:6])
    book.check()


def test_cut_forgets_what_lies_beyond():
    book, pages = ledger(group=2), pages_of(*range(8))
    book.note("a", pages)
    book.cut("a", 4)
    assert book.private_pages("a") == pages[3:1:-1]
    book.note("b", pages)
    assert book.n_pages("b") == (8, 2)
    book.cut("nobody", 1)
    book.check()


def test_bounded_the_longest_unseen_goes_first():
    book = ledger(group=4, max_bytes=40 * PAGE_BYTES)
    for name in "abc":
        book.note(name, pages_of(*range(3), *(f"{name}{i}" for i in range(12))))
    assert book.n_bytes <= book.max_bytes and "a" not in book and "c" in book
    assert book.n_forgotten == 3 - len(book)
    assert book.private_pages("a") == []
    book.check()


def test_one_session_larger_than_the_bound_is_kept_alone():
    book = ledger(max_bytes=PAGE_BYTES)
    book.note("a", pages_of(*range(50)))
    book.note("b", pages_of(*"xyz"))
    assert len(book) == 1 and "b" in book


def test_group_must_be_positive():
    with pytest.raises(ValueError, match="group_pages"):
        PageLedger(0, 1)


class Everything:
    """Who holds each page, and which ones two held at a time."""

    def __init__(self):
        self.holders = {}
        self.shared = set()

    def note(self, owner, pages):
        for at_page in enumerate(pages):
            holders = self.holders.setdefault(at_page, set())
            holders.add(owner)
            if len(holders) > 1:
                self.shared.add(at_page)

    def let_go(self, owner, start=0):
        for at_page, holders in list(self.holders.items()):
            if at_page[0] >= start and owner in holders:
                holders.remove(owner)
                if not holders:
                    del self.holders[at_page]
                    self.shared.discard(at_page)

    def private(self, owner):
        held = [at_page for at_page, who in self.holders.items() if who == {owner}]
        return {page for at, page in held if (at, page) not in self.shared}


@pytest.mark.parametrize("group", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_private_means_never_anybody_elses(seed, group):
    rng, book = random.Random(seed), ledger(group)
    texts, truth = [[]], Everything()
    live = "abcdef"
    for _ in range(150):
        owner, op = rng.choice(live), rng.random()
        if op < 0.75:
            head = rng.choice(texts)
            text = head[: rng.randrange(len(head) + 1)]
            text = text + [rng.randrange(3) for _ in range(rng.randrange(6))]
            texts = [*texts[-20:], text]
            pages = pages_of(*text)
            book.note(owner, pages)
            truth.note(owner, pages)
        elif op < 0.9:
            start = rng.randrange(8)
            book.cut(owner, start)
            truth.let_go(owner, start)
        else:
            book.forget(owner)
            truth.let_go(owner)
        book.check()
        for name in live:
            private = book.private_pages(name)
            assert len(private) == len(set(private)) == book.n_pages(name)[1]
            assert set(private) <= truth.private(name)
