"""OwnershipTags on toy nodes: branches, splits, deletions, classes; a machine against a recount."""

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sam.core.retention import RetentionClass
from sam.core.sessions import SessionKey, SessionRef
from sam.srt.mem_cache.ownership import MAX_SUPERSEDED, OwnershipTags, path_up

PLAIN, RUNNING = RetentionClass.PLAIN, RetentionClass.RUNNING
OFFLOADED, ENDED = RetentionClass.OFFLOADED, RetentionClass.ENDED
SUPERSEDED = RetentionClass.SUPERSEDED


class Node:
    count = 0

    def __init__(self, parent=None):
        Node.count += 1
        self.id, self.parent, self.children = Node.count, parent, []
        if parent is not None:
            parent.children.append(self)


class Tree:
    """A tree that tells the tags what it does, as the tree core does."""

    def __init__(self):
        self.tags, self.root = OwnershipTags(), Node()
        self.nodes = {}

    def add(self, parent=None):
        node = Node(parent or self.root)
        self.nodes[node.id] = node
        return node

    def chain(self, n, parent=None):
        nodes = []
        for _ in range(n):
            parent = self.add(parent)
            nodes.append(parent)
        return nodes

    def split(self, lower):
        """A new node above `lower`, which keeps its id."""
        upper = Node()
        upper.parent, upper.children = lower.parent, [lower]
        siblings = lower.parent.children
        siblings[siblings.index(lower)] = upper
        lower.parent = upper
        self.nodes[upper.id] = upper
        self.tags.on_split(upper, lower)
        return upper

    def delete(self, leaf):
        self.tags.on_delete(leaf)
        leaf.parent.children.remove(leaf)
        del self.nodes[leaf.id]

    def check(self):
        self.tags.check(self.nodes)


def ref(name, generation=1):
    return SessionRef(SessionKey("t", name), generation)


@pytest.fixture
def tree():
    tree = Tree()
    yield tree
    tree.check()


def test_a_branch_counts_on_its_whole_path(tree):
    a, b, c = tree.chain(3)
    tree.tags.set_branch(ref("s"), c, RUNNING)
    assert [tree.tags.retention_class(n, True) for n in (a, b, c)] == [RUNNING] * 3
    assert tree.tags.current(ref("s")) is c
    assert tree.tags.branch_nodes(ref("s")) == [c, b, a]
    assert tree.tags.private_ids(ref("s")) == {a.id, b.id, c.id}
    assert not tree.tags.is_owned(tree.add(c))


def test_the_root_means_nothing_cached(tree):
    (a,) = tree.chain(1)
    tree.tags.set_branch(ref("s"), tree.root, RUNNING)
    assert len(tree.tags) == 0 and tree.tags.current(ref("s")) is None
    tree.tags.set_branch(ref("s"), a, RUNNING)
    tree.tags.set_branch(ref("s"), tree.root, RUNNING)
    assert tree.tags.current(ref("s")) is None
    assert tree.tags.retention_class(a, True) == SUPERSEDED


def test_shared_nodes_are_nobodys_private_part(tree):
    shared = tree.add()
    left, right = tree.add(shared), tree.add(shared)
    tree.tags.set_branch(ref("l"), left, PLAIN)
    tree.tags.set_branch(ref("r"), right, RUNNING)
    assert tree.tags.n_tags(shared) == 2
    assert tree.tags.private_ids(ref("l")) == {left.id}
    assert tree.tags.retention_class(shared, True) == RUNNING
    assert tree.tags.release(ref("r")) == [right]
    assert tree.tags.retention_class(shared, True) == PLAIN
    assert tree.tags.retention_class(right, True) == ENDED


