"""The order of victims. With no session at all the cache is SGLang's own: same victims, same
frees, same matches, in a long random run beside a stock `UnifiedRadixCache` with the Python
core. With sessions every single victim is the one that a brute-force search names.
"""

import math
import random

import pytest

pytest.importorskip("sglang")

from harness_pools import device_leaves, recency
from harness_twin import Twin, random_text
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sam.config import SamConfig
from sam.core.retention import DEFAULT_PLAIN_GAP_S, NextUseRank
from sam.core.sessions import SessionState

N_OPS = 2_000


class PythonTwin(Twin):
    """Beside the stock Python core, node by node."""

    def __init__(self, make_rig, **settings):
        super().__init__(make_rig, **settings)
        self.before, self.n_evicted = {}, 0

    def state(self):
        """Compare everything; count the nodes that left the device."""
        nodes = self.both(lambda rig, i: _state(rig))[2]
        slots = {slot for on_device, *_ in nodes.values() for slot in on_device or ()}
        self.n_evicted += sum(
            bool(on_device) and not slots & set(on_device) for on_device, *_ in self.before.values()
        )
        self.before = nodes


def _state(rig):
    """Free lists in order, and every node by its tokens: what sits where, locked or not."""
    core, nodes = rig.cache.tree_core, {}
    for node in core._node_arena.values():
        if node is core.root_node:
            continue
        path, up = [], node
        while up.parent is not None:
            path.append(tuple(up.key.token_ids)[: len(up.key)])
            up = up.parent
        data = node.component_data[0]
        on_device = None if data.value is None else tuple(data.value.tolist())
        on_host = None if data.host_value is None else tuple(data.host_value.tolist())
        nodes[tuple(reversed(path))] = (on_device, on_host, data.lock_ref, data.host_lock_ref)
    host = rig.cache.cache_controller
    n_host_free = host.mem_pool_host.available_size() if host else 0
    return rig.allocator.get_all_free_pages().tolist(), n_host_free, nodes


def one_op(twin, rng):
    op = rng.random()
    prefilled = [p for p in twin.running if twin.sam.prefilled(p[0])]
    chunked = [p for p in twin.running if p not in prefilled]
    if op < 0.30 and len(twin.queued) + len(twin.running) < 6:
        twin.queue(random_text(twin, rng))
    elif op < 0.60 and (twin.queued or chunked):
        pair = rng.choice(chunked or twin.queued)
        if not pair[0].kv.holds_kv or twin.sam.has_room(pair[0]):
            twin.admit(pair, rng.choice([None, None, 16]))
    elif op < 0.72 and prefilled:
        pair = rng.choice(prefilled)
        if twin.sam.has_room(pair[0]):
            for rig, req in zip(twin.rigs, pair, strict=True):
                rig.decode(req, 2)
    elif op < 0.90 and twin.running:
        twin.finish(rng.choice(twin.running), rng.choice(["stop", "length", "abort"]))
    elif op < 0.93 and prefilled:
        twin.retract(rng.choice(prefilled))
    else:
        for rig in twin.rigs:
            rig.step()


@pytest.mark.parametrize(
    "hicache", ["off", "write_through", "write_through_selective", "write_back"]
)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("make_rig", ["python"], indirect=True)  # Rust: test_shadow_order.py
def test_order_without_sessions_is_stock(make_rig, page_size, hicache):
    settings = {"page_size": page_size, "tokens": 256, "hicache": hicache != "off"}
    if hicache != "off":
        settings |= {"write_policy": hicache, "host_ratio": 1.5}
    twin = PythonTwin(make_rig, **settings)
    rng = random.Random(f"{page_size}{hicache}")
    for _ in range(N_OPS):
        one_op(twin, rng)
        twin.state()
    assert twin.n_evicted > 100
    drain(twin)
    assert twin.sam.cache.hints.requests == {}


def drain(twin):
    for pair in list(twin.running):
        twin.finish(pair, "stop")
    for pair in twin.queued:
        for rig, req in zip(twin.rigs, pair, strict=True):
            rig.abort_queued(req)
    twin.state()


RANK_OF_STATE = {
    SessionState.IDLE: NextUseRank.IDLE,
    SessionState.OFFLOADED: NextUseRank.OFFLOADED,
    SessionState.RESUMING: NextUseRank.QUEUED,
    SessionState.RUNNING: NextUseRank.QUEUED,
}


