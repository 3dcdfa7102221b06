"""Ownership tags on tree nodes: which sessions' branches run through a node.

Owns the tags and, per node, how many of them lie at or below it, by retention class; so a
node's class is known without a walk. Must never change the tree: it is told of splits and
deletions. Nodes are anything with `id`, `parent` (None at the root) and identity.

A tag is anchored at the deepest node of one branch and counts on the whole path above. A
session has one current branch; a branch it left (compression, rollback) stays tagged as
superseded, so that an end frees it too. Moving or re-classing a tag is O(depth).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sam.core.retention import RetentionClass
from sam.core.sessions import SessionRef

_N_CLASSES = max(RetentionClass) + 1
MAX_SUPERSEDED = 32


class Tag:
    """One branch of one session. `cls` is the retention class it counts as."""

    __slots__ = ("anchor", "cls", "ref")

    def __init__(self, ref: SessionRef, anchor: Any, cls: int) -> None:
        self.ref = ref
        self.anchor = anchor
        self.cls = cls


class Branches:
    """The tags of one session: the current branch first, then left ones, oldest first."""

    __slots__ = ("cls", "current", "superseded")

    def __init__(self, cls: int) -> None:
        self.cls = cls
        self.current: Tag | None = None
        self.superseded: list[Tag] = []

    def tags(self) -> list[Tag]:
        return ([self.current] if self.current else []) + self.superseded


def path_up(node: Any) -> Iterator[Any]:
    """`node` and its ancestors, the root excluded."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