def test_growing_moves_the_branch_and_leaving_supersedes_it(tree):
    a, b = tree.chain(2)
    other = tree.add(a)
    tree.tags.set_branch(ref("s"), a, PLAIN)
    tree.tags.set_branch(ref("s"), b, PLAIN)
    assert tree.tags.n_tags(a) == 1
    tree.tags.set_branch(ref("s"), other, PLAIN)
    assert tree.tags.retention_class(b, True) == SUPERSEDED
    assert tree.tags.retention_class(a, True) == PLAIN
    assert tree.tags.branch_ends(ref("s")) == [other, b]
    assert tree.tags.private_ids(ref("s")) == {a.id, b.id, other.id}
    tree.tags.set_branch(ref("s"), b, PLAIN)
    assert tree.tags.branch_ends(ref("s")) == [b, other]
    assert [n.id for n in tree.tags.release(ref("s"))][-1] == a.id


def test_superseded_branches_are_bounded(tree):
    for _ in range(MAX_SUPERSEDED + 5):
        tree.tags.set_branch(ref("s"), tree.add(), PLAIN)
    assert len(tree.tags.branch_ends(ref("s"))) == MAX_SUPERSEDED + 1
    assert sum(tree.tags.is_owned(n) for n in tree.nodes.values()) == MAX_SUPERSEDED + 1


def test_class_changes_reach_the_current_branch_only(tree):
    old, new = tree.add(), tree.add()
    tree.tags.set_branch(ref("s"), old, PLAIN)
    tree.tags.set_branch(ref("s"), new, PLAIN)
    tree.tags.set_class(ref("s"), OFFLOADED)
    assert tree.tags.retention_class(new, True) == OFFLOADED
    assert tree.tags.retention_class(new, False) == PLAIN
    assert tree.tags.retention_class(old, True) == SUPERSEDED
    tree.tags.set_class(ref("unknown"), RUNNING)


def test_split_keeps_both_halves_owned_or_released(tree):
    (a,) = tree.chain(1)
    tree.tags.set_branch(ref("s"), a, PLAIN)
    upper = tree.split(a)
    assert tree.tags.branch_nodes(ref("s")) == [a, upper]
    tree.tags.release(ref("s"))
    top = tree.split(upper)
    assert {n.id for n in tree.tags.released_nodes(ref("s"))} == {a.id, upper.id, top.id}
    assert tree.tags.retention_class(top, True) == ENDED


def test_deletion_moves_the_anchor_up_and_forgets_at_the_root(tree):
    a, b, c = tree.chain(3)
    tree.tags.set_branch(ref("s"), c, PLAIN)
    tree.tags.set_branch(ref("o"), c, RUNNING)
    tree.delete(c)
    tree.delete(b)
    assert tree.tags.current(ref("s")) is a and tree.tags.n_tags(a) == 2
    tree.delete(a)
    assert len(tree.tags) == 0 and tree.tags.refs() == []


def test_unrelease_and_new_owners_end_the_ended_class(tree):
    a, b = tree.chain(2)
    tree.tags.set_branch(ref("s"), b, PLAIN)
    released = tree.tags.release(ref("s"))
    tree.tags.unrelease([released[0]])
    assert tree.tags.retention_class(b, True) == PLAIN
    tree.tags.set_branch(ref("s", 2), a, RUNNING)
    assert tree.tags.retention_class(a, True) == RUNNING
    assert tree.tags.released_nodes(ref("s")) == []


def test_clear_forgets_everything(tree):
    tree.tags.set_branch(ref("s"), tree.chain(2)[-1], PLAIN)
    tree.tags.clear()
    assert len(tree.tags) == 0
    tree.nodes.clear()


PICK = st.integers(0, 30)
REFS = st.sampled_from([ref("a"), ref("b"), ref("c"), ref("a", 2)])
CLASSES = st.sampled_from([PLAIN, RUNNING, OFFLOADED])


