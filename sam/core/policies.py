"""Eviction orders to choose from: `next-use`, `lru`, `session-ref`.

Owns the two stock orders and the choice by name. Must never hold the recommended order
itself (`sam.core.next_use`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from sam.core.leaf_order import LeafOrder, LeafView, User
from sam.core.next_use import NextUseLeaves
from sam.core.recency import RecencyList
from sam.core.retention import DEFAULT_PLAIN_GAP_S, NextUse, NextUseRank, plain_next_use
from sam.core.shelf import Shelf

DEFAULT_POLICY = "next-use"


class _StockLeaves(LeafOrder):
    """What the two have in common: one sequence of places, put right at its head."""

    @abstractmethod
    def _head(self) -> tuple[Any, ...] | None:
        """The place whose turn it is, the node's id last in it."""

    @abstractmethod
    def _is_right(self, node: Any, place: tuple[Any, ...]) -> bool:
        """Whether the node still belongs there."""

    def first(self, now_s: float, *, even_running: bool = True) -> Any | None:
        self.now_s = max(self.now_s, now_s)
        view = self.view
        while (place := self._head()) is not None:
            node = view.nodes.get(place[-1])
            if node is None or not view.is_leaf(node):
                self.discard(place[-1])
            elif self._is_right(node, place):
                return node
            else:
                self.offer(node)
        return None

    def take(self, node: Any) -> None:
        self.discard(node.id)

    def key_of(self, node: Any, now_s: float) -> NextUse:
        time_s = self.view.time_of(self.view.when_of(node))
        return plain_next_use(time_s, max(now_s, self.now_s), DEFAULT_PLAIN_GAP_S)


class LruLeaves(_StockLeaves):
    """Least recently used first; users do not count."""

    def __init__(self, view: LeafView) -> None:
        super().__init__(view)
        self._list = RecencyList()

    def __len__(self) -> int:
        return len(self._list)

    def holds(self, node: Any) -> bool:
        return node.id in self._list.at

    def offer_leaf(self, node: Any) -> None:
        self._list.put(node.id, self.view.when_of(node))

    def offer_new(self, node_id: int, when: Any) -> None:
        self._list.put(node_id, when)

    def discard(self, node_id: int) -> None:
        self._list.discard(node_id)

    def _head(self) -> tuple[Any, ...] | None:
        return self._list.head()

    def _is_right(self, node: Any, place: tuple[Any, ...]) -> bool:
        return bool(self.view.when_of(node) == place[0])

    def _user_changed(self, user: User) -> None:
        pass


class SessionRefLeaves(_StockLeaves):
    """Fewest open sessions first, then least recently used: the key `(ref > 0, ref, lru)`.

    Source: SGLang's `--enable-session-radix-cache`, `FullComponent` of the unified cache.
    A session counts from its first use to its end, a superseded branch included; SGLang
    counts each leaf that a session's requests ended at, which differs between equals. The key
    of a node is comparable within this order only: QUEUED while anybody counts.
    """

    def __init__(self, view: LeafView) -> None:
        super().__init__(view)
        self._shelf = Shelf()

    def __len__(self) -> int:
        return len(self._shelf)

    def holds(self, node: Any) -> bool:
        return node.id in self._shelf

    def offer_leaf(self, node: Any) -> None:
        entry = (float(self._n_open(node)), self.view.when_of(node), node.id)
        if self._shelf.get(node.id) != entry:
            self._shelf.put(entry)

    def offer_new(self, node_id: int, when: Any) -> None:
        self._shelf.put((0.0, when, node_id))

    def discard(self, node_id: int) -> None:
        self._shelf.discard(node_id)

    def _head(self) -> tuple[Any, ...] | None:
        return self._shelf.head()

    def _is_right(self, node: Any, place: tuple[Any, ...]) -> bool:
        return bool(place[1] == self.view.when_of(node) and place[0] == self._n_open(node))

    def key_of(self, node: Any, now_s: float) -> NextUse:
        key = super().key_of(node, now_s)
        return NextUse(NextUseRank.QUEUED, key.use_in_s) if self._n_open(node) else key

    def _n_open(self, node: Any) -> int:
        users = self._users
        ended = NextUseRank.ENDED
        return sum(users[u].standing.rank is not ended for u in self.view.users_of(node))

    def _user_changed(self, user: User) -> None:
        """An end counts at once where the caller leaves the user on its nodes."""
        if self.view.leaves_of is not None:
            for node in self.view.leaves_of(user.name):
                if node.id in self._shelf:
                    self.offer(node)


_ORDERS: dict[str, type[LeafOrder]] = {
    DEFAULT_POLICY: NextUseLeaves,
    "lru": LruLeaves,
    "session-ref": SessionRefLeaves,
}
POLICY_NAMES = tuple(_ORDERS)


def create_leaves(policy: str, view: LeafView) -> LeafOrder:
    """A new, empty order over the caller's leaves. Raises ValueError naming the choices."""
    order = _ORDERS.get(policy)
    if order is None:
        raise ValueError(f"retention policy {policy!r}: choose from {', '.join(POLICY_NAMES)}")
    return order(view)