def naive_key(rig, node):
    """Largest first: from the session table and the ends of branches alone."""
    core, hints = rig.cache.tree_core, rig.cache.hints
    now, tags, keys = hints.table.now_s, core.tags, []
    for ref in tags.refs():
        session = hints.table.get(ref.key)
        for i, end in enumerate(tags.branch_ends(ref)):
            current = i == 0 and tags.current(ref) is end
            while end is not None and end is not node:
                end = end.parent
            if end is not None:
                keys.append(session_key(hints, session, node, now) if current else (4, 0.0))
    if node.id in tags._released:
        standing = dict(core.orders.device.standings())[tags._released[node.id]]
        if hints.retention.end_trust.trusted:
            return (5, now - standing.since_s)
        return (2, now - standing.since_s + standing.gap_s)
    if not keys:
        access_s = core.orders.clock.time_of(recency(node))
        return (2, now - access_s + DEFAULT_PLAIN_GAP_S)
    return min(keys)


def session_key(hints, session, node, now):
    rank = RANK_OF_STATE[session.state]
    if rank == NextUseRank.QUEUED:
        arrived_s = hints.retention._sessions[session.key].queued_s
        return (int(rank), math.inf if arrived_s is None else arrived_s - now)
    if rank == NextUseRank.OFFLOADED and not node.backuped:
        rank = NextUseRank.IDLE
    idle = hints.retention._sessions[session.key]
    age = now - idle.since_s
    if idle.hint is not None and (idle.hints is None or idle.hints.trusted):
        hint_s = idle.hint[0] - idle.since_s + idle.hint[1]
        return (int(rank), max(hint_s - age, age / 2) + 1)
    return (int(rank), age + idle.gap_s)


@pytest.mark.parametrize("write_policy", ["write_through_selective", "write_back"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_victim_is_the_one_a_search_names(make_rig, page_size, write_policy):
    rig = make_rig(page_size=page_size, tokens=512, write_policy=write_policy)
    rng, texts, ranks = random.Random(page_size), {}, set()
    for _ in range(900):
        name = f"s{rng.randrange(6)}" if rng.random() < 0.8 else None
        kind = rng.random()
        rig.clock += rng.choice([0.0, 0.25, 3.0, 40.0])
        if kind < 0.5:
            keep = rng.choice([0, 30, 200])
            ids = texts.get(name, [])[:keep] + [rng.randrange(3) * 99 + i for i in range(40)]
            texts[name] = rig.full_ids(rig.run(ids[-300:], session=name, n_out=3))
            if name and rng.random() < 0.3:
                rig.hint("expect", name, expected_idle_s=rng.choice([1.0, 20.0, 300.0]))
        elif kind < 0.7 and name:
            rig.hint(rng.choice(["demote", "demote", "prefetch"]), name)
        elif kind < 0.73 and name:
            rig.hint("evict", name)
        rig.step()
        core = rig.cache.tree_core
        leaves = device_leaves(core)
        if not leaves or rig.allocator.available_size() > 200:
            continue
        keys = {n.id: naive_key(rig, n) for n in leaves}
        farthest = max(keys.values())
        equals = [n for n in leaves if keys[n.id] == pytest.approx(farthest)]
        expected = min(equals, key=recency)
        ranks.add(farthest[0])
        before = {n.id for n in core.live_nodes() if not n.evicted}
        rig.cache.evict(EvictParams(num_tokens=1))
        after = {n.id for n in core.live_nodes() if not n.evicted}
        assert before - after == {expected.id}
    assert len(ranks) >= 3


def test_ten_thousand_sessions_opened_and_never_used_again(make_rig):
    """(21) Bounded memory; the report still answers; the old ones aged out."""
    config = SamConfig(raise_on_error=True, max_sessions=500, max_sessions_per_tenant=400)
    rig = make_rig(tokens=256, hicache=False, config=config)
    for i in range(10_000):
        rig.hint("bind", f"s{i}", parent_session_id=f"p{i % 50}")
        if i % 100 == 0:
            rig.run([i % 90, i % 80, 3, 4], session=f"s{i}", n_out=1)
    hints, table = rig.cache.hints, rig.cache.hints.table
    assert len(table) <= 400
    assert len(table._store.all.nodes) <= 400 + config.max_sessions
    assert len(rig.cache.tree_core.tags) <= 400
    assert len(hints._seen) <= config.max_remembered_actions
    assert rig.session("s9999") is not None and rig.session("s0") is None
    assert table.counters["dropped_capacity"] > 9_000
    result = rig.hint("evict", "s0")
    assert result.status == "missing"


def test_a_pool_full_of_protected_sessions_still_serves(make_rig):
    """(1) Never closed, larger than both tiers together; then a request without a hint."""
    rig = make_rig(page_size=16, tokens=512, host_ratio=1.5)
    for turn in range(4):
        for i in range(12):
            ids = [i * 1_000 + j for j in range(60 + 30 * turn)]
            rig.run(ids, session=f"s{i}")
            rig.hint("prefetch", f"s{(i + 5) % 12}")
            rig.step()
    fresh = rig.run([7_777 + j for j in range(400)])
    assert fresh.finished()
    assert rig.cache.tree_core.full_protected_size() <= 128
