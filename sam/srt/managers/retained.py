"""What each client has retained, in device tokens.

Owns the counts. Must never walk more than the branch at hand, nor lock anything: who is over
its bound is told so and is retained no longer.

A node is charged once per client: to one of its retained sessions on the node. What is evicted
meanwhile stays charged until that session's next turn, and what is split may count twice as long,
so a client's sum is never too small.
"""

from __future__ import annotations

from typing import Any

from sam.core.sessions import SessionKey, SessionRef
from sam.srt.entrypoints.tenant import client_of
from sam.srt.mem_cache.ownership import path_up

MAX_PER_CLIENT = 256
"""Sessions that one client may have retained."""


class _Entry:
    """A retained session. `nodes`: what it pays for, with the tokens it was charged, by id."""

    __slots__ = ("nodes", "ref")

    def __init__(self, ref: SessionRef) -> None:
        self.ref = ref
        self.nodes: dict[int, tuple[Any, int]] = {}


class _Client:
    """The retained sessions of one client, and who of them pays for which node."""

    __slots__ = ("entries", "n_tokens", "payers")

    def __init__(self) -> None:
        self.entries: dict[SessionKey, _Entry] = {}
        self.payers: dict[int, _Entry] = {}
        self.n_tokens = 0


class RetainedTokens:
    """See the module. `cache` is the SessionRadixCache."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._clients: dict[str, _Client] = {}

    def __len__(self) -> int:
        return sum(len(client.entries) for client in self._clients.values())

    def __contains__(self, key: SessionKey) -> bool:
        client = self._clients.get(client_of(key.tenant))
        return client is not None and key in client.entries

    def tokens_of(self, client: str) -> int:
        """What is charged to a client."""
        found = self._clients.get(client)
        return 0 if found is None else found.n_tokens

    def take(self, ref: SessionRef) -> bool:
        """Retain a session, or count one anew that is; False where its client is over its
        bound with it: then it is not retained."""
        client = self._clients.setdefault(client_of(ref.key.tenant), _Client())
        entry = client.entries.setdefault(ref.key, _Entry(ref))
        entry.ref = ref
        self._count(client, entry)
        too_many = len(client.entries) > MAX_PER_CLIENT
        if not too_many and client.n_tokens <= self._cache.retainable_tokens():
            return True
        self.drop(ref.key)
        return False

    def drop(self, key: SessionKey) -> None:
        """It is retained no longer. No-op for one that is not."""
        name = client_of(key.tenant)
        client = self._clients.get(name)
        entry = None if client is None else client.entries.pop(key, None)
        if client is None or entry is None:
            return
        for node, _ in list(entry.nodes.values()):
            self._release(client, entry, node)
        if not client.entries:
            del self._clients[name]

    def tree_was_reset(self) -> None:
        """Nothing is cached any more."""
        for client in self._clients.values():
            client.n_tokens = 0
            client.payers.clear()
            for entry in client.entries.values():
                entry.nodes.clear()

    def _count(self, client: _Client, entry: _Entry) -> None:
        """O(nodes of the branch it has and of the one it had). Who paid for a node that has
        been split since is counted anew as well."""
        outdated = {id(entry): entry}
        for node in self._count_alone(client, entry):
            for near in (node, *node.children.values()):
                payer = client.payers.get(near.id)
                if payer is not None and payer.nodes[near.id][1] != self._tokens(near):
                    outdated.setdefault(id(payer), payer)
        for payer in list(outdated.values())[1:]:
            self._count_alone(client, payer)

    def _count_alone(self, client: _Client, entry: _Entry) -> list[Any]:
        """Nodes that nobody paid for, or whose payer paid for another size."""
        path = list(path_up(self._cache.tree_core.tags.current(entry.ref)))
        here = {node.id for node in path}
        for node_id, (node, _) in list(entry.nodes.items()):
            if node_id not in here:
                self._release(client, entry, node)
        changed = []
        for node in path:
            payer = client.payers.setdefault(node.id, entry)
            if node.id not in payer.nodes or payer.nodes[node.id][1] != self._tokens(node):
                changed.append(node)
            if payer is entry:
                self._charge(client, entry, node)
        return changed

    def _tokens(self, node: Any) -> int:
        return self._cache.tree_core.tokens_of(node)[0]

    def _charge(self, client: _Client, entry: _Entry, node: Any) -> None:
        _, before = entry.nodes.get(node.id, (None, 0))
        n_tokens = self._tokens(node)
        entry.nodes[node.id] = (node, n_tokens)
        client.n_tokens += n_tokens - before

    def _release(self, client: _Client, entry: _Entry, node: Any) -> None:
        """Another retained session on the node pays for it now, or nobody."""
        _, n_tokens = entry.nodes.pop(node.id)
        del client.payers[node.id]
        client.n_tokens -= n_tokens
        if self._cache.tree_core.find_node(node.id) is not node:
            return
        users, entries = self._cache.tree_core.tags.users_of(node), client.entries
        few, many = (users, entries) if len(users) < len(entries) else (entries, users)
        heirs = (entries[name] for name in few if name in many)
        heir = next((heir for heir in heirs if heir is not entry), None)
        if heir is not None:
            client.payers[node.id] = heir
            self._charge(client, heir, node)
