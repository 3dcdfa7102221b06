"""The orders by next use, LRU and session-ref against an oracle that sorts all keys anew.

Times, gaps and hints are such that all keys are exact in floating point: the oracle
computes by definition, the orders by shelf.
"""

import os
import random

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sam.core.order import EvictionOrder
from sam.core.retention import NextUseRank as R
from sam.core.retention import Standing

USERS = ["a", "b", "c", "d", "e"]
RANKS = [R.RUNNING, R.QUEUED, R.IDLE, R.IDLE, R.IDLE, R.OFFLOADED, R.SUPERSEDED, R.ENDED]
STEPS_S = [0.0, 0.0, 0.25, 1.0, 1.0, 2.0, 3.0, 4.0, 8.0, 40.0]
GAPS_S = [1.0, 2.0, 2.0, 4.0, 10.0, 100.0]
HINTS_S = [None, None, 0.0, 1.0, 3.0, 4.0, 6.0, 12.0, 60.0]
PLAIN_GAP_S = 4.0


class Oracle:
    """The same leaves and users in plain dicts; every question answered by sorting."""

    def __init__(self):
        self.leaves, self.users, self.serials = {}, {}, {}
        self.drained, self.trust, self.use_lru = None, True, False

    def key(self, user, backed, now):
        """(rank, R) by the words of the policy."""
        rank, since, gap, hint = self.users[user]
        age = now - since
        if rank == R.ENDED and self.trust:
            return (5, age)
        if rank == R.SUPERSEDED:
            return (4, 0.0)
        if rank == R.QUEUED:
            return (1, -age)
        if rank == R.RUNNING:
            return (0, 0.0)
        early = rank == R.OFFLOADED and backed
        soon = age + gap if hint is None else max(hint - age, age / 2) + 1
        return (3 if early else 2, soon)

    def binding(self, leaf, now):
        keys = [(self.key(u, leaf["backed"], now), self.serials[u], u) for u in leaf["users"]]
        if not keys:
            return (2, now - leaf["access"][0] + PLAIN_GAP_S), None
        key, _, user = min(keys)
        return key, user

    def victim(self, now, even_running=False):
        """(node id, key, user) of the leaf to go, or None."""
        ranked = []
        for node_id, leaf in self.leaves.items():
            key, user = self.binding(leaf, now)
            if key[0] == R.RUNNING and not even_running and not self.use_lru:
                continue
            ties = (leaf["access"], user is None or user != self.drained)
            first = (0, 0) if self.use_lru else (-key[0], -key[1])
            ties = (ties[0], False) if self.use_lru else ties
            ranked.append((first, ties, -leaf["depth"], node_id, key, user))
        return min(ranked, key=lambda r: r[:4])[3:] if ranked else None

    def lru_victim(self):
        order = [(x["access"], -x["depth"], i) for i, x in self.leaves.items()]
        return min(order)[2] if order else None

    def ref_victim(self):
        def refs(leaf):
            return len([u for u in leaf["users"] if self.users[u][0] != R.ENDED])

        order = [(refs(x), x["access"], -x["depth"], i) for i, x in self.leaves.items()]
        return min(order)[3] if order else None


