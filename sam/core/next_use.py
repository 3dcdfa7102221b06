"""The recommended order: the leaf whose next use is farthest away goes first.

Owns the shelves on which leaves wait by next-use key (source: the project's policy notes;
the key itself is `sam.core.retention.next_use`). Must never recompute all keys: nothing
here walks all leaves, whatever the time does.

`age + g` orders by `idle since - g`, which does not change with time. Hinted sessions
order by expected return until they are late, then by age; the moment when one becomes
late is a timer. Unowned leaves order by last access. So within each shelf the order never
changes, and the largest key is that of one of the heads at the time asked for. A leaf of
several users is entered under any of them, whose key is no smaller than the leaf's, and is
put under the right one when it reaches a head. Nor does a leaf move when its session is
queued, runs or rests again: that only postpones it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from heapq import heapify, heappop, heappush
from typing import Any

import msgspec

from sam.core.leaf_order import LeafOrder, LeafView, User
from sam.core.recency import RecencyList
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
_NOTHING: tuple[float, Any] = (float("-inf"), None)


def _farther(a: tuple[float, Any], b: tuple[float, Any]) -> tuple[float, Any]:
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

    def farthest(self, now_s: float) -> tuple[float, Any]:
        """(use in seconds, entry) of the leaf to go first, -inf if there is none."""
        best = _NOTHING
        if self.unhinted.entries and (head := self.unhinted.head()) is not None:
            best = (now_s - head[0], head)
        if self.pending.entries and (head := self.pending.head()) is not None:
            best = _farther(best, (-head[0] - now_s + 1.0, head))
        if self.late.entries and (head := self.late.head()) is not None:
            best = _farther(best, ((now_s - head[0]) / 2.0 + 1.0, head))
        return best


class _Filed(msgspec.Struct, eq=False, gc=False):
    """Where an owned leaf waits: under whose key, on which shelf, with a copy below or not.
    `standing`: the user's, when the leaf was entered."""

    user: User
    shelf: Any
    backed: bool
    standing: Standing


