"""The regret guard on a live server: what both orders would have missed, request by request.

Owns the two ghost caches and the path by which a request is known to them. Must never touch
real memory, nor cost anything while there are no sessions: then both orders are one.
"""

from __future__ import annotations

from array import array
from typing import Any

from sam.core.ghost import GhostPair
from sam.core.sessions import SessionRef

_FIRST_CUT_TOKENS = 64
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
        self, ids: array[int], n_tokens: int, ref: SessionRef | None, now_s: float
    ) -> None:
        """A request left its first `n_tokens` tokens in the tree."""
        user = None if ref is None else ref.key
        path = self._path(ids, n_tokens)
        self._orders.use_lru = self.pair.access(path, now_s, user)

    def _path(self, ids: array[int], n_tokens: int) -> list[tuple[bytes, int]]:
        """(name, pages) of stretches that double in length, root first. Names are tokens, not
        nodes: what was evicted has its former name when it comes back. A stretch is known by
        its ends, the last one, which still grows, by its start."""
        path, start, stop = [], 0, max(_FIRST_CUT_TOKENS, self._page_size)
        while start < n_tokens:
            name = ids[start : start + _NAME_TOKENS]
            if stop <= n_tokens:
                name += ids[stop - _NAME_TOKENS : stop]
            pages = (min(stop, n_tokens) - start) // self._page_size
            path.append((name.tobytes(), pages))
            start, stop = stop, 2 * stop
        return path
