"""Eviction orders to choose from: `next-use`, `lru`, `session-ref`.

Owns the two stock orders and the choice by name. Must never hold the recommended order
itself (`sam.core.next_use`).
"""

from __future__ import annotations

from sam.core.next_use import NextUseOrder
from sam.core.order import EvictionOrder, Leaf, User, Victim
from sam.core.retention import (
    DEFAULT_PLAIN_GAP_S,
    NextUse,
    NextUseRank,
    plain_next_use,
)
from sam.core.shelf import Shelf

DEFAULT_POLICY = "next-use"


class LruOrder(EvictionOrder):
    """Least recently used first; users do not count."""

    def __init__(self) -> None:
        super().__init__()
        self._shelf = Shelf()

    def _rank(self, leaf: Leaf) -> float:
        """What is compared before the last access: smaller goes first."""
        return 0.0

    def _file(self, leaf: Leaf) -> None:
        self._shelf.put(leaf.entry(self._rank(leaf)))

    def _unfile(self, leaf: Leaf) -> None:
        self._shelf.discard(leaf.node_id)

    def _user_changed(self, user: User) -> None:
        pass

    def _users_grew(self, leaf: Leaf) -> None:
        pass

    def _users_shrank(self, leaf: Leaf, user: User) -> None:
        pass

    def _pick(self, now_s: float, even_running: bool) -> Leaf | None:
        self.now_s = max(self.now_s, now_s)
        while (entry := self._shelf.head()) is not None:
            leaf = self._leaves[entry[4]]
            if leaf.is_fresh(entry):
                return leaf
            self._file(leaf)
        return None

    def _victim(self, leaf: Leaf) -> Victim:
        key = plain_next_use(leaf.access_s, self.now_s, DEFAULT_PLAIN_GAP_S)
        return Victim(leaf.node_id, leaf.pages, key)


class SessionRefOrder(LruOrder):
    """Fewest open sessions first, then least recently used: the key `(ref > 0, ref, lru)`.

    Source: SGLang's `--enable-session-radix-cache`, `FullComponent` of the unified cache.
    A session counts from its first use to its end, a superseded branch included. The key
    of a victim is comparable within this order only: QUEUED while anybody counts.
    """

    def _rank(self, leaf: Leaf) -> float:
        ended = NextUseRank.ENDED
        return float(sum(user.standing.rank is not ended for user in leaf.users))

    def _user_changed(self, user: User) -> None:
        for leaf in user.leaves.values():
            entry = self._shelf.get(leaf.node_id)
            if entry is not None and entry[0] != self._rank(leaf):
                self._file(leaf)

    def _users_grew(self, leaf: Leaf) -> None:
        self._file(leaf)

    def _users_shrank(self, leaf: Leaf, user: User) -> None:
        self._file(leaf)

    def _victim(self, leaf: Leaf) -> Victim:
        victim = super()._victim(leaf)
        if not self._rank(leaf):
            return victim
        return victim._replace(key=NextUse(NextUseRank.QUEUED, victim.key.use_in_s))


_ORDERS: dict[str, type[EvictionOrder]] = {
    DEFAULT_POLICY: NextUseOrder,
    "lru": LruOrder,
    "session-ref": SessionRefOrder,
}
POLICY_NAMES = tuple(_ORDERS)


def create_order(policy: str = DEFAULT_POLICY) -> EvictionOrder:
    """A new, empty order. Raises ValueError naming the choices."""
    order = _ORDERS.get(policy)
    if order is None:
        raise ValueError(f"retention policy {policy!r}: choose from {', '.join(POLICY_NAMES)}")
    return order()
