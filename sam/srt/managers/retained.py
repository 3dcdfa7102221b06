"""What each client has retained, in device tokens.

Owns the counts. Must never walk more than the branches at hand, nor lock anything: who is over
its bound is told so and is retained no longer.

A node is charged once per client: to that of its retained sessions on the node which was retained
first. What is evicted meanwhile stays charged until its session's next turn, so a client's sum is
never too small.
"""

from __future__ import annotations

from typing import Any

from sam.core.sessions import SessionKey, SessionRef
from sam.srt.entrypoints.tenant import client_of
from sam.srt.mem_cache.ownership import path_up

MAX_PER_CLIENT = 256
"""Sessions that one client may have retained: what a change of one may cost in counts."""


class _Entry:
    __slots__ = ("n_tokens", "number", "ref")

    def __init__(self, ref: SessionRef, number: int) -> None:
        self.ref = ref
        self.number = number
        self.n_tokens = 0


class RetainedTokens:
    """See the module. `cache` is the SessionRadixCache."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._of_client: dict[str, dict[SessionKey, _Entry]] = {}
        self._sums: dict[str, int] = {}
        self._n_made = 0

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._of_client.values())

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._of_client.get(client_of(key.tenant), ())

    def tokens_of(self, client: str) -> int:
        """What is charged to a client."""
        return self._sums.get(client, 0)

    def take(self, ref: SessionRef) -> bool:
        """Retain a session, or count one anew that is; False where its client is over its
        bound with it: then it is not retained."""
        client = client_of(ref.key.tenant)
        entries = self._of_client.setdefault(client, {})
        entry = entries.get(ref.key)
        if entry is None:
            self._n_made += 1
            entry = entries[ref.key] = _Entry(ref, self._n_made)
        entry.ref, before = ref, entry.n_tokens
        self._count(client, entry)
        if entry.n_tokens < before:
            self._count_after(client, entry)
        too_many = len(entries) > MAX_PER_CLIENT
        if not too_many and self._sums[client] <= self._cache.retainable_tokens():
            return True
        self.drop(ref.key)
        return False

    def drop(self, key: SessionKey) -> None:
        """It is retained no longer. No-op for one that is not."""
        client = client_of(key.tenant)
        entries = self._of_client.get(client, {})
        entry = entries.get(key)
        if entry is None:
            return
        before = entry.n_tokens
        self._count(client, entry)
        path = self._path(entry.ref)
        del entries[key]
        self._sums[client] -= entry.n_tokens
        if entry.n_tokens < before:
            self._count_after(client, entry)
        heirs = [self._charged(client, node) for node in path]
        for heir in {h.number: h for h in heirs if h is not None}.values():
            if heir.number > entry.number:
                self._count(client, heir)
        if not entries:
            del self._of_client[client], self._sums[client]

    def tree_was_reset(self) -> None:
        """Nothing is cached any more."""
        for client, entries in self._of_client.items():
            self._sums[client] = 0
            for entry in entries.values():
                entry.n_tokens = 0

    def _count(self, client: str, entry: _Entry) -> None:
        n_tokens = sum(
            self._cache.tree_core.tokens_of(node)[0]
            for node in self._path(entry.ref)
            if self._charged(client, node) is entry
        )
        self._sums[client] = self._sums.get(client, 0) + n_tokens - entry.n_tokens
        entry.n_tokens = n_tokens

    def _count_after(self, client: str, entry: _Entry) -> None:
        """The session's branch is another one: who came after it may pay for what it left."""
        for other in list(self._of_client[client].values()):
            if other.number > entry.number:
                self._count(client, other)

    def _path(self, ref: SessionRef) -> list[Any]:
        """The session's current branch; what it left is not kept for it."""
        return list(path_up(self._cache.tree_core.tags.current(ref)))

    def _charged(self, client: str, node: Any) -> _Entry | None:
        """Which retained session of the client pays for the node."""
        users, entries = self._cache.tree_core.tags.users_of(node), self._of_client[client]
        few, many = (users, entries) if len(users) < len(entries) else (entries, users)
        paying = [entries[name] for name in few if name in many]
        return min(paying, key=lambda entry: entry.number, default=None)
