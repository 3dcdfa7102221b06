"""Ownership tags on tree nodes: which sessions' branches run through a node.

Owns the tags and, per node, the users of what lies at or below it; so a node's users are
known without a walk. Must never change the tree, nor decide what a user is worth: it is
told of splits and deletions, and tells `changed(node)` where users of a leaf may be
others. Nodes are anything with `id`, `parent` (None at the root) and identity.

A tag is anchored at the deepest node of one branch and counts on the whole path above. A
session has one current branch; a branch it left (compression, rollback) stays tagged as
superseded, so that an end frees it too. Moving a tag costs the nodes that it enters and
leaves.

Names of users, as retention orders know them: the session's key for its current branch,
`LeftBranches(key)` for those it left, `OffloadedTail(key)` for the end of its current one
where that was offloaded, and the `SessionRef` of one life for what nobody needs since that
life let go of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

import msgspec

from sam.core.sessions import SessionRef
from sam.core.tracker import LeftBranches, OffloadedTail

MAX_SUPERSEDED = 32


class Tag(msgspec.Struct, eq=False, gc=False):
    """One branch of one session. `user`: the name under which it counts."""

    ref: SessionRef
    anchor: Any
    user: Any


class Branches(msgspec.Struct, eq=False, gc=False):
    """The tags of one session: the current branch first, then left ones, oldest first."""

    current: Tag | None = None
    superseded: list[Tag] = []

    def tags(self) -> list[Tag]:
        return ([self.current] if self.current else []) + self.superseded


def path_up(node: Any) -> Iterator[Any]:
    """`node` and its ancestors, the root excluded."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


