"""OwnershipTags on toy nodes: branches, splits, deletions, users; a machine against a recount."""

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sam.core.sessions import SessionKey, SessionRef
from sam.core.tracker import LeftBranches
from sam.srt.mem_cache.ownership import MAX_SUPERSEDED, OwnershipTags, path_up


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
    tree.tags.set_branch(ref("s"), c)
    assert [list(tree.tags.users_of(n)) for n in (a, b, c)] == [[ref("s").key]] * 3
    assert tree.tags.current(ref("s")) is c
    assert tree.tags.branch_nodes(ref("s")) == [c, b, a]
    assert tree.tags.private_ids(ref("s")) == {a.id, b.id, c.id}
    assert not tree.tags.is_owned(tree.add(c))


def test_the_root_means_nothing_cached(tree):
    (a,) = tree.chain(1)
    tree.tags.set_branch(ref("s"), tree.root)
    assert len(tree.tags) == 0 and tree.tags.current(ref("s")) is None
    tree.tags.set_branch(ref("s"), a)
    tree.tags.set_branch(ref("s"), tree.root)
    assert tree.tags.current(ref("s")) is None
    assert list(tree.tags.users_of(a)) == [LeftBranches(ref("s").key)]


def test_shared_nodes_are_nobodys_private_part(tree):
    shared = tree.add()
    left, right = tree.add(shared), tree.add(shared)
    tree.tags.set_branch(ref("l"), left)
    tree.tags.set_branch(ref("r"), right)
    assert tree.tags.n_tags(shared) == 2
    assert tree.tags.private_ids(ref("l")) == {left.id}
    assert list(tree.tags.users_of(shared)) == [ref("l").key, ref("r").key]
    assert tree.tags.release(ref("r")) == [right]
    assert list(tree.tags.users_of(shared)) == [ref("l").key]
    assert tree.tags.users_of(right) == (ref("r"),)


def test_growing_moves_the_branch_and_leaving_supersedes_it(tree):
    a, b = tree.chain(2)
    other = tree.add(a)
    tree.tags.set_branch(ref("s"), a)
    tree.tags.set_branch(ref("s"), b)
    assert tree.tags.n_tags(a) == 1
    tree.tags.set_branch(ref("s"), other)
    assert list(tree.tags.users_of(b)) == [LeftBranches(ref("s").key)]
    assert list(tree.tags.users_of(a)) == [ref("s").key, LeftBranches(ref("s").key)]
    assert tree.tags.branch_ends(ref("s")) == [other, b]
    assert tree.tags.private_ids(ref("s")) == {a.id, b.id, other.id}
    tree.tags.set_branch(ref("s"), b)
    assert tree.tags.branch_ends(ref("s")) == [b, other]
    assert [n.id for n in tree.tags.release(ref("s"))][-1] == a.id


def test_superseded_branches_are_bounded(tree):
    for _ in range(MAX_SUPERSEDED + 5):
        tree.tags.set_branch(ref("s"), tree.add())
    assert len(tree.tags.branch_ends(ref("s"))) == MAX_SUPERSEDED + 1
    assert sum(tree.tags.is_owned(n) for n in tree.nodes.values()) == MAX_SUPERSEDED + 1


def test_users_are_announced_before_they_count(tree):
    """`on_left` before a branch counts as left; `on_freed` when an ended life holds nothing."""
    told = []
    tree.tags.on_left = lambda ref: told.append(("left", ref))
    tree.tags.on_freed = lambda ref: told.append(("freed", ref))
    tree.tags.changed = lambda node: told.append(list(tree.tags.users_of(node)))
    old, new = tree.add(), tree.add()
    tree.tags.set_branch(ref("s"), old)
    tree.tags.set_branch(ref("s"), new)
    left = LeftBranches(ref("s").key)
    assert told.index(("left", ref("s"))) < told.index([ref("s").key, left])
    tree.tags.release(ref("s"))
    assert ("freed", ref("s")) not in told
    tree.delete(old)
    tree.tags.set_branch(ref("o"), new)
    assert told.count(("freed", ref("s"))) == 1


def test_what_an_ended_life_still_computes_counts_for_that_life(tree):
    (a,) = tree.chain(1)
    tree.tags.set_branch(ref("s", 2), a)
    tree.tags.set_branch(ref("s"), a, ended=True)
    assert list(tree.tags.users_of(a)) == [ref("s").key, ref("s")]
    assert tree.tags.release(ref("s")) == []
    assert list(tree.tags.users_of(a)) == [ref("s").key]


