"""The order of leaves against a sort, in long random runs; memory stays in proportion."""

import random

import pytest

from sam.srt.mem_cache.shadow_queue import LeafQueue


class Node:
    def __init__(self, node_id):
        self.id, self.lat, self.cls, self.leaf = node_id, 0, 0, True


class Pair:
    """A queue and the plain set of what should be in it."""

    def __init__(self):
        self.nodes, self.clock, self.n_ids = {}, 0, 0
        self.queue = LeafQueue(self.nodes, 4, lambda n: n.leaf, lambda n: n.cls)

    def tick(self):
        self.clock += 1
        return self.clock

    def add(self, rng):
        node = Node(self.n_ids)
        self.n_ids += 1
        node.lat = self.tick() if rng.random() < 0.6 else rng.randrange(self.clock + 1)
        node.cls = rng.choice([0, 2, 2, 3])
        while any(n.lat == node.lat for n in self.nodes.values()):
            node.lat = self.tick()
        self.nodes[node.id] = node
        self.queue.offer(node)

    def first(self):
        leaves = [n for n in self.nodes.values() if n.leaf]
        return min(leaves, key=lambda n: (n.cls, n.lat), default=None)


@pytest.mark.parametrize("seed", range(8))
def test_the_queue_hands_out_what_a_sort_names(seed):
    pair, rng = Pair(), random.Random(seed)
    for _ in range(4_000):
        op, node = rng.random(), rng.choice(list(pair.nodes.values()) or [None])
        if node is None or op < 0.3 and len(pair.nodes) < 60:
            pair.add(rng)
        elif op < 0.5:
            node.lat = pair.tick()
            if node.leaf:
                pair.queue.touched(node)
        elif op < 0.6:
            node.cls = rng.randrange(4)
            pair.queue.offer(node)
        elif op < 0.7:
            node.leaf = not node.leaf  # locked: nobody tells; unlocked: it is offered
            pair.queue.offer(node)
        elif op < 0.75:
            pair.queue.forget(pair.nodes.pop(node.id))
        else:
            expected = pair.first()
            assert pair.queue.pop() is expected
            if expected is not None:
                del pair.nodes[expected.id]
    while pair.first() is not None:
        expected = pair.first()
        assert pair.queue.pop() is expected
        del pair.nodes[expected.id]
    assert pair.queue.pop() is None


def test_what_is_left_behind_does_not_pile_up():
    pair, rng = Pair(), random.Random(0)
    for _ in range(20):
        pair.add(rng)
    for i in range(20_000):
        node = pair.nodes[i % 20]
        node.cls = i % 4
        pair.queue.offer(node)
    assert len(pair.queue) == 20
    assert sum(len(heap) for heap in pair.queue._heaps) <= 4 * 80


def test_a_node_that_nobody_knows_any_more_is_passed_over():
    pair = Pair()
    rng = random.Random(1)
    pair.add(rng)
    pair.add(rng)
    first = pair.first()
    del pair.nodes[first.id]
    assert pair.queue.pop() is pair.first()
