"""Metadata-only caches that answer "what would we have missed": the regret guard's eyes.

Owns simulated residency, in pages, of request paths under one eviction order each. Must
never touch real memory or outgrow its capacity: every segment holds at least one page.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from sam.core.guard import RegretGuard
from sam.core.order import EvictionOrder
from sam.core.retention import Standing


class _Segment:
    """A resident stretch of pages below `parent`."""

    __slots__ = (
        "access_s",
        "children",
        "depth",
        "name",
        "node_id",
        "pages",
        "parent",
        "tick",
        "users",
    )

    def __init__(self, node_id: int, name: Hashable, parent: _Segment | None) -> None:
        self.node_id = node_id
        self.name = name
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[Hashable, _Segment] = {}
        self.users: dict[Hashable, None] = {}
        self.pages = 0
        self.access_s = 0.0
        self.tick = 0


class GhostCache:
    """One simulated cache. An access is a path of (segment name, pages), root first.

    A name stands for the same tokens whenever it comes below the same names: a shared
    prefix, then a session's own context, say. A segment that grew misses its new pages; one
    that shrank gives pages back. A user of the order may be named; its former path then
    loses it, as a session has one current branch. O(path + victims * log n) per access.
    """

    def __init__(self, capacity_pages: int, order: EvictionOrder) -> None:
        self.capacity_pages = capacity_pages
        self.order = order
        self.used_pages = 0
        self._root = _Segment(0, None, None)
        self._segments: dict[int, _Segment] = {}
        self._path_of: dict[Hashable, list[_Segment]] = {}
        self._n_made = 0
        self._tick = 0

    def access(
        self,
        path: Sequence[tuple[Hashable, int]],
        now_s: float,
        user: Hashable | None = None,
    ) -> int:
        """One request; returns the pages it would have had to compute."""
        self._tick += 1
        segments, missed = self._grow(path, now_s)
        if user is not None:
            self._follow(user, segments)
        self._make_room(segments, now_s)
        self._trim(segments)
        if segments and not segments[-1].children:
            self._offer(segments[-1])
        return missed

    def forget(self, user: Hashable) -> None:
        """Drop a user; what it used stays until its turn comes."""
        for segment in self._path_of.pop(user, ()):
            del segment.users[user]
        self.order.drop_user(user)

    def _grow(
        self, path: Iterable[tuple[Hashable, int]], now_s: float
    ) -> tuple[list[_Segment], int]:
        """Make the path resident and take its end out of the order; count missed pages."""
        segments, missed, whole = [], 0, True
        above = self._root
        for name, pages in path:
            if pages <= 0:
                continue
            segment = above.children.get(name)
            if segment is None:
                segment = self._create(name, above)
            hit = min(segment.pages, pages) if whole else 0
            whole = hit == pages
            missed += pages - hit
            self.used_pages += pages - segment.pages
            segment.pages, segment.access_s, segment.tick = pages, now_s, self._tick
            segments.append(segment)
            above = segment
        if segments:
            self.order.discard(segments[-1].node_id)
        return segments, missed

    def _create(self, name: Hashable, above: _Segment) -> _Segment:
        self._n_made += 1
        segment = _Segment(self._n_made, name, above)
        above.children[name] = segment
        self._segments[segment.node_id] = segment
        self.order.discard(above.node_id)
        return segment

    def _follow(self, user: Hashable, segments: list[_Segment]) -> None:
        """Move a user from its former path to this one."""
        kept = {segment.node_id for segment in segments}
        for segment in self._path_of.get(user, ()):
            if segment.node_id not in kept:
                segment.users.pop(user, None)
                if segment.node_id in self.order and self.order.has_user(user):
                    self.order.remove_user(segment.node_id, user)
        for segment in segments:
            segment.users[user] = None
        if segments:
            self._path_of[user] = list(segments)
        else:
            self._path_of.pop(user, None)

    def _make_room(self, locked: list[_Segment], now_s: float) -> None:
        """Evict by the order until all fits; what the request uses is locked."""
        in_use = {segment.node_id for segment in locked}
        while self.used_pages > self.capacity_pages:
            victim = self.order.peek(now_s, even_running=True)
            if victim is None:
                return
            pages = min(victim.pages, self.used_pages - self.capacity_pages)
            segment = self._segments[victim.node_id]
            self._shrink(segment, pages)
            if segment.pages:
                self.order.update(victim.node_id, pages=segment.pages)
                return
            self.order.take(victim.node_id)
            above = self._drop(segment)
            if above is not self._root and not above.children and above.node_id not in in_use:
                self._offer(above)

    def _trim(self, segments: list[_Segment]) -> None:
        """Cut the tail of a request that is larger than the cache."""
        while segments and self.used_pages > self.capacity_pages:
            last = segments[-1]
            self._shrink(last, min(last.pages, self.used_pages - self.capacity_pages))
            if last.pages:
                return
            self._drop(segments.pop())

    def _shrink(self, segment: _Segment, pages: int) -> None:
        segment.pages -= pages
        self.used_pages -= pages

    def _drop(self, segment: _Segment) -> _Segment:
        """Forget an empty segment; returns what it hung below."""
        for user in segment.users:
            path = self._path_of.get(user)
            if path and segment in path:
                path.remove(segment)
                if not path:
                    del self._path_of[user]
        del self._segments[segment.node_id]
        above = segment.parent
        assert above is not None
        del above.children[segment.name]
        return above

    def _offer(self, segment: _Segment) -> None:
        """Put a leaf in the order, with the users that the order knows."""
        has_user = self.order.has_user
        self.order.add(
            segment.node_id,
            [user for user in segment.users if has_user(user)],
            segment.access_s,
            segment.depth,
            segment.pages,
            tick=segment.tick,
        )


class GhostPair:
    """The order in question and LRU, side by side on the same requests, and the guard.

    Takes what a `RetentionTracker` tells, like an order does.
    """

    def __init__(self, capacity_pages: int, ours: EvictionOrder | None = None) -> None:
        self._order = EvictionOrder() if ours is None else ours
        self.ours = GhostCache(capacity_pages, self._order)
        self.lru = GhostCache(capacity_pages, EvictionOrder("lru"))
        self.guard = RegretGuard(capacity_pages)
        self._told: dict[Hashable, Standing] = {}

    def access(
        self,
        path: Sequence[tuple[Hashable, int]],
        now_s: float,
        user: Hashable | None = None,
    ) -> bool:
        """One request on both; returns whether LRU is to be used from now on."""
        for name, standing in self._told.items():
            self._order.set_user(name, standing)
        self._told.clear()
        missed_ours = self.ours.access(path, now_s, user)
        missed_lru = self.lru.access(path, now_s)
        return self.guard.observe(missed_ours, missed_lru)

    def set_user(self, user: Hashable, standing: Standing) -> None:
        """It counts from the next access on: nothing is asked before."""
        self._told[user] = standing

    def drop_user(self, user: Hashable) -> None:
        self._told.pop(user, None)
        self.ours.forget(user)

    @property
    def trust_ends(self) -> bool:
        return self._order.trust_ends

    @trust_ends.setter
    def trust_ends(self, trust: bool) -> None:
        self._order.trust_ends = trust
