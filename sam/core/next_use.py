"""The recommended order: the leaf whose next use is farthest away goes first.

Owns the shelves on which leaves wait by next-use key (source: the project's policy notes;
the key itself is `sam.core.retention.next_use`). Must never recompute all keys: nothing
here walks all leaves, whatever the time does.

`age + g` orders by `idle since - g`, which does not change with time. Hinted sessions
order by expected return until they are late, then by age; the moment when one becomes
late is a timer. Unowned leaves order by last access. So within each shelf the order never
changes, and the largest key is that of one of the heads at the time asked for. A leaf of
several users is entered under any of them, whose key is no smaller than the leaf's, and is
put under the right one when it reaches a head.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush

from sam.core.order import EvictionOrder, Leaf, User, Victim
from sam.core.retention import (
    DEFAULT_PLAIN_GAP_S,
    NextUse,
    NextUseRank,
    Standing,
    next_use,
    plain_next_use,
)
from sam.core.shelf import Entry, Shelf

_MIN_TIMERS_BEFORE_COMPACTION = 64
_NOTHING = (float("-inf"), (float("inf"), 0.0, 0, 0.0, 0))


def _farther(a: tuple[float, Entry], b: tuple[float, Entry]) -> tuple[float, Entry]:
    """The one of two (use in seconds, entry) that goes first."""
    if a[0] != b[0]:
        return a if a[0] > b[0] else b
    return a if a[1][1:] < b[1][1:] else b


class _IdleBand:
    """Leaves of idle sessions: without a hint, with one, and overdue."""

    __slots__ = ("late", "pending", "shelves", "unhinted")

    def __init__(self) -> None:
        self.unhinted = Shelf()  # key: idle since - g
        self.pending = Shelf()  # key: minus expected return
        self.late = Shelf()  # key: idle since
        self.shelves = (self.unhinted, self.pending, self.late)

    def place(self, standing: Standing, now_s: float) -> tuple[Shelf, float]:
        if standing.hint_s is None:
            return self.unhinted, standing.since_s - standing.gap_s
        if now_s >= standing.late_at_s:
            return self.late, standing.since_s
        return self.pending, -(standing.since_s + standing.hint_s)

    def farthest(self, now_s: float) -> tuple[float, Entry]:
        """(use in seconds, entry) of the leaf to go first, -inf if there is none."""
        best = _NOTHING
        if (head := self.unhinted.head()) is not None:
            best = (now_s - head[0], head)
        if (head := self.pending.head()) is not None:
            best = _farther(best, (-head[0] - now_s + 1.0, head))
        if (head := self.late.head()) is not None:
            best = _farther(best, ((now_s - head[0]) / 2.0 + 1.0, head))
        return best


class NextUseOrder(EvictionOrder):
    """EvictionOrder by next use.

    `trust_ends` (see `sam.core.guard.EndTrust`) and `use_lru` (see `RegretGuard`) may be
    set at any time, in O(1): the shelves for both answers are kept. While `use_lru` is
    set, users do not count at all. `plain_gap_s` is g of unowned leaves.
    """

    def __init__(self, plain_gap_s: float = DEFAULT_PLAIN_GAP_S) -> None:
        super().__init__()
        self.plain_gap_s = plain_gap_s
        self.trust_ends = True
        self.use_lru = False
        self._ended, self._superseded = Shelf(), Shelf()
        self._offloaded, self._idle = _IdleBand(), _IdleBand()
        self._queued, self._running = Shelf(), Shelf()
        self._plain = Shelf()  # unowned leaves by last access
        self._owned = Shelf()  # all others by last access, for use_lru
        self._timers: list[tuple[float, int, User, Standing]] = []
        self._n_timers_made = 0

    # -- filing -------------------------------------------------------------------

    def _place(self, leaf: Leaf, user: User | None) -> tuple[Shelf, float]:
        """Shelf and key of a leaf, were `user` its only one."""
        if user is None:
            return self._plain, leaf.access_s
        standing = user.standing
        rank = standing.rank
        if rank is NextUseRank.IDLE:
            return self._idle.place(standing, self.now_s)
        if rank is NextUseRank.OFFLOADED:
            band = self._offloaded if leaf.backed else self._idle
            return band.place(standing, self.now_s)
        if rank is NextUseRank.ENDED:
            return self._ended, standing.since_s
        if rank is NextUseRank.SUPERSEDED:
            return self._superseded, 0.0
        return (self._queued if rank is NextUseRank.QUEUED else self._running), 0.0

    def _file(self, leaf: Leaf) -> None:
        if leaf.filed is None and leaf.users:
            leaf.filed = leaf.users[-1]
        user = leaf.filed
        shelf, key = self._place(leaf, user)
        if leaf.shelf is not shelf:
            self._unshelve(leaf)
            leaf.shelf = shelf
        shelf.put(leaf.entry(key))
        if user is None:
            self._owned.discard(leaf.node_id)
            return
        if shelf is self._ended:
            self._file_as_idle(leaf, user.standing)
        self._file_by_access(leaf)

    def _file_by_access(self, leaf: Leaf) -> None:
        """Enter an owned leaf for `use_lru`, unless it is there, early enough."""
        entry = self._owned.get(leaf.node_id)
        if entry is None or entry[3] != -leaf.depth or entry[1:3] > (leaf.access_s, leaf.tick):
            self._owned.put(leaf.entry(leaf.access_s))

    def _file_as_idle(self, leaf: Leaf, standing: Standing) -> None:
        """An ended session's leaf waits with the idle too, for when ends are not trusted."""
        shelf, key = self._idle.place(standing, self.now_s)
        for other in self._idle.shelves:
            if other is not shelf:
                other.discard(leaf.node_id)
        shelf.put(leaf.entry(key))

    def _unfile(self, leaf: Leaf) -> None:
        self._unshelve(leaf)
        self._owned.discard(leaf.node_id)

    def _unshelve(self, leaf: Leaf) -> None:
        if leaf.shelf is None:
            return
        leaf.shelf.discard(leaf.node_id)
        if leaf.shelf is self._ended:
            for shelf in self._idle.shelves:
                shelf.discard(leaf.node_id)
        leaf.shelf = None

    def _user_changed(self, user: User) -> None:
        super()._user_changed(user)
        standing = user.standing
        if standing.hint_s is None or self.now_s >= standing.late_at_s:
            return
        self._n_timers_made += 1
        timer = (standing.late_at_s, self._n_timers_made, user, standing)
        heappush(self._timers, timer)
        if len(self._timers) > 2 * len(self._users) + _MIN_TIMERS_BEFORE_COMPACTION:
            self._timers = [t for t in self._timers if t[2].standing is t[3]]
            heapify(self._timers)

    def _advance(self, now_s: float) -> None:
        """Move time on; leaves of sessions that became late change shelves."""
        self.now_s = max(self.now_s, now_s)
        while self._timers and self._timers[0][0] <= self.now_s:
            _, _, user, standing = heappop(self._timers)
            if user.standing is standing:
                EvictionOrder._user_changed(self, user)

    def take(self, node_id: int) -> None:
        super().take(node_id)
        if self.use_lru:
            self._drained = None

    # -- picking ------------------------------------------------------------------

    def _pick(self, now_s: float, even_running: bool) -> Leaf | None:
        self._advance(now_s)
        while (entry := self._front(even_running)) is not None:
            leaf = self._leaves[entry[4]]
            if self._settle(leaf, entry):
                return leaf if self.use_lru else self._drained_first(leaf)
        return None

    def _front(self, even_running: bool) -> Entry | None:
        """The entry whose turn it is, right or too early."""
        if self.use_lru:
            return self._least_recent()
        if self.trust_ends and (head := self._ended.head()) is not None:
            return head
        if (head := self._superseded.head()) is not None:
            return head
        best = self._offloaded.farthest(self.now_s)
        if best is _NOTHING:
            best = self._idle.farthest(self.now_s)
            if (head := self._plain.head()) is not None:
                best = _farther(best, (self.now_s - head[0] + self.plain_gap_s, head))
        if best is not _NOTHING:
            return best[1]
        if (head := self._queued.head()) is not None:
            return head
        return self._running.head() if even_running else None

    def _least_recent(self) -> Entry | None:
        plain, owned = self._plain.head(), self._owned.head()
        if plain is None or owned is None:
            return plain or owned
        return plain if plain[1:] < owned[1:] else owned

    def _settle(self, leaf: Leaf, entry: Entry) -> bool:
        """Whether the entry is right; if not, the leaf is filed anew."""
        right = leaf.is_fresh(entry)
        if self.use_lru:
            if not right:
                target = self._plain if leaf.filed is None else self._owned
                target.put(leaf.entry(leaf.access_s))
            return right
        if len(leaf.users) > 1:
            soonest = self._soonest(leaf)
            if soonest is not leaf.filed:
                leaf.filed, right = soonest, False
        if not right:
            self._file(leaf)
        return right

    def _soonest(self, leaf: Leaf) -> User:
        """The user with the smallest key, the first registered among equals."""
        best, best_key = None, None
        for user in leaf.users:
            key = (self._key(user, leaf.backed), user.serial)
            if best_key is None or key < best_key:
                best, best_key = user, key
        assert best is not None
        return best

    def _drained_first(self, leaf: Leaf) -> Leaf:
        """`leaf`, or an equal of the session that the last victim came from."""
        drained = self._drained
        if drained is None or drained is leaf.filed or not drained.leaves:
            return leaf
        equals = [
            other
            for other in drained.leaves.values()
            if other.access_s == leaf.access_s
            and other.tick == leaf.tick
            and self._key(drained, other.backed) == self._victim(leaf).key
            and self._soonest(other) is drained
        ]
        if not equals:
            return leaf
        best = min(equals, key=lambda other: (-other.depth, other.node_id))
        if best.filed is not drained:
            best.filed = drained
            self._file(best)
        return best

    def _key(self, user: User, backed: bool) -> NextUse:
        return next_use(user.standing, self.now_s, backed=backed, trust_ends=self.trust_ends)

    def key_of_user(self, user: Hashable, now_s: float) -> NextUse:
        return next_use(
            self._users[user].standing, max(now_s, self.now_s), trust_ends=self.trust_ends
        )

    def _victim(self, leaf: Leaf) -> Victim:
        if leaf.filed is None:
            key = plain_next_use(leaf.access_s, self.now_s, self.plain_gap_s)
        else:
            key = self._key(leaf.filed, leaf.backed)
        return Victim(leaf.node_id, leaf.pages, key)