class OwnershipMachine(RuleBasedStateMachine):
    """Against a naive recount: who is where is a plain list of (ref, node, class)."""

    def __init__(self):
        super().__init__()
        self.tree = Tree()
        self.current, self.left, self.released = {}, [], {}

    def pick(self, pick):
        nodes = list(self.tree.nodes.values())
        return nodes[pick % len(nodes)]

    @rule(pick=PICK, at_root=st.booleans())
    def grow(self, pick, at_root):
        self.tree.add(None if at_root or not self.tree.nodes else self.pick(pick))

    @precondition(lambda self: self.tree.nodes)
    @rule(pick=PICK)
    def split(self, pick):
        lower = self.pick(pick)
        upper = self.tree.split(lower)
        if lower.id in self.released:
            self.released[upper.id] = self.released[lower.id]

    @precondition(lambda self: self.tree.nodes)
    @rule(pick=PICK)
    def delete(self, pick):
        node = self.pick(pick)
        if node.children:
            return
        parent = node.parent
        self.tree.delete(node)
        self.released.pop(node.id, None)
        at_root = parent is self.tree.root
        moved = {r: (parent if n is node else n, c) for r, (n, c) in self.current.items()}
        self.current = {r: (n, c) for r, (n, c) in moved.items() if n is not self.tree.root}
        self.left = [(r, parent if n is node else n) for r, n in self.left]
        self.left = [x for x in self.left if not (at_root and x[1] is self.tree.root)]

    @precondition(lambda self: self.tree.nodes)
    @rule(r=REFS, pick=PICK, cls=CLASSES)
    def set_branch(self, r, pick, cls):
        leaf = self.pick(pick)
        self.tree.tags.set_branch(r, leaf, cls)
        former = self.current.get(r, (None, None))[0]
        on_path = list(path_up(leaf))
        if former is not leaf:
            self.left = [x for x in self.left if x[0] != r or x[1] not in on_path]
            if former is not None and former not in on_path:
                self.left.append((r, former))
                mine = [x for x in self.left if x[0] == r]
                if len(mine) > MAX_SUPERSEDED:
                    self.left.remove(mine[0])
        self.current[r] = (leaf, cls)
        for node in on_path:
            self.released.pop(node.id, None)

    @rule(r=REFS, cls=CLASSES)
    def set_class(self, r, cls):
        self.tree.tags.set_class(r, cls)
        if r in self.current:
            self.current[r] = (self.current[r][0], cls)

    @rule(r=REFS)
    def release(self, r):
        nodes = set(self.nodes_of(r))
        freed = self.tree.tags.release(r)
        self.current.pop(r, None)
        self.left = [x for x in self.left if x[0] != r]
        expected = {n for n in nodes if not self.users(n)}
        assert set(freed) == expected and len(freed) == len(expected)
        self.released |= {n.id: r for n in expected}

    def nodes_of(self, r):
        ends = [self.current[r][0]] if r in self.current else []
        ends += [n for owner, n in self.left if owner == r]
        return {n for end in ends for n in path_up(end)}

    def users(self, node):
        """[(ref, class)] of all branches through the node."""
        tags = [(r, n, c) for r, (n, c) in self.current.items()]
        tags += [(r, n, SUPERSEDED) for r, n in self.left]
        return [(r, c) for r, n, c in tags if node in path_up(n)]

    @invariant()
    def same_answers(self):
        tags = self.tree.tags
        self.tree.check()
        assert {r: tags.current(r) for r in self.current} == {
            r: n for r, (n, _) in self.current.items()
        }
        for node in self.tree.nodes.values():
            users = self.users(node)
            assert tags.n_tags(node) == len(users)
            for backed in (True, False):
                assert tags.retention_class(node, backed) == self.class_of(node, users, backed)
        for r in {*self.current, *(owner for owner, _ in self.left)}:
            private = {n.id for n in self.nodes_of(r) if {u for u, _ in self.users(n)} == {r}}
            assert tags.private_ids(r) == private
            assert set(tags.branch_nodes(r)) == self.nodes_of(r)

    def class_of(self, node, users, backed):
        if not users:
            return ENDED if node.id in self.released else PLAIN
        best = max(c for _, c in users)
        return PLAIN if best == OFFLOADED and not backed else best


OwnershipMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, derandomize=True, deadline=None
)
TestOwnershipMachine = OwnershipMachine.TestCase
