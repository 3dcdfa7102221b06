"""The regret guard on a live server: what both orders would have missed, request by request.

Owns the two ghost caches and the path by which a request is known to them. Must never touch
real memory, nor cost anything while there are no sessions: then both orders are one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from sam.core.ghost import GhostPair
from sam.core.sessions import SessionRef
from sam.srt.mem_cache.ownership import path_up

_MAX_SEGMENTS = 16
_NAME_TOKENS = 16


class RegretWatch:
    """Takes what a `RetentionTracker` tells, through `pair`; switches `orders.use_lru`."""

    def __init__(self, capacity_pages: int, page_size: int, orders: Any) -> None:
        self.pair = GhostPair(capacity_pages)
        self._page_size = page_size
        self._orders = orders

    def add_host_tier(self, host_pages: int, *, inclusive: bool) -> None:
        """`inclusive`: the host holds copies of what is on device, too."""
        pair = self.pair
        device_pages = pair.guard.capacity_pages
        pages = max(device_pages, host_pages) if inclusive else device_pages + host_pages
        pair.ours.capacity_pages = pair.lru.capacity_pages = pages
        pair.guard.capacity_pages = pages

    @property
    def n_switches(self) -> int:
        return self.pair.guard.n_switches

    def request_over(
        self, tags: Any, node: Any, ref: SessionRef | None, ids: Sequence[int], now_s: float
    ) -> None:
        """A request with these tokens left the branch that ends at `node`. O(its depth)."""
        user = None if ref is None else ref.key
        path = self._path(tags, node, user, ids)
        self._orders.use_lru = self.pair.access(path, now_s, user)

    def _path(
        self, tags: Any, node: Any, user: Hashable, ids: Sequence[int]
    ) -> list[tuple[Hashable, int]]:
        """(name, pages), root first: shared nodes one by one, by their first tokens, so that
        what comes back after an eviction has its former name; the session's own as one."""
        steps = list(path_up(node))
        end = sum(len(step.key) for step in steps)
        own, segments = 0, []
        for step in steps:
            pages = len(step.key) // self._page_size
            end -= len(step.key)
            users = tags.users_of(step)
            if not segments and user is not None and len(users) == 1 and user in users:
                own += pages
                continue
            name = tuple(ids[end : end + _NAME_TOKENS])
            if len(segments) < _MAX_SEGMENTS:
                segments.append((name, pages))
            else:
                segments[-1] = (name, segments[-1][1] + pages)
        segments.reverse()
        return [*segments, (user, own)] if own else segments
