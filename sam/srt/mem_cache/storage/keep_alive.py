"""Pages of live sessions outlive a flood of others: they are renewed before they age.

Owns who is renewed and how often, by the worker thread's own clock, and what a renewal finds
gone: nothing is decided by it but what a pool keeps. Must never renew more than its budget, so
that other writers find room, nor a session that is over.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from sam.core.sessions import SessionKey
from sam.srt import upstream

logger = logging.getLogger(__name__)

RENEW_BATCH = 512
LOG_PERIOD_S = 60.0


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
        self.n_losses = 0
        self._found: set[bytes] = set()
        self._found_in: Any = None
        self._log_due_s = 0.0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def n_found(self) -> int:
        """Pages that the last round found in the pool."""
        return len(self._found)

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
        found, n_lost = set(), 0
        before = self._found if backend is self._found_in else set()
        for key in reversed(list(self._live)):
            new = [page for page in pages_of(key) if page not in seen]
            self.n_over_budget += len(new) > left
            new = new[:left]
            seen.update(new)
            left -= len(new)
            for i in reversed(range(0, len(new), RENEW_BATCH)):
                batch = new[i : i + RENEW_BATCH]
                n_there = renew_pages(backend, [page.hex() for page in batch])
                found.update(batch[:n_there])
                n_lost += any(page in before for page in batch[n_there : n_there + 1])
            if not left:
                break
        self._found, self._found_in = found, backend
        self.n_renewed_pages += len(seen)
        self.n_rounds += 1
        self._see_losses(n_lost)

    def forget_found(self, pages: Iterable[bytes] | None = None) -> None:
        """These, or all, were taken out of the pool on purpose. On the worker thread."""
        self._found = set() if pages is None else self._found.difference(pages)

    def _see_losses(self, n_lost: int) -> None:
        self.n_losses += n_lost
        if n_lost and time.monotonic() >= self._log_due_s:
            self._log_due_s = time.monotonic() + LOG_PERIOD_S
            logger.warning(
                "sam: the pool has lost pages of live sessions; what the host holds of a session "
                "is written again when it is offloaded"
            )


def renew_pages(backend: Any, keys: list[str]) -> int:
    """What the backend takes as a use of these pages: an existence check grants a lease,
    but is nothing to a size bound of files. How many of them are there, from the first on."""
    real = upstream.real_storage(backend)
    if isinstance(real, HiCacheFile):
        upstream.touch_files(real, keys)
    return backend.batch_exists(keys)
