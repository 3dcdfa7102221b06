"""Offload reaches the pool: what the host has of a session is written there as well.

Owns the second half of an offload. Must never hold back the first one, nor have more tokens
on their way to the pool than one offload may.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sam.core.actions import ActionStatus
from sam.core.sessions import SessionKey
from sam.srt.mem_cache.tier_tasks import OffloadTask, Outcome


class PoolOffloadTask(OffloadTask):
    """Done when the session's host copies have been written, or need not be.

    SGLang writes a host copy to the pool when it lands; copies from before the pool was
    attached are written here. `tokens.pool` counts what was on its way for this action.
    """

    _tree_outcome: Outcome | None = None
    _todo: list[Any] | None = None

    def __init__(self, cache: Any, *args: Any, **kwargs: Any) -> None:
        self._asked: dict[int, int] = {}
        self._n_written = 0
        self._refused = False
        self._resumed = False
        super().__init__(cache, *args, **kwargs)

    def cancel(self, key: SessionKey) -> None:
        super().cancel(key)
        self._resumed = True

    def poll(self) -> Outcome | None:
        if self._tree_outcome is None:
            self._tree_outcome = super().poll()
            if self._tree_outcome is None:
                return None
            if not self._cache.pool.attached:
                return self._tree_outcome
            self._cache.pool.agree_on_losses()
            nodes = self._cache.tree_core.tags.branch_nodes(self.ref)
            self._todo = nodes
        self._write()
        if not self._resumed and (self._asked or self._todo):
            return None
        tokens = msgspec.structs.replace(self._tree_outcome.tokens, pool=self._n_written)
        outcome = msgspec.structs.replace(self._tree_outcome, tokens=tokens)
        if self._refused and outcome.status is ActionStatus.DONE:
            fields = {"status": ActionStatus.CLIPPED, "reason": "pool_refused"}
            outcome = msgspec.structs.replace(outcome, **fields)
        if self._resumed and (self._asked or self._todo):
            if outcome.status is ActionStatus.DONE:
                status = ActionStatus.CLIPPED
                outcome = msgspec.structs.replace(outcome, status=status, reason="resumed")
        return outcome

    def _write(self) -> None:
        """Note what has been written; ask for more, root to leaf, as far as may be under way."""
        cache = self._cache
        writing = {node_id for node_id, _ in cache.ongoing_backup.values()}
        for node_id in [node_id for node_id in self._asked if node_id not in writing]:
            n_tokens = self._asked.pop(node_id)
            if cache.pool.stored.was_refused(node_id):
                self._refused = True
                self._n_written -= n_tokens
        if self._resumed:
            return
        limit = cache.config.max_offload_in_flight_tokens
        while self._todo and sum(self._asked.values()) < limit:
            node = self._todo.pop()
            if cache.tree_core.find_node(node.id) is not node or not node.backuped:
                continue
            if node.id not in writing:
                if cache.pool.is_stored(node.id):
                    continue
                cache.write_backup_storage(node.id)
            self._asked[node.id] = cache.tree_core.tokens_of(node)[1]
            self._n_written += self._asked[node.id]
