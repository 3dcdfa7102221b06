"""A shadow that is wrong never ends the scheduler: it is corrupted on purpose, in every way it
can be wrong, under traffic; the fault is counted, the shadow fits the core again or the core
goes on alone in its own order, and every request is served with the right KV.
"""

import random

import pytest

pytest.importorskip("sglang")

from sam.config import SamConfig
from sam.srt.mem_cache import shadow_follow
from sam.srt.mem_cache.ownership import path_up


def forget_a_node(tree, rng):
    node = rng.choice([n for n in tree.nodes.values() if n.parent and not n.children])
    tree.nodes.pop(node.id)
    node.parent.children.pop(node.id, None)


def forget_all(tree, rng):
    root = tree.root
    tree.nodes.clear()
    tree.nodes[root.id] = root
    root.children = {}


def invent_a_leaf(tree, rng):
    parent = rng.choice(list(tree.nodes.values()))
    leaf = tree.add_leaf(10**9 + rng.randrange(10**6), parent, 7, host=False)
    leaf.lat = 0
    tree.device_leaves.offer(leaf)


def invent_a_host_leaf(tree, rng):
    parent = rng.choice(list(tree.nodes.values()))
    leaf = tree.add_leaf(10**9 + rng.randrange(10**6), parent, 7, host=True)
    leaf.guard = None
    leaf.lat = 0
    tree.host_leaves.offer(leaf)


def swap_tiers(tree, rng):
    for node in list(tree.nodes.values()):
        if node.parent is not None and rng.random() < 0.5:
            node.device = not node.device
            tree.offer(node)


def forget_host_copies(tree, rng):
    for node in tree.nodes.values():
        node.backuped = False


def lose_guards(tree, rng):
    for node in tree.nodes.values():
        node.guard = None


def forget_locks(tree, rng):
    for node in tree.nodes.values():
        node.below = 0
        tree.offer(node)


def invent_locks(tree, rng):
    for node in tree.nodes.values():
        node.below += 1


def forget_segments(tree, rng):
    tree.segments.clear()


def move_a_node(tree, rng):
    nodes = [n for n in tree.nodes.values() if n.parent is not None]
    node, to = (rng.choice(nodes), rng.choice(nodes)) if nodes else (tree.root, tree.root)
    if node not in [*path_up(to), tree.root]:
        node.parent = to


def wrong_lengths(tree, rng):
    for node in tree.nodes.values():
        node.end += rng.randrange(3)


def wrong_child_counts(tree, rng):
    for node in tree.nodes.values():
        node.n_device = 0
        tree.offer(node)


def empty_queues(tree, rng):
    for node in tree.nodes.values():
        tree.device_leaves.discard(node.id)
        tree.host_leaves.discard(node.id)


def wrong_duplicates(tree, rng):
    tree.duplicates = dict.fromkeys([10**9, *tree.nodes])


FAULTS = [
    forget_a_node,
    forget_all,
    invent_a_leaf,
    invent_a_host_leaf,
    swap_tiers,
    forget_host_copies,
    lose_guards,
    forget_locks,
    invent_locks,
    forget_segments,
    move_a_node,
    wrong_lengths,
    wrong_child_counts,
    empty_queues,
    wrong_duplicates,
]
HARMLESS = {"move_a_node", "forget_a_node", "lose_guards", "invent_locks", "forget_segments"}
HARMLESS |= {"wrong_duplicates", "forget_locks"}
"""What a run may never come across: nothing asked for what is wrong."""


def traffic(rig, rng, n_ops, texts):
    """Sessions and plain requests, hints, host pressure; some requests stay running."""
    for _ in range(n_ops):
        op = rng.random()
        if op < 0.55 and len(rig.running) < 3:
            head = rng.choice(texts[-12:])[: rng.choice([0, 16, 40, 90])]
            ids = head + [rng.randrange(3) * 50 + i for i in range(rng.randrange(4, 30))]
            session = rng.choice([None, "a", "b", "c"])
            req = rig.queue(ids, session=session)
            if rig.admit(req):
                texts.append(rig.full_ids(req))
            else:
                rig.abort_queued(req)
        elif op < 0.75 and rig.running:
            rig.finish(rng.choice(list(rig.running.values())))
        elif op < 0.85:
            rig.hint(rng.choice(["demote", "prefetch", "evict"]), rng.choice("abc"))
        elif op < 0.9 and rig.cache.cache_controller is not None:
            rig.cache.evict_host(16)
        else:
            rig.step()


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_wrong_shadow_is_found_and_survived(make_shadow, fault, write_policy):
    rig = make_shadow(write_policy=write_policy, host_ratio=1.5, config=SamConfig())
    rng, texts = random.Random(fault.__name__ + write_policy), [[]]
    core = rig.cache.tree_core
    traffic(rig, rng, 60, texts)
    assert core.n_mismatches == 0 and core.ordering
    for _ in range(3):
        fault(core.shadow, rng)
        traffic(rig, rng, 60, texts)
    assert core.n_mismatches > 0 or fault.__name__ in HARMLESS
    for req in list(rig.running.values()):
        rig.finish(req)
    rig.flush()
    rig.cache.n_errors = 0
    n_before = core.n_mismatches
    traffic(rig, rng, 80, texts)
    for req in list(rig.running.values()):
        rig.finish(req)
    assert core.ordering and core.n_mismatches == n_before
    core.check_tags()


def test_after_one_rebuild_the_shadow_is_exact(make_shadow):
    rig = make_shadow(write_policy="write_through", host_ratio=1.5, config=SamConfig())
    rng, texts = random.Random(1), [[]]
    core = rig.cache.tree_core
    traffic(rig, rng, 80, texts)
    for req in list(rig.running.values()):
        rig.finish(req)
    for _ in range(4):
        rig.step()
    forget_a_node(core.shadow, rng)
    core._mismatch(shadow_follow.Mismatch("found out"))
    assert core.ordering
    core.check_tags()


def test_too_many_faults_leave_the_order_to_the_core(make_shadow, monkeypatch):
    """And a flush gives it back."""
    monkeypatch.setattr(shadow_follow, "MAX_REBUILDS", 0)
    rig = make_shadow(write_policy="write_through", host_ratio=1.5, config=SamConfig())
    rng, texts = random.Random(2), [[]]
    core = rig.cache.tree_core
    traffic(rig, rng, 80, texts)
    forget_all(core.shadow, rng)
    traffic(rig, rng, 200, texts)
    assert not core.ordering and core.n_mismatches >= 1
    assert core.find_node(core.root_node_handle()) is None and not len(core.tags)
    for req in list(rig.running.values()):
        rig.finish(req)
    rig.flush()
    traffic(rig, rng, 80, texts)
    assert core.ordering
    for req in list(rig.running.values()):
        rig.finish(req)
    core.check_tags()