def test_split_keeps_both_halves_owned_or_released(tree):
    (a,) = tree.chain(1)
    tree.tags.set_branch(ref("s"), a)
    upper = tree.split(a)
    assert tree.tags.branch_nodes(ref("s")) == [a, upper]
    tree.tags.release(ref("s"))
    top = tree.split(upper)
    assert {n.id for n in tree.tags.released_nodes(ref("s"))} == {a.id, upper.id, top.id}
    assert tree.tags.users_of(top) == (ref("s"),)


def test_deletion_moves_the_anchor_up_and_forgets_at_the_root(tree):
    a, b, c = tree.chain(3)
    tree.tags.set_branch(ref("s"), c)
    tree.tags.set_branch(ref("o"), c)
    tree.delete(c)
    tree.delete(b)
    assert tree.tags.current(ref("s")) is a and tree.tags.n_tags(a) == 2
    tree.delete(a)
    assert len(tree.tags) == 0 and tree.tags.refs() == []


def test_unrelease_and_new_owners_end_the_ended_class(tree):
    a, b = tree.chain(2)
    tree.tags.set_branch(ref("s"), b)
    released = tree.tags.release(ref("s"))
    tree.tags.unrelease([released[0]])
    assert tree.tags.users_of(b) == ()
    tree.tags.set_branch(ref("s", 2), a)
    assert list(tree.tags.users_of(a)) == [ref("s").key]
    assert tree.tags.released_nodes(ref("s")) == []


def test_clear_forgets_everything(tree):
    tree.tags.set_branch(ref("s"), tree.chain(2)[-1])
    tree.tags.clear()
    assert len(tree.tags) == 0
    tree.nodes.clear()


PICK = st.integers(0, 30)
LIVE = [ref("a"), ref("b"), ref("c")]
REFS = st.sampled_from([*LIVE, ref("a", 9)])


class OwnershipMachine(RuleBasedStateMachine):
    """Against a naive recount: who is where is a plain list of (ref, node); `a` has an
    ended life that still computes."""

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
        moved = {r: parent if n is node else n for r, n in self.current.items()}
        self.current = {r: n for r, n in moved.items() if n is not self.tree.root}
        self.left = [(r, parent if n is node else n) for r, n in self.left]
        self.left = [x for x in self.left if not (at_root and x[1] is self.tree.root)]

    @precondition(lambda self: self.tree.nodes)
    @rule(r=REFS, pick=PICK)
    def set_branch(self, r, pick):
        leaf = self.pick(pick)
        self.tree.tags.set_branch(r, leaf, ended=r not in LIVE)
        former = self.current.get(r)
        on_path = list(path_up(leaf))
        if former is not leaf:
            self.left = [x for x in self.left if x[0] != r or x[1] not in on_path]
            if former is not None and former not in on_path:
                self.left.append((r, former))
                mine = [x for x in self.left if x[0] == r]
                if len(mine) > MAX_SUPERSEDED:
                    self.left.remove(mine[0])
        self.current[r] = leaf
        for node in on_path:
            self.released.pop(node.id, None)

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
        ends = [self.current[r]] if r in self.current else []
        ends += [n for owner, n in self.left if owner == r]
        return {n for end in ends for n in path_up(end)}

    def users(self, node):
        """[(ref, user name)] of all branches through the node."""
        tags = [(r, n, r.key if r in LIVE else r) for r, n in self.current.items()]
        tags += [(r, n, LeftBranches(r.key) if r in LIVE else r) for r, n in self.left]
        return [(r, user) for r, n, user in tags if node in path_up(n)]

    @invariant()
    def same_answers(self):
        tags = self.tree.tags
        self.tree.check()
        assert {r: tags.current(r) for r in self.current} == self.current
        for node in self.tree.nodes.values():
            users = self.users(node)
            assert tags.n_tags(node) == len(users)
            released = {self.released[node.id]} if node.id in self.released else set()
            assert set(tags.users_of(node)) == {user for _, user in users} | released
        for r in {*self.current, *(owner for owner, _ in self.left)}:
            private = {n.id for n in self.nodes_of(r) if {u for u, _ in self.users(n)} == {r}}
            assert tags.private_ids(r) == private
            assert set(tags.branch_nodes(r)) == self.nodes_of(r)


OwnershipMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, derandomize=True, deadline=None
)
TestOwnershipMachine = OwnershipMachine.TestCase
