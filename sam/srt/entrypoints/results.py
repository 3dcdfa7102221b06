"""Outcomes of hints, by message id, for a bounded time.

Owns what `GET /kv_hints/{message_id}` shows and what goes into responses. Must never hold
more than its bounds, nor show a tenant another one's outcome: clients choose message ids, so
on the wire each id is scoped by its tenant. Time comes in as an argument.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from sam.srt.entrypoints.tenant import client_of

MAX_ACTIONS_PER_MESSAGE = 256
"""Several envelopes may have one message id; what it collects beyond this is forgotten."""
_MEAN_ACTIONS = 4
_OPEN_STATUSES = ("accepted", "deferred")


def wire_id(tenant: str, message_id: str) -> str:
    """The message id that the scheduler sees; two tenants' equal ids differ."""
    return f"{tenant}:{message_id}"


def client_id(tenant: str, wire: str) -> str:
    """The message id that the client knows: the inverse of `wire_id`."""
    return wire.removeprefix(wire_id(tenant, ""))


class _Message:
    __slots__ = ("actions", "changed_s", "client", "message_id")

    def __init__(self, message_id: str, client: str) -> None:
        self.message_id = message_id
        self.client = client
        self.changed_s = 0.0
        self.actions: dict[str, dict[str, Any]] = {}


class HintResults:
    """Newest `capacity` messages with at most four times as many actions, half of either of
    one client; each message for `ttl_s` seconds after its last change."""

    def __init__(self, *, capacity: int, ttl_s: float) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._messages: OrderedDict[str, _Message] = OrderedDict()
        self._of_client: dict[str, OrderedDict[str, None]] = {}
        self._n_actions: Counter[str] = Counter()
        self._total_actions = 0

    def __len__(self) -> int:
        return len(self._messages)

    def open(
        self, message_id: str, tenant: str, actions: list[dict[str, Any]], now_s: float
    ) -> None:
        """Remember a message as taken; known ids keep what is known of their actions."""
        self._prune(now_s)
        wire = wire_id(tenant, message_id)
        message = self._take_out(wire) or _Message(message_id, client_of(tenant))
        for action in actions:
            action_id = action["action_id"]
            message.actions[action_id] = message.actions.pop(action_id, action)
        self._put_in(wire, message, now_s)
        self._make_room(message.client)

    def update(self, wire: str, actions: list[dict[str, Any]], now_s: float) -> None:
        """News from a scheduler. Of several data-parallel ranks, one that found the session
        outweighs those that did not, and a final outcome does not open again."""
        message = self._take_out(wire)
        if message is None:
            return
        known = message.actions
        for action in actions:
            before = known.get(action["action_id"])
            found = before is not None and before["status"] not in (*_OPEN_STATUSES, "missing")
            if not (found and action["status"] in (*_OPEN_STATUSES, "missing")):
                known[action["action_id"]] = action
        self._put_in(wire, message, now_s)

    def get(self, message_id: str, tenant: str, now_s: float) -> dict[str, Any] | None:
        """The message as its owner sees it, or None."""
        return self.get_wire(wire_id(tenant, message_id), now_s)

    def get_wire(self, wire: str, now_s: float) -> dict[str, Any] | None:
        """The same by the id that the scheduler sees."""
        self._prune(now_s)
        message = self._messages.get(wire)
        if message is None:
            return None
        return {"message_id": message.message_id, "actions": list(message.actions.values())}

    # -- inside -------------------------------------------------------------------

    def _prune(self, now_s: float) -> None:
        while self._messages:
            oldest = next(iter(self._messages))
            if now_s - self._messages[oldest].changed_s <= self._ttl_s:
                return
            self._take_out(oldest)

    def _make_room(self, client: str) -> None:
        """Forget this client's oldest messages while it has over half, then anyone's."""
        half = (self._capacity + 1) // 2
        own = self._of_client[client]
        while len(own) > 1 and (
            len(own) > half or self._n_actions[client] > _MEAN_ACTIONS * half
        ):
            self._take_out(next(iter(own)))
        most_actions = _MEAN_ACTIONS * self._capacity
        while len(self._messages) > self._capacity or self._total_actions > most_actions:
            self._take_out(next(iter(self._messages)))

    def _put_in(self, wire: str, message: _Message, now_s: float) -> None:
        """As the newest one."""
        while len(message.actions) > MAX_ACTIONS_PER_MESSAGE:
            del message.actions[next(iter(message.actions))]
        message.changed_s = now_s
        self._messages[wire] = message
        self._of_client.setdefault(message.client, OrderedDict())[wire] = None
        self._n_actions[message.client] += len(message.actions)
        self._total_actions += len(message.actions)

    def _take_out(self, wire: str) -> _Message | None:
        message = self._messages.pop(wire, None)
        if message is None:
            return None
        self._n_actions[message.client] -= len(message.actions)
        self._total_actions -= len(message.actions)
        own = self._of_client[message.client]
        del own[wire]
        if not own:
            del self._of_client[message.client], self._n_actions[message.client]
        return message
