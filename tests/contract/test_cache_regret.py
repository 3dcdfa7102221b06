"""The regret guard on the real cache: quiet where the order is right, LRU where it is not."""

import random

import pytest

pytest.importorskip("sglang")

from sam.config import SamConfig

N_SESSIONS = 12


def misses(rig, rng, gap_of, n_turns):
    """Sessions come back by `gap_of(session, turn)`; recomputed tokens of all turns."""
    texts = {i: [i * 1_000 + j for j in range(60)] for i in range(N_SESSIONS)}
    turns = dict.fromkeys(texts, 0)
    due = {i: rng.random() for i in texts}
    recomputed = 0
    for _ in range(n_turns):
        session = min(due, key=due.get)
        rig.clock = max(rig.clock, 10_000.0 + due[session])
        req = rig.run(texts[session], session=f"s{session}", n_out=2)
        recomputed += len(texts[session]) - req.reused
        turns[session] += 1
        due[session] = rig.clock - 10_000.0 + gap_of(session, turns[session])
    return recomputed


def alternating(session, turn):
    """The known bad case: what was a short wait is a long one next."""
    return 2.0 if (turn + session) % 2 else 200.0


def test_a_bad_order_is_left_for_lru(make_rig):
    worst = {}
    for name in ("lru", "next-use", "guarded"):
        policy = "lru" if name == "lru" else "next-use"
        config = SamConfig(
            raise_on_error=True, retention_policy=policy, regret_guard=name == "guarded"
        )
        rig = make_rig(tokens=320, hicache=False, config=config)
        worst[name] = misses(rig, random.Random(1), alternating, 500)
        if name == "guarded":
            assert rig.cache.regret.pair.guard.behind_pages != 0.0
    assert worst["next-use"] > 1.2 * worst["lru"], "no bad case any more"
    assert worst["guarded"] <= 1.06 * worst["lru"]


def test_the_guard_is_quiet_where_the_order_pays(make_rig):
    config = SamConfig(raise_on_error=True)
    rig = make_rig(tokens=320, hicache=False, config=config)
    misses(rig, random.Random(2), lambda session, turn: 3.0 + 40.0 * session, 300)
    assert rig.cache.regret.n_switches == 0 and not rig.cache.tree_core.orders.use_lru


def test_ghosts_forget_with_the_sessions(make_rig):
    config = SamConfig(raise_on_error=True, max_sessions=20, max_sessions_per_tenant=20)
    rig = make_rig(tokens=256, hicache=False, config=config)
    for i in range(300):
        rig.run([i * 10 + j for j in range(30)], session=f"s{i}", n_out=1)
        if i % 3 == 0:
            rig.hint("evict", f"s{i}")
    pair = rig.cache.regret.pair
    assert len(pair.ours._path_of) <= 25 and len(pair._order._of_user) <= 45
    assert pair.ours.used_pages <= pair.ours.capacity_pages
    assert len(rig.cache.tree_core.orders.device.standings()) <= 45


def test_without_sessions_nothing_is_watched(make_rig):
    rig = make_rig(tokens=256)
    rig.run(list(range(40)))
    assert not rig.cache.regret.pair.ours._segments


def documents_reused(rig, n):
    """Sessions that never return, and three documents in a cycle without sessions."""
    reused = 0
    for i in range(n):
        ids = [1_000 + 40 * i + j for j in range(26)]
        rig.run(ids, session=f"s{i}")
        rig.cache.hints.retention.relabel(rig.ref(f"s{i}").key, "tool")
        document = [i % 3 * 50 + j for j in range(20)]
        reused += rig.run(document, n_out=1).reused
    return reused


def test_the_guard_sees_traffic_without_sessions(make_rig):
    found = {}
    for policy in ("lru", "next-use"):
        config = SamConfig(raise_on_error=True, retention_policy=policy)
        rig = make_rig(tokens=256, hicache=False, config=config)
        found[policy] = documents_reused(rig, 200)
    assert found["next-use"] > 0.7 * found["lru"] > 0


def test_the_guard_sees_what_one_shot_sessions_share(make_rig):
    found = {}
    for policy in ("lru", "next-use"):
        config = SamConfig(raise_on_error=True, retention_policy=policy)
        rig = make_rig(tokens=256, hicache=False, config=config)
        found[policy] = 0
        for i in range(300):
            rig.run([1_000 + 40 * i + j for j in range(26)], session=f"s{i}")
            rig.cache.hints.retention.relabel(rig.ref(f"s{i}").key, "tool")
            document = [i % 3 * 50 + j for j in range(20)]
            req = rig.run([*document, 700 + i % 40], session=f"u{i}", n_out=1)
            found[policy] += min(req.reused, 20)
    assert found["next-use"] > 0.7 * found["lru"] > 0
