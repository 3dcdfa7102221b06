"""One simulated tier: a radix tree of page runs under an eviction order of `sam.core`.

Owns what is resident, who uses it and what is locked. Must never decide which leaf goes
(that is the `EvictionOrder`, the server's own) nor hold more than its capacity. A request
larger than the tier keeps its head.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sam.core.order import EvictionOrder
from sam.core.tracker import RetentionTracker


class _Node:
    """Resident pages of one stream, below `parent`; children hang at its end."""

    __slots__ = (
        "access_s",
        "children",
        "id",
        "locks",
        "pages",
        "parent",
        "stream",
        "tick",
        "users",
    )

    def __init__(self, node_id: int, stream: int, pages: int, parent: _Node | None) -> None:
        self.id = node_id
        self.stream = stream
        self.pages = pages
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.users: dict[Hashable, None] = {}
        self.locks = 0
        self.access_s = 0.0
        self.tick = 0


class TierCache:
    """Pages of prompts. `tracker`: tells the order what users count as; without one nodes
    have no users. A running session's branch is locked until its answer is complete; where
    nothing else is left, the one that runs for longest loses its lock.
    """

    def __init__(
        self, capacity_pages: int, order: EvictionOrder, tracker: RetentionTracker | None = None
    ) -> None:
        self.capacity_pages = capacity_pages
        self.order = order
        self.tracker = tracker
        self.used_pages = 0
        self.evicted_pages = 0
        self._root = _Node(0, 0, 0, None)
        self._nodes: dict[int, _Node] = {}
        self._n_made = 0
        self._tick = 0
        self._deepest: dict[Hashable, _Node] = {}
        self._n_nodes_of: dict[Hashable, int] = {}
        self._running: dict[Hashable, _Node] = {}
        self._in_hand: _Node | None = None

    # -- requests -----------------------------------------------------------------

    def access(
        self,
        path: Sequence[tuple[int, int]],
        now_s: float,
        session: Hashable,
        *,
        owned: bool = True,
    ) -> int:
        """A request starts; returns its pages that were here, from the first one on.

        Not `owned`: `session` only holds the lock, the nodes get no user from it.
        """
        self._tick += 1
        self._unlock(session)
        nodes, hit_pages, piece, done = self._match(path)
        deepest = nodes[-1] if nodes else self._root
        self.order.discard(deepest.id)
        if piece < len(path):
            deepest = self._insert(deepest, path, piece, done, session)
        self._touch(deepest, now_s)
        if owned and self.tracker is not None and deepest is not self._root:
            self._follow(session, deepest)
        if self.used_pages > self.capacity_pages:
            self._in_hand = deepest
            self._make_room(now_s)
            self._in_hand = None
            deepest = self._cut(deepest)
        if deepest is not self._root:
            self._running[session] = deepest
            deepest.locks += 1
        return hit_pages

    def finish(self, session: Hashable, now_s: float) -> None:
        """The answer is complete: the branch counts as used now, and may go."""
        node = self._running.get(session)
        if node is None:
            return
        self._tick += 1
        self.order.discard(node.id)
        self._touch(node, now_s)
        self._unlock(session)

    def peek(self, path: Sequence[tuple[int, int]]) -> int:
        """Pages of the path that are here, from the first one on; changes nothing."""
        above, hit_pages = self._root, 0
        for stream, pages in path:
            done = 0
            while done < pages:
                node = above.children.get(stream)
                if node is None:
                    return hit_pages
                here = min(node.pages, pages - done)
                done += here
                hit_pages += here
                above = node
        return hit_pages

    def has_nodes(self, user: Hashable) -> bool:
        """Whether the user, or what it left, still uses anything here."""
        return bool(self._n_nodes_of.get(user))

    # -- tree ---------------------------------------------------------------------

    def _match(self, path: Sequence[tuple[int, int]]) -> tuple[list[_Node], int, int, int]:
        """Nodes and pages that are here, and where it stops: (piece, pages done of it)."""
        nodes: list[_Node] = []
        above, hit_pages = self._root, 0
        for piece, (stream, pages) in enumerate(path):
            done = 0
            while done < pages:
                node = above.children.get(stream)
                if node is None:
                    return nodes, hit_pages, piece, done
                if node.pages > pages - done:
                    node = self._split(node, pages - done)
                done += node.pages
                hit_pages += node.pages
                nodes.append(node)
                above = node
        return nodes, hit_pages, len(path), 0

    def _insert(
        self,
        above: _Node,
        path: Sequence[tuple[int, int]],
        piece: int,
        done: int,
        session: Hashable,
    ) -> _Node:
        """Add what is missing of the path below `above`; returns the deepest node."""
        stream, pages = path[piece]
        missing = pages - done
        if done and not above.children and not above.locks and self._is_sole(above, session):
            above.pages += missing
            self.used_pages += missing
        else:
            above = self._create(stream, missing, above)
        for stream, pages in path[piece + 1 :]:
            above = self._create(stream, pages, above)
        return above

    def _is_sole(self, node: _Node, session: Hashable) -> bool:
        users = node.users
        return not users or (len(users) == 1 and session in users)

    def _create(self, stream: int, pages: int, above: _Node) -> _Node:
        self._n_made += 1
        node = _Node(self._n_made, stream, pages, above)
        above.children[stream] = node
        self._nodes[node.id] = node
        self.used_pages += pages
        self.order.discard(above.id)
        return node

    def _split(self, node: _Node, pages: int) -> _Node:
        """Cut a node after `pages`; the upper part is new and returned."""
        above = node.parent
        assert above is not None
        upper = self._create(node.stream, pages, above)
        self.used_pages -= pages
        upper.children[node.stream] = node
        upper.access_s, upper.tick = node.access_s, node.tick
        for user in node.users:
            self._use(upper, user)
        node.parent = upper
        node.pages -= pages
        if node.id in self.order:
            self.order.update(node.id, pages=node.pages)
        return upper

    def _touch(self, node: _Node, now_s: float) -> None:
        tick = self._tick
        while node is not self._root:
            node.access_s, node.tick = now_s, tick
            node = node.parent

    def _unlock(self, session: Hashable) -> None:
        node = self._running.pop(session, None)
        if node is not None:
            node.locks -= 1
            self._offer(node)

    def _offer(self, node: _Node) -> None:
        """Put a node in the order, if it is an unlocked leaf."""
        if node is self._root or node.children or node.locks or node is self._in_hand:
            return
        if node.id in self.order:
            return
        self.order.add(node.id, node.users, node.access_s, 0, node.pages, tick=node.tick)

    # -- users --------------------------------------------------------------------

    def _follow(self, session: Hashable, deepest: _Node) -> None:
        """The session's branch is this one now; the rest of its former one was left."""
        former = self._deepest.get(session)
        if former is deepest:
            return
        self._deepest[session] = deepest
        node = deepest
        while node is not self._root and session not in node.users:
            self._use(node, session)
            node = node.parent
        if former is None or former.tick == self._tick:
            return
        left = self.tracker.left_branches(session)
        node = former
        while node is not self._root and node.tick != self._tick:
            self._use(node, left)
            self._disuse(node, session)
            if node.id in self.order:
                self.order.add_user(node.id, left)
                self.order.remove_user(node.id, session)
            node = node.parent

    def _use(self, node: _Node, user: Hashable) -> None:
        if user not in node.users:
            node.users[user] = None
            self._n_nodes_of[user] = self._n_nodes_of.get(user, 0) + 1

    def _disuse(self, node: _Node, user: Hashable) -> None:
        del node.users[user]
        left = self._n_nodes_of[user] - 1
        if left:
            self._n_nodes_of[user] = left
        else:
            del self._n_nodes_of[user]

    # -- room ---------------------------------------------------------------------

    def _make_room(self, now_s: float) -> None:
        order, capacity = self.order, self.capacity_pages
        while self.used_pages > capacity:
            victim = order.peek(now_s, even_running=True)
            if victim is None:
                if not self._running:
                    return
                self._unlock(next(iter(self._running)))
                continue
            pages = min(victim.pages, self.used_pages - capacity)
            node = self._nodes[victim.node_id]
            self._shrink(node, pages)
            if node.pages:
                order.update(node.id, pages=node.pages)
                return
            order.take(node.id)
            self._offer(self._drop(node))

    def _cut(self, deepest: _Node) -> _Node:
        """Cut the tail of a request that is larger than the tier; returns its new end."""
        while deepest is not self._root and self.used_pages > self.capacity_pages:
            self._shrink(deepest, min(deepest.pages, self.used_pages - self.capacity_pages))
            if deepest.pages:
                break
            deepest = self._drop(deepest)
        return deepest

    def _shrink(self, node: _Node, pages: int) -> None:
        node.pages -= pages
        self.used_pages -= pages
        self.evicted_pages += pages

    def _drop(self, node: _Node) -> _Node:
        """Forget an empty leaf; its users' branches now end at what it hung below."""
        above = node.parent
        assert above is not None
        for user in list(node.users):
            self._disuse(node, user)
            if self._deepest.get(user) is node:
                if above is self._root:
                    del self._deepest[user]
                else:
                    self._deepest[user] = above
        del self._nodes[node.id]
        del above.children[node.stream]
        return above
