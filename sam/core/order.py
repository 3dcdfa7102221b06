"""The eviction order of one tier: which leaf goes first. Interface and bookkeeping.

Owns the evictable leaves of one tier, their users, and the rule that a victim leaves the
order when it is popped. Must never know the tree (the caller adds what became a leaf and
removes what stopped being one), a clock, or locks: a leaf that the engine locks is to be
removed for that time. Policies are subclasses: `sam.core.next_use`, `sam.core.policies`.

How laziness stays exact: a leaf's entry may promise an *earlier* turn than its true key,
never a later one. What only postpones a leaf (an access, one more user) costs nothing
when it happens; the leaf is put right when it reaches the head. What hastens it is
entered at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from sam.core.retention import NextUse, NextUseRank, Standing, next_use
from sam.core.shelf import Entry, Shelf

_GONE = Standing(NextUseRank.ENDED)


class Victim(NamedTuple):
    """The leaf to go next. `key` is comparable with `EvictionOrder.key_of_user`."""

    node_id: int
    pages: int
    key: NextUse


class User:
    """One user of leaves in one order; `serial` counts first registrations."""

    __slots__ = ("leaves", "serial", "standing")

    def __init__(self, serial: int, standing: Standing) -> None:
        self.serial = serial
        self.standing = standing
        self.leaves: dict[int, Leaf] = {}


class Leaf:
    """One evictable leaf. `filed` is the user under whose key it is entered on `shelf`."""

    __slots__ = (
        "access_s",
        "backed",
        "depth",
        "filed",
        "node_id",
        "pages",
        "shelf",
        "tick",
        "users",
    )

    def __init__(
        self, node_id: int, access_s: float, tick: int, depth: float, pages: int, backed: bool
    ) -> None:
        self.node_id = node_id
        self.access_s = access_s
        self.tick = tick
        self.depth = depth
        self.pages = pages
        self.backed = backed
        self.users: list[User] = []
        self.filed: User | None = None
        self.shelf: Shelf | None = None

    def entry(self, key: float) -> Entry:
        """Entry on a shelf; ties: older access, then deeper, then the lower id."""
        return (key, self.access_s, self.tick, -self.depth, self.node_id)

    def is_fresh(self, entry: Entry) -> bool:
        """Whether the entry knows the last access."""
        return entry[1] == self.access_s and entry[2] == self.tick


class EvictionOrder(ABC):
    """Evictable leaves of one tier, in the order in which they go.

    Times are message times in seconds and never run backwards: an older `now_s` counts as
    the newest seen. `tick` is the engine's own access counter, the second part of an
    access; it decides between accesses at one message time. `depth` grows from the root to
    the leaves (pages from the root to the node's end do not change when a node is split).
    `users` are ids registered with `set_user`; a leaf with none is unowned.

    Unknown leaves and users raise KeyError, a leaf added twice ValueError.
    """

    def __init__(self) -> None:
        self.now_s = float("-inf")
        self._leaves: dict[int, Leaf] = {}
        self._users: dict[Hashable, User] = {}
        self._n_users_made = 0
        self._drained: User | None = None

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._leaves

    # -- users --------------------------------------------------------------------

    def has_user(self, user: Hashable) -> bool:
        return user in self._users

    def set_user(self, user: Hashable, standing: Standing) -> None:
        """Register a user, or change what it counts as. O(its leaves * log n)."""
        record = self._users.get(user)
        if record is None:
            self._n_users_made += 1
            self._users[user] = record = User(self._n_users_made, standing)
        else:
            record.standing = standing
        self._user_changed(record)

    def drop_user(self, user: Hashable) -> None:
        """Forget a user, if known; its leaves lose it."""
        record = self._users.pop(user, None)
        if record is None:
            return
        for leaf in list(record.leaves.values()):
            self._detach(leaf, record)
        record.standing = _GONE

    def add_user(self, node_id: int, user: Hashable) -> None:
        """One more user of a leaf; no-op if it is one already."""
        leaf, record = self._leaves[node_id], self._users[user]
        if node_id not in record.leaves:
            record.leaves[node_id] = leaf
            leaf.users.append(record)
            self._users_grew(leaf)

    def remove_user(self, node_id: int, user: Hashable) -> None:
        """One user less; no-op if it is none."""
        leaf, record = self._leaves[node_id], self._users[user]
        if node_id in record.leaves:
            self._detach(leaf, record)

    # -- leaves -------------------------------------------------------------------

    def add(
        self,
        node_id: int,
        users: Iterable[Hashable],
        last_access_s: float,
        depth: float,
        pages: int,
        *,
        tick: int = 0,
        backed: bool = False,
    ) -> None:
        """A node became an evictable leaf; `backed`: a copy exists one tier down."""
        if node_id in self._leaves:
            raise ValueError(f"leaf {node_id} is in the order already")
        records = [self._users[user] for user in users]
        leaf = Leaf(node_id, last_access_s, tick, depth, pages, backed)
        for record in records:
            if node_id not in record.leaves:
                record.leaves[node_id] = leaf
                leaf.users.append(record)
        self._leaves[node_id] = leaf
        self._file(leaf)

    def remove(self, node_id: int) -> None:
        """A leaf went, was locked, or is no leaf any more."""
        leaf = self._leaves.pop(node_id)
        for record in leaf.users:
            del record.leaves[node_id]
        self._unfile(leaf)

    def discard(self, node_id: int) -> None:
        """`remove`, if it is there."""
        if node_id in self._leaves:
            self.remove(node_id)

    def touch(self, node_id: int, last_access_s: float, tick: int = 0) -> None:
        """A leaf was used. O(1)."""
        leaf = self._leaves[node_id]
        older = (last_access_s, tick) < (leaf.access_s, leaf.tick)
        leaf.access_s, leaf.tick = last_access_s, tick
        if older:
            self._file(leaf)

    def update(
        self,
        node_id: int,
        *,
        pages: int | None = None,
        depth: float | None = None,
        backed: bool | None = None,
    ) -> None:
        """Change what is known of a leaf: a split took its head, a host copy appeared."""
        leaf = self._leaves[node_id]
        if pages is not None:
            leaf.pages = pages
        moved = depth is not None and depth != leaf.depth
        moved = moved or (backed is not None and backed != leaf.backed)
        if moved:
            leaf.depth = leaf.depth if depth is None else depth
            leaf.backed = leaf.backed if backed is None else backed
            self._file(leaf)

    # -- victims ------------------------------------------------------------------

    def peek(self, now_s: float, *, even_running: bool = False) -> Victim | None:
        """The leaf to go next, or None. O(log n) amortised, plus its number of users.

        Leaves of running sessions are no victims: the engine locks what they use. The
        rest of their leaves come last, and only with `even_running`.
        """
        leaf = self._pick(now_s, even_running)
        return None if leaf is None else self._victim(leaf)

    def pop_victim(self, now_s: float, *, even_running: bool = False) -> Victim | None:
        """`peek` and `take`."""
        leaf = self._pick(now_s, even_running)
        if leaf is None:
            return None
        victim = self._victim(leaf)
        self.take(leaf.node_id)
        return victim

    def take(self, node_id: int) -> None:
        """Remove a victim that was peeked at. Between equals its session goes on first."""
        self._drained = self._leaves[node_id].filed
        self.remove(node_id)

    def key_of_user(self, user: Hashable, now_s: float) -> NextUse:
        """Key that the user alone gives a leaf without a copy one tier down."""
        return next_use(self._users[user].standing, max(now_s, self.now_s))

    # -- what a policy defines ----------------------------------------------------

    @abstractmethod
    def _pick(self, now_s: float, even_running: bool) -> Leaf | None:
        """The leaf to go next, `filed` right."""

    @abstractmethod
    def _victim(self, leaf: Leaf) -> Victim:
        """The leaf as its caller sees it."""

    @abstractmethod
    def _file(self, leaf: Leaf) -> None:
        """Enter a leaf where it belongs by now, or no later than there."""

    @abstractmethod
    def _unfile(self, leaf: Leaf) -> None:
        """Take a leaf off all shelves."""

    def _user_changed(self, user: User) -> None:
        for leaf in user.leaves.values():
            if leaf.filed is user:
                self._file(leaf)

    def _users_grew(self, leaf: Leaf) -> None:
        if leaf.filed is None:
            self._file(leaf)

    def _users_shrank(self, leaf: Leaf, user: User) -> None:
        if leaf.filed is user:
            leaf.filed = None
            self._file(leaf)

    def _detach(self, leaf: Leaf, user: User) -> None:
        del user.leaves[leaf.node_id]
        leaf.users.remove(user)
        self._users_shrank(leaf, user)


def drain(
    order: EvictionOrder,
    need_pages: int,
    now_s: float,
    uncover: Callable[[int], None],
    *,
    even_running: bool = False,
) -> list[tuple[int, int]]:
    """Take victims until `need_pages` are found; return (node id, pages) in that order.

    The last victim is trimmed to what is needed and stays in the order with the rest.
    `uncover` is called with each leaf that went whole: it adds what became a leaf.
    """
    taken: list[tuple[int, int]] = []
    while need_pages > 0:
        victim = order.peek(now_s, even_running=even_running)
        if victim is None:
            break
        pages = min(victim.pages, need_pages)
        need_pages -= pages
        taken.append((victim.node_id, pages))
        if pages < victim.pages:
            order.update(victim.node_id, pages=victim.pages - pages)
        else:
            order.take(victim.node_id)
            uncover(victim.node_id)
    return taken
