"""An eviction order with leaves of its own: for simulation, ghosts and hand-made cases.

Owns the records of leaves that a server's tree would own, and their users. Must never
decide about the order itself: that is a `LeafOrder`, the same as on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from sam.core.leaf_order import LeafOrder, LeafView
from sam.core.policies import DEFAULT_POLICY, create_leaves
from sam.core.retention import NextUse, Standing


class Victim(NamedTuple):
    """The leaf to go next. `key` is comparable with `EvictionOrder.key_of_user`."""

    node_id: int
    pages: int
    key: NextUse


class Leaf:
    """One evictable leaf. `when`: (last access in seconds, tick, minus depth)."""

    __slots__ = ("backed", "id", "pages", "users", "when")

    def __init__(
        self, node_id: int, when: tuple[float, int, float], pages: int, backed: bool
    ) -> None:
        self.id = node_id
        self.when = when
        self.pages = pages
        self.backed = backed
        self.users: dict[Hashable, None] = {}


class EvictionOrder:
    """Evictable leaves of one tier, in the order in which they go, by one policy.

    Times are message times in seconds and never run backwards. `tick` is the second part
    of an access; it decides between accesses at one message time. `depth` grows from the
    root to the leaves. `users` are ids registered with `set_user`; a leaf with none is
    unowned.

    Unknown leaves and users raise KeyError, a leaf added twice ValueError.
    """

    def __init__(self, policy: str = DEFAULT_POLICY) -> None:
        self._leaves: dict[int, Leaf] = {}
        self._of_user: dict[Hashable, dict[int, Leaf]] = {}
        self.queue: LeafOrder = create_leaves(
            policy,
            LeafView(
                nodes=self._leaves,
                is_leaf=lambda leaf: True,
                users_of=lambda leaf: leaf.users,
                when_of=lambda leaf: leaf.when,
                time_of=lambda when: when[0],
                backed_of=lambda leaf: leaf.backed,
                leaves_of=lambda user: self._of_user[user].values(),
            ),
        )

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._leaves

    @property
    def trust_ends(self) -> bool:
        return self.queue.trust_ends

    @trust_ends.setter
    def trust_ends(self, trust: bool) -> None:
        self.queue.trust_ends = trust

    @property
    def use_lru(self) -> bool:
        return self.queue.use_lru

    @use_lru.setter
    def use_lru(self, use: bool) -> None:
        self.queue.use_lru = use

    # -- users --------------------------------------------------------------------

    def has_user(self, user: Hashable) -> bool:
        return user in self._of_user

    def set_user(self, user: Hashable, standing: Standing) -> None:
        """Register a user, or change what it counts as. O(its leaves * log n)."""
        self._of_user.setdefault(user, {})
        self.queue.set_user(user, standing)

    def drop_user(self, user: Hashable) -> None:
        """Forget a user, if known; its leaves lose it."""
        for leaf in self._of_user.pop(user, {}).values():
            del leaf.users[user]
            self.queue.offer(leaf)
        self.queue.drop_user(user)

    def add_user(self, node_id: int, user: Hashable) -> None:
        """One more user of a leaf; no-op if it is one already."""
        leaf = self._leaves[node_id]
        self._of_user[user][node_id] = leaf
        leaf.users[user] = None
        self.queue.offer(leaf)

    def remove_user(self, node_id: int, user: Hashable) -> None:
        """One user less; no-op if it is none."""
        leaf = self._leaves[node_id]
        if self._of_user[user].pop(node_id, None) is not None:
            del leaf.users[user]
            self.queue.offer(leaf)

    def key_of_user(self, user: Hashable, now_s: float) -> NextUse:
        """Key that the user alone gives a leaf without a copy one tier down."""
        return self.queue.key_of_user(user, now_s)

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
        of_users = [(user, self._of_user[user]) for user in users]
        leaf = Leaf(node_id, (last_access_s, tick, -depth), pages, backed)
        for user, leaves in of_users:
            leaf.users[user] = None
            leaves[node_id] = leaf
        self._leaves[node_id] = leaf
        self.queue.offer(leaf)

    def remove(self, node_id: int) -> None:
        """A leaf went, was locked, or is no leaf any more."""
        leaf = self._leaves.pop(node_id)
        for user in leaf.users:
            del self._of_user[user][node_id]
        self.queue.discard(node_id)

    def discard(self, node_id: int) -> None:
        """`remove`, if it is there."""
        if node_id in self._leaves:
            self.remove(node_id)

    def touch(self, node_id: int, last_access_s: float, tick: int = 0) -> None:
        """A leaf was used."""
        leaf = self._leaves[node_id]
        leaf.when = (last_access_s, tick, leaf.when[2])
        self.queue.offer(leaf)

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
        if depth is not None:
            leaf.when = (*leaf.when[:2], -depth)
        if backed is not None:
            leaf.backed = backed
        self.queue.offer(leaf)

    # -- victims ------------------------------------------------------------------

    def peek(self, now_s: float, *, even_running: bool = False) -> Victim | None:
        """The leaf to go next, or None. O(log n) amortised, plus its number of users.

        Leaves of running sessions are no victims: the engine locks what they use. The
        rest of their leaves come last, and only with `even_running`.
        """
        leaf = self.queue.first(now_s, even_running=even_running)
        if leaf is None:
            return None
        return Victim(leaf.id, leaf.pages, self.queue.key_of(leaf, now_s))

    def pop_victim(self, now_s: float, *, even_running: bool = False) -> Victim | None:
        """`peek` and `take`."""
        victim = self.peek(now_s, even_running=even_running)
        if victim is not None:
            self.take(victim.node_id)
        return victim

    def take(self, node_id: int) -> None:
        """Remove a victim that was peeked at. Between equals its session goes on first."""
        self.queue.take(self._leaves[node_id])
        self.remove(node_id)


def create_order(policy: str = DEFAULT_POLICY) -> EvictionOrder:
    """A new, empty order. Raises ValueError naming the choices."""
    return EvictionOrder(policy)


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
