"""Outcomes of hints, by message id, for a bounded time.

Owns what `GET /kv_hints/{message_id}` shows and what goes into responses. Must never hold
more than its bounds, nor show a tenant another one's outcome: clients choose message ids, so
on the wire each id is scoped by its tenant. Time comes in as an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

_OPEN_STATUSES = ("accepted", "deferred")


def wire_id(tenant: str, message_id: str) -> str:
    """The message id that the scheduler sees; two tenants' equal ids differ."""
    return f"{tenant}:{message_id}"


def client_id(tenant: str, wire: str) -> str:
    """The message id that the client knows: the inverse of `wire_id`."""
    return wire.removeprefix(wire_id(tenant, ""))


class HintResults:
    """Newest `capacity` messages with at most four times as many actions, each message for
    `ttl_s` seconds after its last change."""

    def __init__(self, *, capacity: int, ttl_s: float) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._messages: OrderedDict[str, tuple[str, float, dict[str, dict[str, Any]]]] = (
            OrderedDict()
        )
        self._n_actions = 0

    def __len__(self) -> int:
        return len(self._messages)

    def open(
        self, message_id: str, tenant: str, actions: list[dict[str, Any]], now_s: float
    ) -> None:
        """Remember a message as taken; known ids keep what is known of their actions."""
        self._prune(now_s)
        wire = wire_id(tenant, message_id)
        _, _, known = self._messages.pop(wire, (message_id, now_s, {}))
        self._n_actions -= len(known)
        for action in actions:
            known.setdefault(action["action_id"], action)
        self._messages[wire] = (message_id, now_s, known)
        self._n_actions += len(known)
        while len(self._messages) > self._capacity or self._n_actions > 4 * self._capacity:
            self._forget(next(iter(self._messages)))

    def update(self, wire: str, actions: list[dict[str, Any]], now_s: float) -> None:
        """News from a scheduler. Of several data-parallel ranks, one that found the session
        outweighs those that did not, and a final outcome does not open again."""
        if wire not in self._messages:
            return
        message_id, _, known = self._messages.pop(wire)
        self._n_actions -= len(known)
        for action in actions:
            before = known.get(action["action_id"])
            found = before is not None and before["status"] not in (*_OPEN_STATUSES, "missing")
            if not (found and action["status"] in (*_OPEN_STATUSES, "missing")):
                known[action["action_id"]] = action
        self._messages[wire] = (message_id, now_s, known)
        self._n_actions += len(known)

    def get(self, message_id: str, tenant: str, now_s: float) -> dict[str, Any] | None:
        """The message as its owner sees it, or None."""
        return self.get_wire(wire_id(tenant, message_id), now_s)

    def get_wire(self, wire: str, now_s: float) -> dict[str, Any] | None:
        """The same by the id that the scheduler sees."""
        self._prune(now_s)
        entry = self._messages.get(wire)
        if entry is None:
            return None
        return {"message_id": entry[0], "actions": list(entry[2].values())}

    def _prune(self, now_s: float) -> None:
        while self._messages:
            oldest = next(iter(self._messages))
            if now_s - self._messages[oldest][1] <= self._ttl_s:
                return
            self._forget(oldest)

    def _forget(self, wire: str) -> None:
        self._n_actions -= len(self._messages.pop(wire)[2])
