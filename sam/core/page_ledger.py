"""Which pages of a pool belong to one session alone, as far as this server knows.

Owns the record of pages per session and the index that finds sharing. Must never name a page
that two sessions wrote or read, nor one of the first group, where the system prompt and the
tools lie: those are left to the pool's own order.

Pages are digests of their whole prefix, so two sessions share a page exactly if they share
everything before it. Sharing is looked up at the end of each group of pages, and counts for
the group that follows as well: it may be shared in part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

PAGE_BYTES = 32
"""Length of a page's digest."""

MAX_LEFT_PAGES = 1 << 14
"""Of branches that one session left; the oldest beyond that stay in the pool."""

_MARK_BYTES = 250
"""About what one mark takes."""


class _Mark:
    """A page that ends a group: how many sessions have it, and whose it is if it ever was
    of one only."""

    __slots__ = ("n_holders", "owner")

    def __init__(self, owner: Hashable) -> None:
        self.owner: Hashable | None = owner
        self.n_holders = 1


class _Record:
    """One session: its pages now, those that it left by where they were, its marks, and how
    many leading pages were ever shared."""

    __slots__ = ("left", "marks", "n_shared", "pages")

    def __init__(self) -> None:
        self.pages = b""
        self.left: dict[bytes, int] = {}
        self.marks: dict[bytes, None] = {}
        self.n_shared = 0

    @property
    def n_bytes(self) -> int:
        return len(self.pages) + 4 * PAGE_BYTES * len(self.left) + _MARK_BYTES * len(self.marks)


