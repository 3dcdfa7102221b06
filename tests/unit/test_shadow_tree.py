"""What the shadow has to get right by itself: recency that travels up, locks and loads, host
locks over splits, redundant host copies."""

import pytest

from sam.srt.mem_cache.ownership import OwnershipTags
from sam.srt.mem_cache.shadow_tree import (
    ShadowTree,
    create_orders,
    is_device_leaf,
    is_host_leaf,
)


@pytest.fixture
def tree():
    return ShadowTree(0, create_orders(OwnershipTags()))


def leaf(tree, node_id, parent=None, n_tokens=4, host=False):
    return tree.add_leaf(node_id, parent or tree.root, n_tokens, host=host)


def evicted(tree, node_id, parent):
    """A node that was on device and is on host only now."""
    node = leaf(tree, node_id, parent)
    tree.set_host(node, True)
    tree.lose_device(node)
    return node


def test_a_parent_inherits_the_last_walk_of_the_leaf_that_went(tree):
    parent = leaf(tree, 1)
    child = leaf(tree, 2, parent)
    other = leaf(tree, 3)
    tree.touch(child)
    tree.delete(child)
    assert [tree.device_leaves.pop(0.0) for _ in range(2)] == [other, parent]


def test_a_walk_to_a_host_node_refreshes_the_device_leaf_above(tree):
    top = leaf(tree, 1)
    tree.set_host(top, True)
    low = evicted(tree, 2, top)
    other = leaf(tree, 3)
    tree.touch(low)
    assert [tree.device_leaves.pop(0.0) for _ in range(2)] == [other, top]


def test_a_host_insert_touches_only_what_it_passed(tree):
    parent = leaf(tree, 1)
    child = leaf(tree, 2, parent)
    other = leaf(tree, 3)
    tree.touch_alone([child])
    assert tree.device_leaves.pop(0.0) is other
    tree.delete(child)
    fresh = leaf(tree, 4)
    assert [tree.device_leaves.pop(0.0) for _ in range(2)] == [parent, fresh]


def test_a_lock_on_a_host_node_holds_the_device_leaf_above_until_it_is_loaded(tree):
    top = leaf(tree, 1)
    tree.set_host(top, True)
    low = evicted(tree, 2, top)
    tree.lock(low)
    assert not is_device_leaf(top) and not is_host_leaf(low)
    tree.gain_device(low)
    assert (top.below, low.below) == (0, 1) and not is_device_leaf(low)
    tree.unlock(low)
    assert is_device_leaf(low) and tree.device_leaves.pop(0.0) is low


def test_a_split_shares_tiers_and_locks_as_the_core_does(tree):
    top = leaf(tree, 1)
    tree.set_host(top, True)
    low = evicted(tree, 2, top)
    tree.lock(low)
    upper = tree.split(9, low, top.end + 1, on_path=True)
    assert (upper.n_tokens, low.n_tokens) == (1, 3) and upper.backuped and not upper.device
    assert (top.below, upper.below, low.below) == (1, 1, 1)
    tree.unlock(low)
    assert (top.below, upper.below, low.below) == (0, 0, 0)
    assert tree.host_leaves.pop(0.0) is low and list(upper.children) == [2]


def test_a_host_lock_grows_over_heads_that_are_split_off(tree):
    node = leaf(tree, 1, host=True)
    tree.lock_host(node, "a")
    upper = tree.split(2, node, 2, on_path=True)
    top = tree.split(3, upper, 1, on_path=True)
    assert [n.host_locks for n in (top, upper, node)] == [1, 1, 1]
    tree.lock_host(node, "b")
    tree.unlock_host(node, "a")
    assert [n.host_locks for n in (top, upper, node)] == [0, 0, 1]
    tree.unlock_host(node, "b")
    assert tree.host_leaves.pop(0.0) is node and not tree.segments


def test_a_redundant_host_copy_keeps_its_turn_until_it_is_taken(tree):
    first, second = leaf(tree, 1), leaf(tree, 2)
    for node in (first, second):
        tree.set_host(node, True)
        tree.update_duplicate(node)
    tree.lose_device(first)
    tree.gain_device(first)
    tree.update_duplicate(first)
    assert list(tree.duplicates) == [1, 2]
    first.write_through_pending_id = 7
    tree.update_duplicate(first)
    assert list(tree.duplicates) == [2]


def test_a_dead_node_is_in_no_list(tree):
    node = leaf(tree, 1)
    tree.set_host(node, True)
    tree.update_duplicate(node)
    tree.delete(node)
    assert not tree.duplicates and not tree.root.children and list(tree.nodes) == [0]
    assert tree.device_leaves.pop(0.0) is None and not tree.root.n_device
