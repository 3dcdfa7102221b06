"""The order in which the leaves of one tier go. Interface and bookkeeping of users.

Owns the queue of one tier's evictable leaves and what their users count as. Must never know
the tree, a clock, or locks: it sees its caller's nodes through a `LeafView`, asks again
before it names a victim, and is told of changes. Policies are subclasses:
`sam.core.next_use`, `sam.core.policies`; with leaves of its own, `sam.core.order`.

How laziness stays exact: a leaf's place may promise an *earlier* turn than its true key,
never a later one. What only postpones a leaf (an access, one more user) need not be told and
costs nothing; the leaf is put right when it reaches the head. What hastens it is
entered at once. A leaf that the engine locks stays queued; it falls out when its turn
comes, and is to be offered again when it is unlocked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from sam.core.retention import NextUse, NextUseRank, Standing, next_use

_GONE = Standing(NextUseRank.ENDED)


class LeafView(NamedTuple):
    """How an order sees its caller's nodes; each node has an `id`.

    `when_of`: last access, comparable; between equals the deeper one is to be smaller.
    `time_of`: the message time of a `when`, in seconds. `backed_of`: whether a copy exists
    one tier down. `users_of`: users of what lies at or below the node, each once, in a
    fixed order. `leaves_of`: all leaves of a user, only where accesses may be equal.
    """

    nodes: Mapping[int, Any]
    is_leaf: Callable[[Any], bool]
    users_of: Callable[[Any], dict[Hashable, Any] | tuple[Hashable, ...]]
    when_of: Callable[[Any], Any]
    time_of: Callable[[Any], float]
    backed_of: Callable[[Any], bool]
    leaves_of: Callable[[Hashable], Iterable[Any]] | None = None


class User(msgspec.Struct, eq=False, gc=False):
    """One user of leaves in one order; `serial` counts first registrations. `filed`: ids of
    the leaves that wait under its key."""

    name: Any
    serial: int
    standing: Standing
    filed: dict[int, None] = {}


class _UsersOf(dict[Hashable, User]):
    """Users of one order, entered when they are first asked for, as another knows them."""

    def __init__(self, order: LeafOrder, known: dict[Hashable, User]) -> None:
        self._order, self._known = order, known

    def __missing__(self, name: Hashable) -> User:
        known = self._known[name]
        user = self[name] = User(name, known.serial, known.standing)
        self._order._user_changed(user)
        return user


class LeafOrder(ABC):
    """Evictable leaves of one tier. Times are message times in seconds and never run
    backwards: an older `now_s` counts as the newest seen. A user that was not registered
    with `set_user` raises KeyError as soon as a leaf of it is offered.
    """

    trust_ends = True
    use_lru = False
    on_victim: Callable[[Any], None] | None = None
    """Called with each leaf that `pop` chose, while its users are still known."""

    def __init__(self, view: LeafView) -> None:
        self.view = view
        self.now_s = float("-inf")
        self._users: dict[Hashable, User] = {}
        self._n_users_made = 0

    # -- users --------------------------------------------------------------------

    def has_user(self, name: Hashable) -> bool:
        return name in self._users

    def share_users(self, other: LeafOrder) -> None:
        """From now on users are those that `other` knows: `set_user` there, and then
        `update_user` here, which costs next to nothing where none of a user's leaves are."""
        self._users = _UsersOf(self, other._users)

    def update_user(self, name: Hashable, standing: Standing) -> None:
        """`set_user`, once a leaf of the user was offered here."""
        user = self._users.get(name)
        if user is not None:
            user.standing = standing
            self._user_changed(user)

    def set_user(self, name: Hashable, standing: Standing) -> None:
        """Register a user, or change what it counts as. O(its leaves * log n)."""
        user = self._users.get(name)
        if user is None:
            self._n_users_made += 1
            self._users[name] = user = User(name, self._n_users_made, standing)
        else:
            user.standing = standing
        self._user_changed(user)

    def drop_user(self, name: Hashable) -> None:
        """Forget a user, if known. No node may name it any more."""
        user = self._users.pop(name, None)
        if user is None:
            return
        user.standing = _GONE
        for node_id in list(user.filed):
            self.discard(node_id)
            node = self.view.nodes.get(node_id)
            if node is not None:
                self.offer(node)

    def standings(self) -> list[tuple[Hashable, Standing]]:
        """All users, in the order in which they were registered."""
        return [(user.name, user.standing) for user in self._users.values()]

    def key_of_user(self, name: Hashable, now_s: float) -> NextUse:
        """Key that the user alone gives a leaf without a copy one tier down."""
        standing = self._users[name].standing
        return next_use(standing, max(now_s, self.now_s), trust_ends=self.trust_ends)

    # -- leaves -------------------------------------------------------------------

    @abstractmethod
    def __len__(self) -> int:
        """Queued leaves, those that are locked by now included."""

    @abstractmethod
    def holds(self, node: Any) -> bool:
        """Whether the node is queued."""

    def offer(self, node: Any) -> None:
        """Queue the node, or move it to where it belongs by now, if it is a leaf."""
        if self.view.is_leaf(node):
            self.offer_leaf(node)

    @abstractmethod
    def offer_leaf(self, node: Any) -> None:
        """`offer` of what is known to be a leaf."""

    @abstractmethod
    def offer_new(self, node_id: int, when: Any) -> None:
        """A new leaf, unowned, with the newest access of all: `offer` without questions."""

    @abstractmethod
    def discard(self, node_id: int) -> None:
        """The node is gone from this tier."""

    # -- victims ------------------------------------------------------------------

    @abstractmethod
    def first(self, now_s: float, *, even_running: bool = True) -> Any | None:
        """The leaf to go next, still queued; None if there is none. O(log n) amortised,
        plus its number of users. Without `even_running` leaves of running users stay."""

    @abstractmethod
    def take(self, node: Any) -> None:
        """Take out the leaf that `first` named."""

    @abstractmethod
    def key_of(self, node: Any, now_s: float) -> NextUse:
        """The node's key, whether it is queued or not; the largest goes first."""

    def pop(self, now_s: float) -> Any | None:
        """`first` and `take`."""
        node = self.first(now_s)
        if node is not None:
            self.take(node)
            if self.on_victim is not None:
                self.on_victim(node)
        return node

    @abstractmethod
    def _user_changed(self, user: User) -> None:
        """Put right, or early enough, what waits under the user's key."""