class PageLedger:
    """See the module. `group_pages`: pages between two marks; `max_bytes`: about what the
    ledger may take, the longest unseen session is forgotten first and its pages stay.
    """

    def __init__(self, group_pages: int, max_bytes: int) -> None:
        if group_pages < 1:
            raise ValueError("group_pages must be positive")
        self.group_pages = group_pages
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self.n_forgotten = 0
        self._records: OrderedDict[Hashable, _Record] = OrderedDict()
        self._sharers: list[Hashable] = []
        self._marks: dict[bytes, _Mark] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._records

    def note(
        self, owner: Hashable, pages: Sequence[bytes], n_shared: int = 0
    ) -> list[Hashable]:
        """The session's branch consists of these pages now, root first, of which so many are
        known to be shared; return the others that turn out to share more. O(pages)."""
        record = self._records.pop(owner, None) or _Record()
        self.n_bytes -= record.n_bytes
        self._leave(record, pages)
        record.pages = b"".join(pages)
        record.n_shared = max(record.n_shared, n_shared)
        self._sharers = []
        for i in range(self.group_pages - 1, len(pages), self.group_pages):
            self._mark(owner, record, pages[i], i + 1)
        self._records[owner] = record
        self.n_bytes += record.n_bytes
        while self.n_bytes > self.max_bytes and len(self._records) > 1:
            self.forget(next(iter(self._records)))
            self.n_forgotten += 1
        return self._sharers

    def private_pages(self, owner: Hashable, start: int = 0) -> list[bytes]:
        """Pages at `start` or deeper that only this session ever had, deepest first."""
        record = self._records.get(owner)
        if record is None:
            return []
        pages = _split(record.pages)[max(start, self._first_private(record)) :]
        left = [page for page, at in record.left.items() if at >= start]
        return pages[::-1] + left[::-1]

    def n_shared(self, owner: Hashable) -> int:
        """Leading pages of the session that were ever known to be shared."""
        record = self._records.get(owner)
        return record.n_shared if record is not None else 0

    def pages(self, owner: Hashable) -> list[bytes]:
        """All pages of the session's current branch, root first."""
        record = self._records.get(owner)
        return _split(record.pages) if record is not None else []

    def n_pages(self, owner: Hashable) -> tuple[int, int]:
        """(pages, of them private) of the session's branches."""
        record = self._records.get(owner)
        if record is None:
            return 0, 0
        n_current, n_left = len(record.pages) // PAGE_BYTES, len(record.left)
        return n_current + n_left, max(0, n_current - self._first_private(record)) + n_left

    def owners(self) -> list[Hashable]:
        """Sessions that have a record, the longest unseen first."""
        return list(self._records)

    def parts(self, owner: Hashable) -> tuple[int, dict[bytes, int]]:
        """(private pages, the leading ones that are not): of those, by the last page of each
        group, how many there are up to it. O(leading pages / group)."""
        record = self._records.get(owner)
        if record is None:
            return 0, {}
        n_current = len(record.pages) // PAGE_BYTES
        n_leading = min(n_current, self._first_private(record))
        ends = [*range(self.group_pages, n_leading + 1, self.group_pages)]
        if n_leading % self.group_pages:
            ends.append(n_leading)
        leading, start = {}, 0
        for end in ends:
            leading[record.pages[(end - 1) * PAGE_BYTES : end * PAGE_BYTES]] = end - start
            start = end
        return n_current - n_leading + len(record.left), leading

    def cut(self, owner: Hashable, n_pages: int) -> None:
        """The session's branches end after so many pages; its own beyond are gone."""
        record = self._records.get(owner)
        if record is None:
            return
        self.n_bytes -= record.n_bytes
        gone = [page for page, at in record.left.items() if at >= n_pages]
        for page in [*_split(record.pages[n_pages * PAGE_BYTES :]), *gone]:
            record.left.pop(page, None)
            self._unmark(record, page)
        record.pages = record.pages[: n_pages * PAGE_BYTES]
        self.n_bytes += record.n_bytes

    def forget(self, owner: Hashable) -> None:
        """Nothing is known of the session any more; for those that it shared pages with,
        these stay shared."""
        record = self._records.pop(owner, None)
        if record is None:
            return
        self.n_bytes -= record.n_bytes
        for page in list(record.marks):
            self._unmark(record, page)

    def check(self) -> None:
        """Raise AssertionError unless marks, records and bytes agree. O(everything)."""
        holders: dict[bytes, list[Hashable]] = {}
        for owner, record in self._records.items():
            for page in record.marks:
                holders.setdefault(page, []).append(owner)
        assert holders.keys() == self._marks.keys(), "marks without a holder, or none for one"
        for page, mark in self._marks.items():
            assert mark.n_holders == len(holders[page]), "holders are miscounted"
            assert mark.owner is None or [mark.owner] == holders[page], "not its owner"
        assert self.n_bytes == sum(record.n_bytes for record in self._records.values())

    # -- inside -------------------------------------------------------------------

    def _first_private(self, record: _Record) -> int:
        """The first group always stays, and so does the one behind the last shared mark."""
        return record.n_shared + self.group_pages

    def _mark(self, owner: Hashable, record: _Record, page: bytes, end: int) -> None:
        """The session has a page that ends a group, `end` pages from the root."""
        mark = self._marks.get(page)
        if mark is None:
            self._marks[page] = _Mark(owner)
            record.marks[page] = None
            return
        if page not in record.marks:
            record.marks[page] = None
            mark.n_holders += 1
            if mark.owner is not None:
                self._sharers.append(mark.owner)
                other, mark.owner = self._records[mark.owner], None
                self.n_bytes -= other.n_bytes
                self._share(other, end)
                self.n_bytes += other.n_bytes
        if mark.owner is None:
            self._share(record, end)

    def _share(self, record: _Record, end: int) -> None:
        """The first `end` pages of one of its branches are somebody else's too."""
        record.n_shared = max(record.n_shared, end)
        until = self._first_private(record)
        for page in [page for page, at in record.left.items() if at < until]:
            del record.left[page]

    def _unmark(self, record: _Record, page: bytes) -> None:
        if page not in record.marks:
            return
        del record.marks[page]
        mark = self._marks[page]
        mark.n_holders -= 1
        if not mark.n_holders:
            del self._marks[page]

    def _leave(self, record: _Record, pages: Sequence[bytes]) -> None:
        """What the former branch had and the new one has not: only private pages count."""
        former = _split(record.pages)
        common = 0
        for old, new in zip(former, pages, strict=False):
            if old != new:
                break
            common += 1
        first = max(common, self._first_private(record))
        record.left.update(zip(former[first:], range(first, len(former)), strict=True))
        for page in pages[common:]:
            record.left.pop(page, None)
        while len(record.left) > MAX_LEFT_PAGES:
            del record.left[next(iter(record.left))]


def _split(pages: bytes) -> list[bytes]:
    return [pages[i : i + PAGE_BYTES] for i in range(0, len(pages), PAGE_BYTES)]