class Twins:
    """The three orders and the oracle, told the same; every victim is compared."""

    def __init__(self):
        self.orders = [EvictionOrder(name) for name in ("next-use", "lru", "session-ref")]
        self.next_use = self.orders[0]
        self.next_use.queue.plain_gap_s = PLAIN_GAP_S
        self.oracle = Oracle()
        self.now, self.n_nodes, self.n_serials = 100.0, 0, 0

    def each(self, call, *args, **kwargs):
        for order in self.orders:
            getattr(order, call)(*args, **kwargs)

    def some(self, i):
        return sorted(self.oracle.leaves)[i % len(self.oracle.leaves)]

    def set_user(self, user, rank, ago_s, gap_s, hint_s):
        values = (rank, self.now - ago_s, gap_s, hint_s)
        if user not in self.oracle.users:
            self.n_serials += 1
            self.oracle.serials[user] = self.n_serials
        self.oracle.users[user] = values
        self.each("set_user", user, Standing(*values))

    def drop_user(self, user):
        self.each("drop_user", user)
        if self.oracle.users.pop(user, None):
            for leaf in self.oracle.leaves.values():
                leaf["users"] = [u for u in leaf["users"] if u != user]
            if self.oracle.drained == user:
                self.oracle.drained = None

    def add(self, users, ago_s, tick, depth, backed):
        users = [u for u in dict.fromkeys(users) if u in self.oracle.users]
        self.n_nodes += 1
        access = (self.now - ago_s, tick)
        leaf = {"users": users, "access": access, "depth": depth, "backed": backed}
        self.oracle.leaves[self.n_nodes] = leaf
        rest = {"tick": tick, "backed": backed}
        self.each("add", self.n_nodes, users, access[0], depth, self.n_nodes, **rest)

    def touch(self, i, ago_s, tick):
        node_id = self.some(i)
        self.oracle.leaves[node_id]["access"] = (self.now - ago_s, tick)
        self.each("touch", node_id, self.now - ago_s, tick)

    def update(self, i, depth, backed):
        node_id = self.some(i)
        self.oracle.leaves[node_id] |= {"depth": depth, "backed": backed}
        self.each("update", node_id, depth=depth, backed=backed)

    def change_users(self, i, user, add):
        node_id = self.some(i)
        users = self.oracle.leaves[node_id]["users"]
        if user not in self.oracle.users:
            return
        self.each("add_user" if add else "remove_user", node_id, user)
        if add and user not in users:
            users.append(user)
        elif not add and user in users:
            users.remove(user)

    def remove(self, i):
        node_id = self.some(i)
        del self.oracle.leaves[node_id]
        self.each("remove", node_id)

    def wait(self, step_s):
        self.now += step_s

    def brake(self, trust, use_lru):
        self.oracle.trust = self.next_use.trust_ends = trust
        self.oracle.use_lru = self.next_use.use_lru = use_lru

    def evict(self, n, even_running):
        for _ in range(n):
            expected = self.oracle.victim(self.now, even_running)
            victim = self.next_use.pop_victim(self.now, even_running=even_running)
            if expected is None:
                assert victim is None
                return
            node_id, key, user = expected
            assert victim.node_id == node_id == victim.pages
            assert self.oracle.use_lru or victim.key == key
            del self.oracle.leaves[node_id]
            for order in self.orders[1:]:
                order.remove(node_id)
            self.oracle.drained = None if self.oracle.use_lru else user

    def check(self):
        expected = self.oracle.victim(self.now)
        victim = self.next_use.peek(self.now)
        assert (victim and victim.node_id) == (expected and expected[0])
        for order, name in zip(self.orders[1:], ("lru_victim", "ref_victim"), strict=True):
            victim = order.peek(self.now)
            assert (victim and victim.node_id) == getattr(self.oracle, name)()

    def finish(self):
        """What is left goes in the right order, and nothing stays on a shelf."""
        self.evict(10_000, True)
        assert not self.oracle.leaves
        order = self.next_use.queue
        bands = [*order._offloaded.shelves, *order._idle.shelves]
        shelves = [order._ended, order._superseded, order._queued, order._running]
        assert not any(map(len, [*bands, *shelves, order._plain, order._owned]))
        assert not order._filed and all(not user.filed for user in order._users.values())
        assert not any(map(len, self.orders))
        assert not any(len(order.queue) for order in self.orders)


class RetentionMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.twins = Twins()

    def has_leaves(self):
        return bool(self.twins.oracle.leaves)

    @initialize(many=st.booleans())
    def start(self, many):
        for user in USERS if many else USERS[:1]:
            self.twins.set_user(user, R.IDLE, 0.0, 10.0, None)

    @rule(
        user=st.sampled_from(USERS),
        rank=st.sampled_from(RANKS),
        ago_s=st.sampled_from(STEPS_S),
        gap_s=st.sampled_from(GAPS_S),
        hint_s=st.sampled_from(HINTS_S),
    )
    def set_user(self, user, rank, ago_s, gap_s, hint_s):
        self.twins.set_user(user, rank, ago_s, gap_s, hint_s)

    @rule(user=st.sampled_from(USERS))
    def drop_user(self, user):
        self.twins.drop_user(user)

    @rule(
        users=st.lists(st.sampled_from(USERS), max_size=3),
        ago_s=st.sampled_from(STEPS_S),
        tick=st.integers(0, 1),
        depth=st.integers(1, 3),
        backed=st.booleans(),
    )
    def add(self, users, ago_s, tick, depth, backed):
        self.twins.add(users, ago_s, tick, depth, backed)

    @precondition(has_leaves)
    @rule(i=st.integers(0, 99), ago_s=st.sampled_from(STEPS_S), tick=st.integers(0, 1))
    def touch(self, i, ago_s, tick):
        self.twins.touch(i, ago_s, tick)

    @precondition(has_leaves)
    @rule(i=st.integers(0, 99), depth=st.integers(1, 3), backed=st.booleans())
    def update(self, i, depth, backed):
        self.twins.update(i, depth, backed)

    @precondition(has_leaves)
    @rule(i=st.integers(0, 99), user=st.sampled_from(USERS), add=st.booleans())
    def change_users(self, i, user, add):
        self.twins.change_users(i, user, add)

    @precondition(has_leaves)
    @rule(i=st.integers(0, 99))
    def remove(self, i):
        self.twins.remove(i)

    @rule(step_s=st.sampled_from(STEPS_S))
    def wait(self, step_s):
        self.twins.wait(step_s)

    @rule(trust=st.booleans(), use_lru=st.sampled_from([False, False, True]))
    def brake(self, trust, use_lru):
        self.twins.brake(trust, use_lru)

    @rule(n=st.integers(1, 6), even_running=st.booleans())
    def evict(self, n, even_running):
        self.twins.evict(n, even_running)

    @invariant()
    def everybody_agrees_on_the_next(self):
        self.twins.check()

    def teardown(self):
        self.twins.finish()


RetentionMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("SAM_MODEL_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRetentionMachine = RetentionMachine.TestCase


def random_call(rng, twins, users):
    """One call; few distinct values, so that equal keys are frequent."""
    step_s, i = rng.choice(STEPS_S), rng.randrange(99)
    calls = [
        (6, "set_user", rng.choice(users), rng.choice(RANKS), step_s, *map(rng.choice, VALUES)),
        (1, "drop_user", rng.choice(users)),
        (8, "add", rng.choices(users, k=rng.choice((0, 1, 1, 2, 3))), step_s, *shape(rng)),
        (4, "wait", step_s),
        (2, "evict", rng.choice((1, 1, 2, 3)), rng.random() < 0.5),
        (1, "brake", rng.random() < 0.6, rng.random() < 0.2),
    ]
    if twins.oracle.leaves:
        calls += [
            (2, "touch", i, step_s, rng.randrange(2)),
            (2, "update", i, rng.randrange(1, 4), rng.random() < 0.5),
            (2, "change_users", i, rng.choice(users), rng.random() < 0.5),
            (1, "remove", i),
        ]
    _, name, *args = rng.choices(calls, [call[0] for call in calls])[0]
    getattr(twins, name)(*args)


VALUES = (GAPS_S, HINTS_S)


def shape(rng):
    return rng.randrange(2), rng.randrange(1, 4), rng.random() < 0.5


@pytest.mark.parametrize("seed", range(8))
def test_random_calls(seed):
    """Longer runs than Hypothesis makes; more leaves wait for the same moment."""
    rng = random.Random(seed)
    for _ in range(10):
        twins, users = Twins(), USERS[: rng.choice((2, 3, 5))]
        for _ in range(250):
            random_call(rng, twins, users)
            if rng.random() < 0.5:
                twins.check()
        twins.finish()


def test_without_sessions_the_victims_are_those_of_lru():
    """100,000 random operations; the oracle is a plain dict in order of access."""
    rng = random.Random(5)
    order, by_access = EvictionOrder(), {}
    now, tick, n_nodes, n_victims = 1.0, 0, 0, 0
    for _ in range(100_000):
        now += rng.choice((0.0, 0.0, 0.0, 0.5, 30.0))
        tick += 1
        call = rng.random()
        if call < 0.35 or len(by_access) < 50:
            n_nodes += 1
            by_access[n_nodes] = None
            order.add(n_nodes, (), now, rng.randrange(9), 1, tick=tick)
        elif call < 0.65:
            node_id = rng.randrange(max(1, n_nodes - 200), n_nodes + 1)
            if node_id in order:
                del by_access[node_id]
                by_access[node_id] = None
                order.touch(node_id, now, tick)
        elif call < 0.70:
            node_id = rng.randrange(max(1, n_nodes - 200), n_nodes + 1)
            order.discard(node_id)
            by_access.pop(node_id, None)
        else:
            oldest = next(iter(by_access))
            assert order.pop_victim(now).node_id == oldest
            del by_access[oldest]
            n_victims += 1
    assert n_victims > 25_000
    assert len(order) == len(by_access)
