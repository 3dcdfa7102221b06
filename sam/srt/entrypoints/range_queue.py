"""Work on ranges beside the event loop: one thread, order per session.

Owns when a piece of work runs and what waits behind it; how much may wait is up to the
caller. Must never run work on the event loop, nor let an entry overtake an earlier one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

logger = logging.getLogger(__name__)


class _Entry:
    __slots__ = ("keys", "then", "work")

    def __init__(
        self, keys: tuple[Any, ...], work: Callable[[], Any] | None, then: Callable[[Any], None]
    ) -> None:
        self.keys = keys
        self.work = work
        self.then = then


class RangeQueue:
    """All methods are called on the event loop; `work` runs on the thread, `then(result)` on
    the loop, in order of arrival."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._keys: Counter[Any] = Counter()
        self._pool: ThreadPoolExecutor | None = None
        self._drain: asyncio.Task[None] | None = None

    def is_busy(self, keys: Iterable[Any]) -> bool:
        """Whether something of one of these sessions waits or runs."""
        return any(key in self._keys for key in keys)

    def submit(
        self,
        keys: Iterable[Any],
        work: Callable[[], Any] | None,
        then: Callable[[Any], None],
    ) -> None:
        """Queue work for sessions `keys`; without work, only the order counts. `then` gets
        what work returned, or None if it raised."""
        entry = _Entry(tuple(set(keys)), work, then)
        self._keys.update(entry.keys)
        self._entries.append(entry)
        if self._drain is None or self._drain.done():
            self._drain = asyncio.get_running_loop().create_task(self._run())

    async def join(self) -> None:
        """Wait until nothing waits or runs."""
        while self._drain is not None and not self._drain.done():
            await asyncio.shield(self._drain)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sam-ranges")
        while self._entries:
            entry = self._entries.popleft()
            result = None
            try:
                if entry.work is not None:
                    result = await loop.run_in_executor(self._pool, entry.work)
            except Exception:
                logger.exception("sam: a range could not be looked at")
            self._finish(entry, result)

    def _finish(self, entry: _Entry, result: Any) -> None:
        try:
            entry.then(result)
        except Exception:
            logger.exception("sam: hints could not be sent")
        finally:
            self._keys.subtract(entry.keys)
            for key in entry.keys:
                if self._keys[key] <= 0:
                    del self._keys[key]
