"""Device tokens that requests which run have still to take, and what moves hold of them.

Owns these sums and nothing else: an admitted prompt that is cut into chunks gets its room chunk by
chunk, and SGLang ends the scheduler if a later chunk finds none. What a tier move locks while it
copies is neither free nor evictable, so a move must leave this much. Must never be a reason
to refuse a request.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from sam.core.lineage import SessionState

DECODE_TOKENS = 128
"""Of what a request may still decode: a copy is over in a few steps, and a decode that finds no
room retracts a request instead of ending the scheduler."""


class Headroom:
    """Requests from when they are queued until they are over, by their id. None is kept alive."""

    def __init__(self) -> None:
        self._reqs: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._reqs)

    def add(self, req: Any) -> None:
        self._reqs[req.rid] = req

    def drop(self, rid: str) -> None:
        self._reqs.pop(rid, None)

    def tokens(self) -> int:
        """O(requests): the rest of every admitted prompt, and some tokens of every answer."""
        return sum(_to_come(req) for req in self._reqs.values() if req.kv.holds_kv)


def _to_come(req: Any) -> int:
    n_out = len(req.output_ids)
    rest = len(req.origin_input_ids) + n_out - req.kv.kv_allocated_len
    answer = req.sampling_params.max_new_tokens - n_out
    return max(0, rest) + min(max(0, answer), DECODE_TOKENS)


class OwnCopies:
    """Device-to-host copies that moves of ours have under way: they lock what they copy."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._node_ids: set[int] = set()

    def started(self, node_id: int) -> None:
        self._node_ids.add(node_id)

    def under_way(self) -> bool:
        """Whether there are any, by what the controller has not yet seen end."""
        if self._node_ids:
            self._node_ids.intersection_update(self._cache.ongoing_write_through)
        return bool(self._node_ids)


def busy_tokens(cache: Any) -> tuple[int, int]:
    """Unlocked device tokens of sessions that run or resume; all of those that resume."""
    core, seen, busy, resuming = cache.tree_core, set(), 0, 0
    for ref, state in cache.hints.busy_sessions():
        for node in core.tags.branch_nodes(ref):
            if node.id in seen:
                continue
            seen.add(node.id)
            n_tokens = core.tokens_of(node)[0]
            busy += 0 if core.is_locked(node) else n_tokens
            resuming += n_tokens if state is SessionState.RESUMING else 0
    return busy, resuming
