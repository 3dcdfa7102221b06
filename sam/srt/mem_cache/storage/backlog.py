"""Pool work that found too much waiting and is still to be done.

Owns the names of it, bounded. Must never hold what a session's next life has made void, nor
start more than the worker has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from sam.core.sessions import SessionKey, SessionTable
from sam.srt.mem_cache.storage.worker import PoolWorker

if TYPE_CHECKING:
    from sam.config import SamConfig

BATCH = 512


class Backlog:
    """`owed`: sessions that are over and whose pages are still there. `late`: sessions whose
    newest branch the worker does not know yet."""

    def __init__(self, worker: PoolWorker, config: SamConfig, table: SessionTable) -> None:
        self._worker = worker
        self._table = table
        self._half = config.pool_max_jobs // 2
        self._max_sessions = config.max_sessions
        self.owed: dict[SessionKey, None] = {}
        self.late: dict[SessionKey, None] = {}

    def owe(self, keys: list[SessionKey]) -> None:
        if len(self.owed) < self._max_sessions:
            self.owed.update(dict.fromkeys(keys))

    def note_later(self, key: SessionKey) -> None:
        if len(self.late) < self._max_sessions:
            self.late[key] = None

    def lives(self, key: SessionKey) -> None:
        """A new life of the session begins: it takes over what the former one left."""
        self.owed.pop(key, None)

    def ended(self, key: SessionKey) -> None:
        self.late.pop(key, None)

    def work(
        self, remove: Callable[[list[SessionKey]], object], note: Callable[[SessionKey], None]
    ) -> None:
        """Notes as far as there is room; reclaims, but of no session that is live again, once
        half of what waited is done, which is in the same step on all ranks."""
        while self.late and self._worker.takes_names:
            key = next(iter(self.late))
            del self.late[key]
            note(key)
        if self.owed and self._worker.n_tracked <= self._half:
            batch = list(islice(self.owed, BATCH))
            keys = [key for key in batch if not self._is_live(key)]
            if not keys or self._worker.submit(lambda: remove(keys)) is not None:
                for key in batch:
                    del self.owed[key]

    def _is_live(self, key: SessionKey) -> bool:
        session = self._table.get(key)
        return session is not None and session.live
