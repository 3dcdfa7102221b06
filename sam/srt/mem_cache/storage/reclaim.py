"""Evict reaches the pool: what only ended sessions had there goes as well.

Owns the second half of an evict, after the tree has let go. Must never start while a copy of
the session's pages to the pool may still be under way: those nodes are in use until it ends.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sam.core.actions import ActionStatus, TierTokens
from sam.core.sessions import SessionKey
from sam.srt.mem_cache.storage.worker import Job
from sam.srt.mem_cache.tier_tasks import EvictTask, Outcome, SpanEvictTask, not_done


class Removed:
    """What a reclaim took out of the pool, of how many sessions that were known there.
    `supported`: the backend can remove at all."""

    __slots__ = ("n_pages", "n_sessions", "supported")

    def __init__(self) -> None:
        self.n_pages = self.n_sessions = 0
        self.supported = True


class _ThenPool:
    """Mixed in before a task on the tree: `_reclaim` starts when that is done."""

    _owed = False
    _tree_outcome: Outcome | None = None
    _job: Job | None = None

    def poll(self) -> Outcome | None:
        if self._tree_outcome is None:
            self._tree_outcome = super().poll()
            if self._tree_outcome is None:
                return None
            self._job = self._reclaim()
        if self._job is None:
            reason = self._tree_outcome.reason or ("pool_busy" if self._owed else "")
            return msgspec.structs.replace(self._tree_outcome, reason=reason)
        return self._with_pool() if self._job.ready else None

    def cancel(self, key: SessionKey) -> None:
        """What is asked of the pool already goes on: for the session it is a miss."""
        if self._tree_outcome is None:
            super().cancel(key)

    def _with_pool(self) -> Outcome:
        outcome, removed = self._tree_outcome, self._job.result
        if removed is None:
            return msgspec.structs.replace(outcome, reason=outcome.reason or "pool_failed")
        n_tokens = removed.n_pages * self._cache.page_size
        tokens = msgspec.structs.replace(outcome.tokens, pool=n_tokens)
        reason = outcome.reason or ("" if removed.supported else "pool_keeps")
        return msgspec.structs.replace(outcome, tokens=tokens, reason=reason)

    def _reclaim(self) -> Job | None:
        raise NotImplementedError


class PoolEvictTask(_ThenPool, EvictTask):
    """Frees ended sessions on all tiers."""

    def _reclaim(self) -> Job | None:
        keys = list(dict.fromkeys(ref.key for ref in self._refs))
        job = self._cache.pool.reclaim(keys)
        self._owed = job is None and bool(keys) and self._cache.pool.attached
        return job


class PoolOnlyEvictTask:
    """Frees what the pool has of a session that this server does not know."""

    def __init__(self, cache: Any, key: SessionKey) -> None:
        self._page_size = cache.page_size
        self.keys = {key}
        self._job = cache.pool.reclaim([key], owe=False)

    def cancel(self, key: SessionKey) -> None:
        """What is asked of the pool goes on: for the session it is a miss."""

    def poll(self) -> Outcome | None:
        if self._job is None:
            return not_done(ActionStatus.DROPPED, "pool_busy")
        if not self._job.ready:
            return None
        removed = self._job.result
        if removed is None or not removed.n_sessions:
            return not_done(ActionStatus.MISSING, "not_in_pool")
        tokens = TierTokens(pool=removed.n_pages * self._page_size)
        reason = "" if removed.supported else "pool_keeps"
        return Outcome(status=ActionStatus.DONE, tokens=tokens, reason=reason)


class PoolSpanEvictTask(_ThenPool, SpanEvictTask):
    """Frees a span on all tiers, where it is still the end of the session's branch."""

    def _reclaim(self) -> Job | None:
        (key,) = {ref.key for ref in self._refs} or {None}
        if key is None or self._tree_outcome.status is ActionStatus.DROPPED:
            return None
        return self._cache.pool.reclaim_tail(key, self._span.start)
