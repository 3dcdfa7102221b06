"""Pool work that found too much waiting and is still to be done.

Owns the names of it, bounded. Must never hold what a session's next life has made void, nor
start more than the worker has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from sam.core.sessions import SessionKey
from sam.srt.mem_cache.storage.worker import PoolWorker

BATCH = 512


class Backlog:
    """`owed`: sessions that are over and whose pages are still there. `late`: sessions whose
    newest branch the worker does not know yet."""

    def __init__(self, worker: PoolWorker, max_jobs: int, max_sessions: int) -> None:
        self._worker = worker
        self._half = max_jobs // 2
        self._max_sessions = max_sessions
        self.owed: dict[SessionKey, None] = {}
        self.late: dict[SessionKey, None] = {}

    def owe(self, keys: list[SessionKey]) -> None:
        if len(self.owed) < self._max_sessions:
            self.owed.update(dict.fromkeys(keys))

    def note_later(self, key: SessionKey) -> None:
        if len(self.late) < self._max_sessions:
            self.late[key] = None

    def lives(self, key: SessionKey) -> None:
        self.owed.pop(key, None)

    def ended(self, key: SessionKey) -> None:
        self.late.pop(key, None)

    def work(
        self, remove: Callable[[list[SessionKey]], object], note: Callable[[SessionKey], None]
    ) -> None:
        """Notes as far as there is room; reclaims once half of what waited is done, which is
        in the same step on all ranks."""
        while self.late and self._worker.takes_names:
            key = next(iter(self.late))
            del self.late[key]
            note(key)
        if self.owed and self._worker.n_tracked <= self._half:
            keys = list(islice(self.owed, BATCH))
            if self._worker.submit(lambda: remove(keys)) is not None:
                for key in keys:
                    del self.owed[key]