class NextUseLeaves(LeafOrder):
    """LeafOrder by next use.

    `trust_ends` (see `sam.core.guard.EndTrust`) and `use_lru` (see `RegretGuard`) may be
    set at any time, in O(1): the shelves for both answers are kept. While `use_lru` is
    set, users do not count at all. `plain_gap_s` is g of unowned leaves.
    """

    def __init__(self, view: LeafView, plain_gap_s: float = DEFAULT_PLAIN_GAP_S) -> None:
        super().__init__(view)
        self.plain_gap_s = plain_gap_s
        self._nodes, self._is_leaf = view.nodes, view.is_leaf
        self._users_of, self._when_of, self._backed_of = view.users_of, view.when_of, view.backed_of
        self._ended, self._superseded = Shelf(), Shelf()
        self._offloaded, self._idle = _IdleBand(), _IdleBand()
        self._queued, self._running = Shelf(), Shelf()
        self._plain = RecencyList()  # unowned leaves
        self._owned = RecencyList()  # all others, for use_lru
        self._filed: dict[int, _Filed] = {}
        self._drained: User | None = None
        self._timers: list[tuple[float, int, User, Standing]] = []
        self._n_timers_made = 0

    def __len__(self) -> int:
        return len(self._plain) + len(self._filed)

    def holds(self, node: Any) -> bool:
        return node.id in self._plain.at or node.id in self._filed

    # -- filing -------------------------------------------------------------------

    def offer_leaf(self, node: Any) -> None:
        node_id, users, when = node.id, self._users_of(node), self._when_of(node)
        filed = self._filed.get(node_id)
        if not users:
            if filed is not None:
                self._unfile(node_id)
            self._plain.put(node_id, when)
            return
        if filed is None:
            self._plain.discard(node_id)
            self._file(node, self._users[next(reversed(users))])
        elif filed.user.name not in users:
            self._file(node, self._users[next(reversed(users))])
        elif filed.backed != self._backed_of(node) or filed.shelf.entries[node_id][1] > when:
            self._file(node, filed.user)
        self._owned.put(node_id, when)

    def offer_new(self, node_id: int, when: Any) -> None:
        self._plain.put(node_id, when)

    def discard(self, node_id: int) -> None:
        if node_id in self._filed:
            self._unfile(node_id)
        else:
            self._plain.discard(node_id)

    def _place(self, standing: Standing, backed: bool) -> tuple[Shelf, float]:
        """Shelf and key of a leaf with a user of this standing."""
        rank = standing.rank
        if rank is NextUseRank.IDLE:
            return self._idle.place(standing, self.now_s)
        if rank is NextUseRank.OFFLOADED:
            band = self._offloaded if backed else self._idle
            return band.place(standing, self.now_s)
        if rank is NextUseRank.ENDED:
            return self._ended, standing.since_s
        if rank is NextUseRank.SUPERSEDED:
            return self._superseded, 0.0
        if rank is NextUseRank.QUEUED:
            return self._queued, -standing.since_s
        return self._running, 0.0

    def _file(self, node: Any, user: User) -> None:
        """Enter an owned leaf under the user's key, instead of where it is."""
        node_id, when, backed = node.id, self._when_of(node), self._backed_of(node)
        standing = user.standing
        shelf, key = self._place(standing, backed)
        filed = self._filed.get(node_id)
        if filed is None:
            self._filed[node_id] = _Filed(user, shelf, backed, standing)
            user.filed[node_id] = None
        else:
            if filed.shelf is not shelf:
                self._unshelve(filed, node_id)
            if filed.user is not user:
                del filed.user.filed[node_id]
                user.filed[node_id] = None
            filed.user, filed.shelf, filed.backed = user, shelf, backed
            filed.standing = standing
        shelf.put((key, when, node_id))
        if shelf is self._ended:
            self._file_as_idle(node_id, when, standing)

    def _file_as_idle(self, node_id: int, when: Any, standing: Standing) -> None:
        """An ended session's leaf waits with the idle too, for when ends are not trusted."""
        shelf, key = self._idle.place(standing, self.now_s)
        for other in self._idle.shelves:
            if other is not shelf:
                other.discard(node_id)
        shelf.put((key, when, node_id))

    def _unfile(self, node_id: int) -> None:
        filed = self._filed.pop(node_id)
        self._unshelve(filed, node_id)
        del filed.user.filed[node_id]
        self._owned.discard(node_id)

    def _unshelve(self, filed: _Filed, node_id: int) -> None:
        filed.shelf.discard(node_id)
        if filed.shelf is self._ended:
            for shelf in self._idle.shelves:
                shelf.discard(node_id)

    def _refile_all(self, user: User) -> None:
        nodes = self.view.nodes
        for node_id in list(user.filed):
            node = nodes.get(node_id)
            if node is None:
                self._unfile(node_id)
            else:
                self._file(node, user)

    def _user_changed(self, user: User) -> None:
        standing = user.standing
        if user.filed and not self._only_postpones(user, standing):
            self._refile_all(user)
        if standing.hint_s is not None and self.now_s < standing.late_at_s:
            self._set_timer(user, standing)

    def _only_postpones(self, user: User, standing: Standing) -> bool:
        """Whether no leaf of the user goes earlier by its new standing than it is entered."""
        rank = standing.rank
        if rank is NextUseRank.QUEUED:
            return not self._running.entries and not any(
                self._filed[node_id].shelf is self._queued for node_id in user.filed
            )
        if rank is not NextUseRank.IDLE or standing.hint_s is not None:
            return rank is NextUseRank.RUNNING
        unhinted, key = self._idle.unhinted, standing.since_s - standing.gap_s
        for node_id in user.filed:
            if self._filed[node_id].shelf is not unhinted or unhinted.entries[node_id][0] > key:
                return False
        return True

    def _set_timer(self, user: User, standing: Standing) -> None:
        self._n_timers_made += 1
        heappush(self._timers, (standing.late_at_s, self._n_timers_made, user, standing))
        if len(self._timers) > 2 * len(self._users) + _MIN_TIMERS_BEFORE_COMPACTION:
            self._timers = [t for t in self._timers if t[2].standing is t[3]]
            heapify(self._timers)

    def _advance(self, now_s: float) -> None:
        """Move time on; leaves of sessions that became late change shelves."""
        if now_s <= self.now_s:
            return
        self.now_s = now_s
        while self._timers and self._timers[0][0] <= self.now_s:
            _, _, user, standing = heappop(self._timers)
            if user.standing is standing:
                self._refile_all(user)

    # -- picking ------------------------------------------------------------------

    def first(self, now_s: float, *, even_running: bool = True) -> Any | None:
        if now_s > self.now_s:
            self._advance(now_s)
        nodes, is_leaf = self._nodes, self._is_leaf
        while (entry := self._front(even_running)) is not None:
            node = nodes.get(entry[2])
            if node is None or not is_leaf(node):
                self.discard(entry[2])
            elif self._is_settled(node, entry):
                drained, leaves_of = self._drained, self.view.leaves_of
                if drained is None or leaves_of is None or self.use_lru:
                    return node
                return self._drained_first(node, drained, leaves_of)
        return None

    def take(self, node: Any) -> None:
        filed = self._filed.get(node.id)
        if filed is None:
            self._drained = None
            self._plain.discard(node.id)
        else:
            self._drained = None if self.use_lru else filed.user
            self._unfile(node.id)

    def _front(self, even_running: bool) -> Entry | None:
        """The entry whose turn it is, right or too early."""
        if not self._filed:
            head = self._plain.head()
            return None if head is None else (0.0, *head)
        if self.use_lru:
            return self._least_recent()
        if self._ended.entries and self.trust_ends:
            return self._ended.head()
        if self._superseded.entries:
            return self._superseded.head()
        best = self._offloaded.farthest(self.now_s)
        if best is _NOTHING:
            best = self._idle.farthest(self.now_s)
            if self._plain.at and (head := self._plain.head()) is not None:
                use_in_s = self.now_s - self.view.time_of(head[0]) + self.plain_gap_s
                best = _farther(best, (use_in_s, (0.0, *head)))
        if best is not _NOTHING:
            entry: Entry = best[1]
            return entry
        if self._queued.entries:
            return self._queued.head()
        return self._running.head() if even_running else None

    def _least_recent(self) -> Entry | None:
        plain, owned = self._plain.head(), self._owned.head()
        if plain is None or owned is None:
            head = plain or owned
        else:
            head = min(plain, owned)
        return None if head is None else (0.0, *head)

    def _is_settled(self, node: Any, entry: Entry) -> bool:
        """Whether the entry is right; if not, the leaf is filed anew."""
        filed, when, users = self._filed.get(node.id), self._when_of(node), self._users_of(node)
        if filed is None or self.use_lru:
            right = entry[1] == when and bool(users) == (filed is not None)
            if not right:
                self.offer_leaf(node)
            return right
        user = filed.user
        if user.name not in users:
            self.offer_leaf(node)
            return False
        soonest = user if len(users) == 1 else self._soonest(users, filed.backed)
        if (
            soonest is user
            and filed.standing is user.standing
            and entry[1] == when
            and filed.backed == self._backed_of(node)
        ):
            return True
        self._file(node, soonest)
        return False

    def _soonest(self, users: Collection[Hashable], backed: bool) -> User:
        """The user with the smallest key, the first registered among equals."""
        best, best_key = None, None
        for name in users:
            user = self._users[name]
            key = (self._key(user, backed), user.serial)
            if best_key is None or key < best_key:
                best, best_key = user, key
        assert best is not None
        return best

    def _drained_first(
        self, node: Any, drained: User, leaves_of: Callable[[Hashable], Iterable[Any]]
    ) -> Any:
        """`node`, or an equal of `drained`, the user that the last victim came from."""
        view = self.view
        if self._users.get(drained.name) is not drained:
            return node
        filed = self._filed.get(node.id)
        if filed is not None and filed.user is drained:
            return node
        key = self.key_of(node, self.now_s)
        equals = [
            other
            for other in leaves_of(drained.name)
            if view.when_of(other)[:-1] == view.when_of(node)[:-1]
            and self._key(drained, view.backed_of(other)) == key
            and self._soonest(view.users_of(other), view.backed_of(other)) is drained
        ]
        if not equals:
            return node
        best = min(equals, key=lambda other: (view.when_of(other), other.id))
        if self._filed[best.id].user is not drained:
            self._file(best, drained)
        return best

    # -- keys ---------------------------------------------------------------------

    def _key(self, user: User, backed: bool) -> NextUse:
        return next_use(user.standing, self.now_s, backed=backed, trust_ends=self.trust_ends)

    def key_of(self, node: Any, now_s: float) -> NextUse:
        self._advance(now_s)
        view = self.view
        users, backed = view.users_of(node), view.backed_of(node)
        if not users:
            time_s = view.time_of(view.when_of(node))
            return plain_next_use(time_s, self.now_s, self.plain_gap_s)
        return self._key(self._soonest(users, backed), backed)