class OwnershipTags:
    """All tags of one tree.

    `changed(node)`: users of the node, and of what is above it, may be others.
    `on_left(ref)`: a branch is about to count as left. `on_freed(ref)`: nothing counts for
    this ended life any more.
    """

    changed: Callable[[Any], None] | None = None
    on_left: Callable[[SessionRef], None] | None = None
    on_freed: Callable[[SessionRef], None] | None = None

    def __init__(self) -> None:
        self._branches: dict[SessionRef, Branches] = {}
        self._anchored: dict[int, dict[Tag, None]] = {}
        self._users: dict[int, dict[Hashable, int]] = {}
        self._released: dict[int, SessionRef] = {}
        self._released_of: dict[SessionRef, dict[int, Any]] = {}

    # -- queries ------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._branches)

    def refs(self) -> list[SessionRef]:
        return list(self._branches)

    def current(self, ref: SessionRef) -> Any | None:
        """The deepest node of the session's current branch, or None if nothing is cached."""
        branches = self._branches.get(ref)
        return branches.current.anchor if branches and branches.current else None

    def branch_ends(self, ref: SessionRef) -> list[Any]:
        """The deepest node of each branch of the session, the current branch first."""
        branches = self._branches.get(ref)
        return [tag.anchor for tag in branches.tags()] if branches else []

    def users_of(self, node: Any) -> Collection[Hashable]:
        """Names of the users of what lies at or below the node; a dict or a tuple."""
        users = self._users.get(node.id)
        if users is not None:
            return users
        if self._released and (ref := self._released.get(node.id)) is not None:
            return (ref,)
        return ()

    def n_tags(self, node: Any) -> int:
        """Branches at or below the node."""
        return sum(self._users.get(node.id, {}).values())

    def is_owned(self, node: Any) -> bool:
        return node.id in self._users

    def branch_nodes(self, ref: SessionRef) -> list[Any]:
        """Nodes of all branches of the session, deeper before shallower, each once."""
        seen: dict[int, None] = {}
        nodes: list[tuple[int, Any]] = []
        branches = self._branches.get(ref)
        for tag in branches.tags() if branches else ():
            path = list(path_up(tag.anchor))
            for i, node in enumerate(path):
                if node.id not in seen:
                    seen[node.id] = None
                    nodes.append((len(path) - i, node))
        nodes.sort(key=lambda item: -item[0])
        return [node for _, node in nodes]

    def private_ids(self, ref: SessionRef) -> set[int]:
        """Ids of the nodes that only this session's branches use."""
        branches = self._branches.get(ref)
        own = {tag.user for tag in branches.tags()} if branches else set()
        nodes = self.branch_nodes(ref)
        return {node.id for node in nodes if own.issuperset(self._users[node.id])}

    def is_released(self, node: Any) -> bool:
        """Only ended sessions used the node, and nobody does now."""
        return node.id in self._released

    def released_by(self, node: Any) -> SessionRef | None:
        """The life that let go of the node, where nobody needs it since."""
        return self._released.get(node.id)

    def released_nodes(self, ref: SessionRef) -> list[Any]:
        """Nodes that nobody owns since this session let go of them, fragments of later
        splits included."""
        return list(self._released_of.get(ref, {}).values())

    # -- changes ------------------------------------------------------------------

    def set_branch(self, ref: SessionRef, leaf: Any, *, ended: bool = False) -> None:
        """Make root..`leaf` the session's current branch. The root means: nothing cached.

        `ended`: this life is over already, its last request still computed it.
        """
        branches = self._branches.get(ref)
        user = ref if ended else ref.key
        if branches is None:
            if leaf.parent is not None:
                self._branches[ref] = branches = Branches()
                branches.current = self._add(Tag(ref, leaf, user))
            return
        former = branches.current
        if former is not None and former.user == user:
            if former.anchor is leaf or self._extend(branches, former, leaf):
                return
        on_path = {node.id for node in path_up(leaf)}
        branches.current = self._add(Tag(ref, leaf, user)) if leaf.parent is not None else None
        for tag in [tag for tag in branches.superseded if tag.anchor.id in on_path]:
            branches.superseded.remove(tag)
            self._remove(tag)
        if former is not None:
            if former.anchor.id not in on_path:
                self._supersede(branches, former)
            self._remove(former)
        if not branches.tags():
            del self._branches[ref]

    def release(self, ref: SessionRef) -> list[Any]:
        """Drop all tags of the session; return the nodes nobody owns any more, deepest first.

        Those count for the ended life until somebody owns them again.
        """
        nodes = self.branch_nodes(ref)
        branches = self._branches.pop(ref, None)
        tags = branches.tags() if branches else []
        for tag in tags:
            self._remove(tag, quiet=True)
        free = [node for node in nodes if node.id not in self._users]
        for node in free:
            self._released[node.id] = ref
            self._released_of.setdefault(ref, {})[node.id] = node
        for tag in tags:
            self._notify(tag.anchor)
        self._check_freed(ref)
        return free

    def cut(self, ref: SessionRef, top: Any, ends: Collection[Any]) -> list[Any]:
        """Let go of what lies below `top` on the session's branches to `ends`; return the
        nodes nobody owns any more. They count for the life, as after `release`."""
        branches = self._branches.get(ref)
        if branches is None:
            return []
        nodes: dict[int, Any] = {}
        anchors = []
        for tag in branches.tags():
            below = self._below(top, tag.anchor) if tag.anchor in ends else None
            if not below:
                continue
            nodes.update((node.id, node) for node in below)
            anchors.append(tag.anchor)
            if tag is branches.current:
                kept = None if top.parent is None else self._add(Tag(ref, top, tag.user))
                branches.current = kept
            else:
                branches.superseded.remove(tag)
            self._remove(tag, quiet=True)
        free = [node for node in nodes.values() if node.id not in self._users]
        for node in free:
            self._released[node.id] = ref
            self._released_of.setdefault(ref, {})[node.id] = node
        if not branches.tags():
            del self._branches[ref]
        for anchor in anchors:
            self._notify(anchor)
        self._check_freed(ref)
        return free

    def split_tail(self, ref: SessionRef, top: Any) -> None:
        """What lies below `top` on the current branch counts as offloaded from now on."""
        branches = self._branches.get(ref)
        former = branches.current if branches is not None else None
        if former is None or not self._below(top, former.anchor):
            return
        self.rejoin(ref)
        former = branches.current
        tail = self._add(Tag(ref, former.anchor, OffloadedTail(ref.key)))
        branches.superseded.append(tail)
        kept = None if top.parent is None else self._add(Tag(ref, top, former.user))
        branches.current = kept
        self._remove(former)

    def rejoin(self, ref: SessionRef) -> None:
        """The offloaded tail of the current branch is wanted again."""
        branches = self._branches.get(ref)
        tail = OffloadedTail(ref.key)
        for tag in [t for t in branches.superseded if t.user == tail] if branches else ():
            current = branches.current
            if current is not None and not self._below(current.anchor, tag.anchor):
                continue
            branches.superseded.remove(tag)
            branches.current = self._add(Tag(ref, tag.anchor, ref.key))
            if current is not None:
                self._remove(current)
            self._remove(tag)

    def unrelease(self, nodes: Iterable[Any]) -> None:
        """Nodes that were to be freed are wanted again: back to plain order."""
        for node in nodes:
            self._unmark_released(node)

    # -- told by the tree ---------------------------------------------------------

    def on_split(self, upper: Any, lower: Any) -> None:
        """`lower` kept its id and lost its head to the new node `upper`."""
        users = self._users.get(lower.id)
        if users is not None:
            self._users[upper.id] = dict(users)
        ref = self._released.get(lower.id)
        if ref is not None:
            self._released[upper.id] = ref
            self._released_of[ref][upper.id] = upper

    def on_delete(self, node: Any) -> None:
        """A leaf is about to go: branches that ended there end at its parent."""
        if self._released:
            self._unmark_released(node, quiet=True)
        if self._users.pop(node.id, None) is None or node.id not in self._anchored:
            return
        parent = node.parent
        for tag in self._anchored.pop(node.id, ()):
            if parent.parent is None:
                self._forget(tag)
            else:
                tag.anchor = parent
                self._anchored.setdefault(parent.id, {})[tag] = None

    def clear(self) -> None:
        """The tree was reset."""
        refs = dict.fromkeys([*self._branches, *self._released_of])
        OwnershipTags.__init__(self)
        for ref in refs:
            self._check_freed(ref)

    # -- invariants ---------------------------------------------------------------

    def check(self, nodes: dict[int, Any]) -> None:
        """Raise AssertionError unless all counts follow from the tags. O(tags * depth)."""
        users: dict[int, dict[Hashable, int]] = {}
        for ref, branches in self._branches.items():
            assert branches.tags(), f"{ref} has no branch"
            for tag in branches.tags():
                assert nodes.get(tag.anchor.id) is tag.anchor, f"{ref} tags a dead node"
                assert tag in self._anchored[tag.anchor.id], f"{ref} tag is not indexed"
                for node in path_up(tag.anchor):
                    of_node = users.setdefault(node.id, {})
                    of_node[tag.user] = of_node.get(tag.user, 0) + 1
        assert users == self._users, f"tag counts drifted: {users} != {self._users}"
        n_indexed = sum(len(tags) for tags in self._anchored.values())
        assert n_indexed == sum(len(b.tags()) for b in self._branches.values())
        assert not [i for i in self._released if i not in nodes], "released node is dead"
        assert not self._released.keys() & users.keys(), "released node is owned"
        released = {i: ref for ref, of in self._released_of.items() for i in of}
        assert released == self._released and all(self._released_of.values())

    # -- inside -------------------------------------------------------------------

    def _extend(self, branches: Branches, tag: Tag, leaf: Any) -> bool:
        """The usual next turn: the branch grew. Touches the new nodes only."""
        anchor, new = tag.anchor, []
        node = leaf
        while node is not anchor:
            if node.parent is None:
                return False
            new.append(node)
            node = node.parent
        self._move(tag, leaf)
        for node in new:
            self._count(node, tag.user)
        if branches.superseded:
            on_path = {node.id for node in new}
            for old in [old for old in branches.superseded if old.anchor.id in on_path]:
                branches.superseded.remove(old)
                self._remove(old)
        self._notify(leaf)
        return True

    @staticmethod
    def _below(top: Any, end: Any) -> list[Any] | None:
        """Nodes from `end` up to below `top`, or None if `top` is not above `end`."""
        nodes = []
        node = end
        while node is not top:
            if node.parent is None:
                return None
            nodes.append(node)
            node = node.parent
        return nodes

    def _supersede(self, branches: Branches, former: Tag) -> None:
        """Keep the branch that `former` tagged, and at most `MAX_SUPERSEDED` such."""
        ref, user = former.ref, former.user
        if user != ref:
            user = LeftBranches(ref.key)
            if self.on_left is not None:
                self.on_left(ref)
        branches.superseded.append(self._add(Tag(ref, former.anchor, user)))
        if len(branches.superseded) > MAX_SUPERSEDED:
            self._remove(branches.superseded.pop(0))

    def _add(self, tag: Tag) -> Tag:
        self._anchored.setdefault(tag.anchor.id, {})[tag] = None
        for node in path_up(tag.anchor):
            self._count(node, tag.user)
        self._notify(tag.anchor)
        return tag

    def _count(self, node: Any, user: Hashable) -> None:
        users = self._users.setdefault(node.id, {})
        users[user] = users.get(user, 0) + 1
        if self._released:
            self._unmark_released(node, quiet=True)

    def _move(self, tag: Tag, anchor: Any) -> None:
        self._unanchor(tag)
        tag.anchor = anchor
        self._anchored.setdefault(anchor.id, {})[tag] = None

    def _unanchor(self, tag: Tag) -> None:
        anchored = self._anchored[tag.anchor.id]
        del anchored[tag]
        if not anchored:
            del self._anchored[tag.anchor.id]

    def _remove(self, tag: Tag, *, quiet: bool = False) -> None:
        self._unanchor(tag)
        for node in path_up(tag.anchor):
            users = self._users[node.id]
            if users[tag.user] > 1:
                users[tag.user] -= 1
            elif len(users) > 1:
                del users[tag.user]
            else:
                del self._users[node.id]
        if not quiet:
            self._notify(tag.anchor)

    def _unmark_released(self, node: Any, *, quiet: bool = False) -> None:
        ref = self._released.pop(node.id, None)
        if ref is None:
            return
        of_ref = self._released_of[ref]
        del of_ref[node.id]
        if not quiet:
            self._notify(node)
        if not of_ref:
            del self._released_of[ref]
            self._check_freed(ref)

    def _forget(self, tag: Tag) -> None:
        branches = self._branches[tag.ref]
        if branches.current is tag:
            branches.current = None
        else:
            branches.superseded.remove(tag)
        if not branches.tags():
            del self._branches[tag.ref]
            self._check_freed(tag.ref)

    def _check_freed(self, ref: SessionRef) -> None:
        freed = ref not in self._released_of and ref not in self._branches
        if freed and self.on_freed is not None:
            self.on_freed(ref)

    def _notify(self, node: Any) -> None:
        if self.changed is not None:
            self.changed(node)
