"""Outcomes of hints, by message id, for a bounded time.

Owns what `GET /kv_hints/{message_id}` shows and what goes into responses. Must never hold
more than its bounds, nor show a tenant another one's outcome. Time comes in as an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

_OPEN_STATUSES = ("accepted", "deferred")


class HintResults:
    """Newest `capacity` messages, each for `ttl_s` seconds after its last change."""

    def __init__(self, *, capacity: int, ttl_s: float) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._messages: OrderedDict[str, tuple[str, float, dict[str, dict[str, Any]]]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._messages)

    def open(
        self, message_id: str, tenant: str, actions: list[dict[str, Any]], now_s: float
    ) -> None:
        """Remember a message as taken; known ids keep what is known of their actions."""
        self._prune(now_s)
        _, _, known = self._messages.pop(message_id, (tenant, now_s, {}))
        for action in actions:
            known.setdefault(action["action_id"], action)
        self._messages[message_id] = (tenant, now_s, known)
        while len(self._messages) > self._capacity:
            self._messages.popitem(last=False)

    def update(self, message_id: str, actions: list[dict[str, Any]], now_s: float) -> None:
        """News from a scheduler. Of several data-parallel ranks, one that found the session
        outweighs those that did not."""
        if message_id not in self._messages:
            return
        tenant, _, known = self._messages.pop(message_id)
        for action in actions:
            before = known.get(action["action_id"])
            found = before is not None and before["status"] not in (*_OPEN_STATUSES, "missing")
            if not (found and action["status"] == "missing"):
                known[action["action_id"]] = action
        self._messages[message_id] = (tenant, now_s, known)

    def get(self, message_id: str, tenant: str | None, now_s: float) -> dict[str, Any] | None:
        """The message as its owner sees it (any owner if `tenant` is None), or None."""
        self._prune(now_s)
        entry = self._messages.get(message_id)
        if entry is None or (tenant is not None and entry[0] != tenant):
            return None
        return {"message_id": message_id, "actions": list(entry[2].values())}

    def _prune(self, now_s: float) -> None:
        while self._messages:
            oldest = next(iter(self._messages))
            if now_s - self._messages[oldest][1] <= self._ttl_s:
                return
            del self._messages[oldest]