class OwnershipTags:
    """All tags of one tree."""

    def __init__(self) -> None:
        self._branches: dict[SessionRef, Branches] = {}
        self._anchored: dict[int, dict[Tag, None]] = {}
        self._counts: dict[int, list[int]] = {}
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

    def n_tags(self, node: Any) -> int:
        """Branches at or below the node."""
        return sum(self._counts.get(node.id, ()))

    def is_owned(self, node: Any) -> bool:
        return node.id in self._counts

    def retention_class(self, node: Any, host_backed: bool) -> int:
        """Class of the user who needs the node soonest; PLAIN for a node nobody owns."""
        counts = self._counts.get(node.id)
        if counts is None:
            return RetentionClass.ENDED if node.id in self._released else RetentionClass.PLAIN
        for cls in range(_N_CLASSES - 1, -1, -1):
            if counts[cls]:
                offloaded_unbacked = cls == RetentionClass.OFFLOADED and not host_backed
                return RetentionClass.PLAIN if offloaded_unbacked else cls
        return RetentionClass.PLAIN

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
        own: dict[int, int] = {}
        branches = self._branches.get(ref)
        for tag in branches.tags() if branches else ():
            for node in path_up(tag.anchor):
                own[node.id] = own.get(node.id, 0) + 1
        return {i for i, n in own.items() if n == sum(self._counts[i])}

    def is_released(self, node: Any) -> bool:
        """Only ended sessions used the node, and nobody does now."""
        return node.id in self._released

    def released_nodes(self, ref: SessionRef) -> list[Any]:
        """Nodes that nobody owns since this session let go of them, fragments of later
        splits included."""
        return list(self._released_of.get(ref, {}).values())

    # -- changes ------------------------------------------------------------------

    def set_branch(self, ref: SessionRef, leaf: Any, cls: int) -> None:
        """Make root..`leaf` the session's current branch. The root means: nothing cached."""
        branches = self._branches.setdefault(ref, Branches(cls))
        branches.cls = cls
        former = branches.current
        if former is not None and former.anchor is leaf:
            self.set_class(ref, cls)
            return
        on_path = {node.id for node in path_up(leaf)}
        branches.current = self._add(Tag(ref, leaf, cls)) if leaf.parent is not None else None
        for tag in list(branches.superseded):
            if tag.anchor.id in on_path:
                branches.superseded.remove(tag)
                self._remove(tag)
        if former is not None:
            self._remove(former)
            if former.anchor.id not in on_path:
                self._supersede(branches, former)
        if not branches.tags():
            del self._branches[ref]

    def set_class(self, ref: SessionRef, cls: int) -> None:
        """The session's state changed: its current branch counts as `cls` from now on."""
        branches = self._branches.get(ref)
        if branches is None:
            return
        branches.cls = cls
        tag = branches.current
        if tag is None or tag.cls == cls:
            return
        for node in path_up(tag.anchor):
            counts = self._counts[node.id]
            counts[tag.cls] -= 1
            counts[cls] += 1
        tag.cls = cls

    def release(self, ref: SessionRef) -> list[Any]:
        """Drop all tags of the session; return the nodes nobody owns any more, deepest first.

        Those count as ENDED until somebody owns them again.
        """
        nodes = self.branch_nodes(ref)
        branches = self._branches.pop(ref, None)
        for tag in branches.tags() if branches else ():
            self._remove(tag)
        free = [node for node in nodes if node.id not in self._counts]
        for node in free:
            self._mark_released(ref, node)
        return free

    def unrelease(self, nodes: Iterable[Any]) -> None:
        """Nodes that were to be freed are wanted again: back to plain order."""
        for node in nodes:
            self._unmark_released(node)

    # -- told by the tree ---------------------------------------------------------

    def on_split(self, upper: Any, lower: Any) -> None:
        """`lower` kept its id and lost its head to the new node `upper`."""
        counts = self._counts.get(lower.id)
        if counts is not None:
            self._counts[upper.id] = list(counts)
        ref = self._released.get(lower.id)
        if ref is not None:
            self._mark_released(ref, upper)

    def on_delete(self, node: Any) -> None:
        """A leaf is about to go: branches that ended there end at its parent."""
        self._unmark_released(node)
        self._counts.pop(node.id, None)
        parent = node.parent
        for tag in self._anchored.pop(node.id, ()):
            if parent.parent is None:
                self._forget(tag)
            else:
                tag.anchor = parent
                self._anchored.setdefault(parent.id, {})[tag] = None

    def clear(self) -> None:
        """The tree was reset."""
        self.__init__()

    # -- invariants ---------------------------------------------------------------

    def check(self, nodes: dict[int, Any]) -> None:
        """Raise AssertionError unless all counts follow from the tags. O(tags * depth)."""
        counts: dict[int, list[int]] = {}
        for ref, branches in self._branches.items():
            assert branches.tags(), f"{ref} has no branch"
            for tag in branches.tags():
                assert nodes.get(tag.anchor.id) is tag.anchor, f"{ref} tags a dead node"
                assert tag in self._anchored[tag.anchor.id], f"{ref} tag is not indexed"
                for node in path_up(tag.anchor):
                    counts.setdefault(node.id, [0] * _N_CLASSES)[tag.cls] += 1
        assert counts == self._counts, f"tag counts drifted: {counts} != {self._counts}"
        n_indexed = sum(len(tags) for tags in self._anchored.values())
        assert n_indexed == sum(len(b.tags()) for b in self._branches.values())
        assert not [i for i in self._released if i not in nodes], "released node is dead"
        assert not self._released.keys() & counts.keys(), "released node is owned"
        released = {i: ref for ref, of in self._released_of.items() for i in of}
        assert released == self._released and all(self._released_of.values())

    # -- inside -------------------------------------------------------------------

    def _mark_released(self, ref: SessionRef, node: Any) -> None:
        self._released[node.id] = ref
        self._released_of.setdefault(ref, {})[node.id] = node

    def _unmark_released(self, node: Any) -> None:
        ref = self._released.pop(node.id, None)
        if ref is not None:
            of_ref = self._released_of[ref]
            del of_ref[node.id]
            if not of_ref:
                del self._released_of[ref]

    def _supersede(self, branches: Branches, former: Tag) -> None:
        branches.superseded.append(
            self._add(Tag(former.ref, former.anchor, RetentionClass.SUPERSEDED))
        )
        if len(branches.superseded) > MAX_SUPERSEDED:
            self._remove(branches.superseded.pop(0))

    def _add(self, tag: Tag) -> Tag:
        self._anchored.setdefault(tag.anchor.id, {})[tag] = None
        for node in path_up(tag.anchor):
            self._counts.setdefault(node.id, [0] * _N_CLASSES)[tag.cls] += 1
            self._unmark_released(node)
        return tag

    def _remove(self, tag: Tag) -> None:
        anchored = self._anchored[tag.anchor.id]
        del anchored[tag]
        if not anchored:
            del self._anchored[tag.anchor.id]
        for node in path_up(tag.anchor):
            counts = self._counts[node.id]
            counts[tag.cls] -= 1
            if not any(counts):
                del self._counts[node.id]

    def _forget(self, tag: Tag) -> None:
        branches = self._branches[tag.ref]
        if branches.current is tag:
            branches.current = None
        else:
            branches.superseded.remove(tag)
        if not branches.tags():
            del self._branches[tag.ref]
