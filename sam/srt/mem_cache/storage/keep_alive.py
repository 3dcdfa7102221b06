"""Pages of live sessions outlive a flood of others: they are renewed before they age.

Owns who is renewed and how often, by the worker thread's own clock: nothing is decided by it
but what a pool keeps. Must never renew more than its budget, so that other writers find room,
nor a session that is over.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from sam.core.sessions import SessionKey
from sam.srt import upstream

RENEW_BATCH = 512


class KeepAlive:
    """The most recently used sessions first, `max_bytes` of pages in all, every `period_s`.

    `touch` and `forget` come from the scheduler thread, `renew` from the worker.
    """

    def __init__(self, max_bytes: int, period_s: float, max_sessions: int) -> None:
        self.max_bytes = max_bytes
        self.period_s = period_s
        self._max_sessions = max_sessions
        self._live: OrderedDict[SessionKey, None] = OrderedDict()
        self._due_s = 0.0
        self.n_renewed_pages = 0
        self.n_rounds = 0
        self.n_over_budget = 0

    def __len__(self) -> int:
        return len(self._live)

    def touch(self, key: SessionKey) -> None:
        """The session was used, or is about to be."""
        self._live[key] = None
        self._live.move_to_end(key)
        if len(self._live) > self._max_sessions:
            self._live.popitem(last=False)

    def forget(self, key: SessionKey) -> None:
        self._live.pop(key, None)

    def is_due(self) -> bool:
        return bool(self.period_s and self._live) and time.monotonic() >= self._due_s

    def renew(
        self, backend: Any, pages_of: Callable[[SessionKey], list[bytes]], page_bytes: int
    ) -> None:
        """Renew what the budget allows; a page that several sessions have counts once."""
        self._due_s = time.monotonic() + self.period_s
        if backend is None:
            return
        left, seen = self.max_bytes // max(1, page_bytes), set()
        for key in reversed(list(self._live)):
            new = [page for page in pages_of(key) if page not in seen]
            self.n_over_budget += len(new) > left
            new = new[:left]
            seen.update(new)
            left -= len(new)
            for i in reversed(range(0, len(new), RENEW_BATCH)):
                renew_pages(backend, [page.hex() for page in new[i : i + RENEW_BATCH]])
            if not left:
                break
        self.n_renewed_pages += len(seen)
        self.n_rounds += 1


def renew_pages(backend: Any, keys: list[str]) -> None:
    """What the backend takes as a use of these pages: an existence check grants a lease,
    but is nothing to a size bound of files."""
    real = upstream.real_storage(backend)
    if isinstance(real, HiCacheFile):
        upstream.touch_files(real, keys)
    else:
        backend.batch_exists(keys)
