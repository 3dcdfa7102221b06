"""Which nodes' pages lie in the pool that is attached, as far as this server knows.

Owns what is on its way there and what has arrived. Must never differ between ranks: offloads
and the host's order of eviction follow it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

MAX_NODES = 1 << 16


class StoredNodes:
    """`cache`: the SessionRadixCache. All on the scheduler thread."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._nodes: OrderedDict[int, None] = OrderedDict()
        self._pool: Any = None
        self._writing: OrderedDict[int, int] = OrderedDict()
        self._refused: OrderedDict[int, None] = OrderedDict()
        self._n_losses = 0

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._nodes and self._backend() is self._pool

    def writes(self, operation_id: int, node_id: int) -> None:
        """The node's pages are on their way to the pool that is attached now; it counts as
        stored there unless that is refused."""
        self._writing[operation_id] = node_id
        backend = self._backend()
        if backend is not self._pool:
            self._pool = backend
            self._nodes.clear()
        self._refused.pop(node_id, None)
        _put(self._nodes, node_id)

    def was_refused(self, node_id: int) -> bool:
        """Whether its last write that ended was, or was one to a pool that is gone."""
        return node_id in self._refused or self._backend() is not self._pool

    def clear(self) -> None:
        self._nodes.clear()

    def agree_on_losses(self, n_losses: int) -> None:
        """If any rank's pool was seen to lose pages since the last call, nothing is known of
        it any more; all ranks have to call in the same step, each with its own count."""
        if self._cache.lowest_of_ranks(self._n_losses - n_losses) < 0:
            self.clear()
        self._n_losses = n_losses

    def see_writes(self, refused: set[int]) -> None:
        """Writes that ended in this step, which are the same on all ranks; a node that one
        rank's pool refused is stored on none. `refused`: operations, taken out here."""
        ended = []
        while self._writing:
            operation_id = next(iter(self._writing))
            if operation_id in self._cache.ongoing_backup:
                break
            ended.append((operation_id, self._writing.pop(operation_id)))
        if not ended:
            return
        taken = torch.tensor([i not in refused for i, _ in ended], dtype=torch.int64)
        self._cache._all_reduce(taken, torch.distributed.ReduceOp.MIN)
        refused.difference_update([i for i, _ in ended])
        for (_, node_id), by_all in zip(ended, taken.tolist(), strict=True):
            if by_all:
                _put(self._nodes, node_id)  # a loss seen meanwhile was of others
            else:
                self._nodes.pop(node_id, None)
                _put(self._refused, node_id)

    def _backend(self) -> Any:
        return self._cache.cache_controller.storage_backend


def _put(nodes: OrderedDict[int, None], node_id: int) -> None:
    nodes[node_id] = None
    if len(nodes) > MAX_NODES:
        nodes.popitem(last=False)
