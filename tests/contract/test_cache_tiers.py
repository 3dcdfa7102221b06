"""Offload and prefetch on the real cache: host copies, loads, and what they must not do.

Numbers in comments are those of the list of cases that broke real systems.
"""

from types import SimpleNamespace

import pytest

from sam.config import SamConfig
from sam.core.retention import NextUseRank
from sam.core.sessions import SessionState

POLICIES = ["write_through", "write_through_selective", "write_back"]
matrix = pytest.mark.parametrize(
    ("page_size", "write_policy"), [(p, w) for p in (1, 16) for w in POLICIES]
)
pages = pytest.mark.parametrize("page_size", [1, 16])


def text(seed, n=64):
    return [seed * 100 + i for i in range(n)]


def settle(rig, n_steps=3):
    for _ in range(n_steps):
        rig.step()


def offload_now(rig, session_id):
    rig.hint("demote", session_id, release="now")
    settle(rig)
    device, host = rig.on_tiers(session_id)
    assert device == 0 and host > 0


@matrix
def test_offload_is_lazy(make_rig, page_size, write_policy):
    """A host copy, the mark, and no device token less; a resume costs nothing."""
    rig = make_rig(page_size=page_size, write_policy=write_policy)
    first = rig.run(text(1), session="a")
    device, _ = rig.on_tiers("a")
    rig.hint("demote", "a")
    settle(rig)
    assert rig.on_tiers("a") == (device, device)
    assert rig.session("a").state is SessionState.OFFLOADED
    assert rig.ranks(rig.branch("a")) == {NextUseRank.OFFLOADED}
    req = rig.run(rig.full_ids(first), session="a")
    assert req.host_loaded_length == 0 and req.reused >= 64


@matrix
def test_release_now_demotes_and_the_next_turn_loads_back(make_rig, page_size, write_policy):
    rig = make_rig(page_size=page_size, write_policy=write_policy)
    first = rig.run(text(1), session="a")
    before = rig.allocator.available_size()
    device, _ = rig.on_tiers("a")
    result = rig.hint("demote", "a", release="now")
    assert result.status == "deferred"
    settle(rig)
    result = rig.later_result()
    assert result.status == "done"
    assert result.detail["tokens"]["device"] == device
    assert rig.allocator.available_size() == before + device
    assert rig.on_tiers("a") == (0, device)
    req = rig.run(rig.full_ids(first), session="a")
    assert req.host_loaded_length >= 64
    settle(rig)
    rig.check_balance()


@matrix
def test_release_now_leaves_what_others_use(make_rig, page_size, write_policy):
    rig = make_rig(page_size=page_size, write_policy=write_policy)
    rig.run(text(1) + text(2), session="a")
    rig.run(text(1) + text(3), session="b")
    kept = rig.on_tiers("b")[0]
    rig.hint("demote", "a", release="now")
    settle(rig)
    assert rig.on_tiers("b")[0] == kept
    assert rig.on_tiers("a")[0] == 64


@pages
def test_offload_goes_first_under_pressure_but_only_with_a_copy(make_rig, page_size):
    rig = make_rig(page_size=page_size, tokens=256)
    rig.run(text(1), session="young")
    rig.run(text(2), session="old")
    rig.run(text(3), session="away")
    rig.hint("demote", "away")
    settle(rig)
    rig.run(text(4, 100))
    assert rig.on_tiers("away")[0] < 64
    assert rig.on_tiers("away")[1] >= 64
    assert rig.on_tiers("young")[0] >= 64 and rig.on_tiers("old")[0] >= 64


@pages
def test_ended_and_superseded_go_before_idle(make_rig, page_size):
    rig = make_rig(page_size=page_size, tokens=256, hicache=False)
    rig.run(text(1), session="idle")
    rig.run(text(2), session="moved")
    rig.run(text(3, 32), session="moved")
    rig.run(text(4, 100))
    assert rig.on_tiers("idle")[0] >= 64
    kept = rig.branch("moved")
    assert sum(rig.cache.tree_core.tokens_of(n)[0] for n in kept) < 64
    assert rig.cache.tree_core.tags.current(rig.ref("moved")) is not None


@pages
def test_aged_out_sessions_go_before_idle_ones(make_rig, page_size):
    """Sessions that never get an evict age out by message time."""
    from sam.config import SamConfig

    config = SamConfig(raise_on_error=True, session_idle_timeout_s=50.0)
    rig = make_rig(page_size=page_size, tokens=256, hicache=False, config=config)
    rig.run(text(1), session="forgotten")
    rig.clock += 40.0
    rig.run(text(2), session="old")
    rig.clock += 20.0
    touch = rig.queue(text(1) + [9_999])  # the forgotten one is the most recent now
    touch.init_next_round_input(rig.cache)
    rig.abort_queued(touch)
    rig.hint("prefetch", "nobody")
    assert rig.session("forgotten").state is SessionState.ENDED
    assert not rig.branch("forgotten")
    rig.run(text(3, 130))
    assert rig.on_tiers("old")[0] >= 64


@matrix
def test_prefetch_loads_without_a_batch(make_rig, page_size, write_policy):
    rig = make_rig(page_size=page_size, write_policy=write_policy)
    first = rig.run(text(1), session="a")
    offload_now(rig, "a")
    _, host = rig.on_tiers("a")
    assert rig.hint("prefetch", "a").status == "deferred"
    assert rig.session("a").state is SessionState.RESUMING
    assert rig.cache.cache_controller.load_queue
    rig.slow_transfers = "load"
    rig.step()
    assert not rig.cache.cache_controller.load_queue
    in_flight = rig.cache._own_load[1]
    assert rig.cache.ready_to_load_host_cache() == in_flight >= 0
    rig.slow_transfers = ""
    settle(rig)
    assert rig.cache.ready_to_load_host_cache() == -1
    result = rig.later_result()
    assert result.status == "done" and result.detail["tokens"]["device"] == host
    req = rig.run(rig.full_ids(first), session="a")
    assert req.host_loaded_length == 0 and req.reused >= 64


@pages
def test_an_inference_that_overtakes_its_prefetch_loads_once(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    first = rig.run(text(1), session="a")
    offload_now(rig, "a")
    rig.hint("prefetch", "a")
    message_id = rig.last_message_id
    req = rig.queue(rig.full_ids(first), session="a")
    assert rig.admit(req)
    assert req.host_loaded_length == 0 and req.reused >= 64
    assert rig.last_consumer_index >= 0
    rig.finish(req)
    settle(rig)
    assert rig.later_result(message_id).status == "done"


@pages
def test_prefetch_after_the_inference_is_a_no_op(make_rig, page_size):
    """(20)"""
    rig = make_rig(page_size=page_size)
    first = rig.run(text(1), session="a")
    offload_now(rig, "a")
    req = rig.queue(rig.full_ids(first), session="a")
    rig.admit(req)
    result = rig.hint("prefetch", "a")
    assert (result.status, result.reason) == ("dropped", "already_running")
    rig.finish(req)
    result = rig.hint("prefetch", "a")
    assert (result.status, result.reason) == ("done", "already_on_device")
    counts = rig.cache.hints.action_counts
    assert counts["session.prefetch", "dropped"] == 1
    assert not rig.cache.cache_controller.load_queue


@pages
def test_offload_then_inference_a_thousand_times(make_rig, page_size):
    """(19) No wait, no double load, no leak; every reused row is checked."""
    rig = make_rig(page_size=page_size, tokens=512)
    ids = text(1)
    rig.run(ids, session="a", n_out=1)
    loads = 0
    for i in range(1000):
        rig.hint("demote", "a", **({"release": "now"} if i % 2 else {}))
        if i % 5 == 0:
            rig.step()
        if i % 7 == 0:
            rig.hint("prefetch", "a")
        req = rig.queue(ids, session="a")
        assert rig.admit(req)
        rig.finish(req)
        loads += bool(req.host_loaded_length)
        assert req.reused >= 48
    rig.check_idle()
    assert loads > 10
    assert rig.session("a").generation == 1
    core = rig.cache.tree_core
    assert rig.tokens - rig.allocator.available_size() == core.full_evictable_size() <= 80


@pages
def test_twelve_prefetches_that_do_not_fit(make_rig, page_size):
    """(14) Some are clipped; none blocks; inferences go on."""
    rig = make_rig(page_size=page_size, tokens=256, host_ratio=6.0)
    names = [f"s{i}" for i in range(12)]
    for i, name in enumerate(names):
        rig.run(text(i, 96), session=name, n_out=1)
        offload_now(rig, name)
    message_ids = []
    for name in names:
        rig.hint("prefetch", name)
        message_ids.append(rig.last_message_id)
    rig.run(text(50, 100))
    settle(rig)
    sent = [rig.later_result(m) for m in message_ids]
    loaded = [r for r in sent if r is not None and r.status == "done"]
    refused = rig.cache.hints.action_counts
    n_refused = refused.get(("session.prefetch", "dropped"), 0)
    n_refused += refused.get(("session.prefetch", "clipped"), 0)
    assert loaded and len(loaded) + n_refused == 12
    assert rig.cache.hints.n_pending == 0
    rig.check_balance()


@pages
def test_unused_prefetch_gives_its_room_back(make_rig, page_size):
    """A lease ends by message time; the loaded nodes are offloaded ones again."""
    rig = make_rig(page_size=page_size)
    rig.run(text(1), session="a")
    offload_now(rig, "a")
    rig.hint("prefetch", "a")
    settle(rig)
    rig.clock += 31.0
    rig.run(text(2), session="b")
    assert rig.session("a").state is SessionState.OFFLOADED
    assert not rig.cache.hints.moves.leased
    assert rig.ranks(rig.branch("a")) == {NextUseRank.OFFLOADED}


@pages
def test_moves_wait_for_a_running_session_and_give_way_to_its_next_turn(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    req = rig.queue(text(1), session="a")
    rig.admit(req)
    assert rig.hint("demote", "a").status == "deferred"
    first = rig.last_message_id
    rig.finish(req)
    settle(rig)
    assert rig.later_result(first).status == "done"
    assert rig.session("a").state is SessionState.OFFLOADED
    one = rig.queue(text(1), session="a")
    rig.hint("demote", "a")
    second = rig.last_message_id
    two = rig.queue(text(1), session="a")
    assert (rig.later_result(second).status, rig.later_result(second).reason) == (
        "dropped",
        "resumed",
    )
    rig.abort_queued(one)
    rig.abort_queued(two)
    assert rig.session("a").state is SessionState.IDLE


def test_subtree_offload_skips_running_members(make_rig):
    rig = make_rig()
    rig.run(text(1), session="idle", parent_session_id="team")
    req = rig.queue(text(2), session="busy", parent_session_id="team")
    rig.hint("demote", "team", scope="subtree")
    settle(rig)
    assert (rig.later_result().status, rig.later_result().reason) == ("clipped", "running")
    assert rig.session("idle").state is SessionState.OFFLOADED
    rig.hint("evict", "idle")
    result = rig.hint("demote", "team", scope="subtree")
    assert (result.status, result.reason) == ("dropped", "running")
    rig.abort_queued(req)


@matrix
def test_host_tier_smaller_than_the_device(make_rig, page_size, write_policy):
    """(6) Sustained load; offloads are clipped or done, prefetch still progresses."""
    rig = make_rig(page_size=page_size, tokens=256, host_ratio=0.5, write_policy=write_policy)
    for i in range(30):
        name = f"s{i % 5}"
        rig.run(text(i % 5, 80), session=name, n_out=1)
        rig.hint("demote", name)
        rig.hint("prefetch", f"s{(i + 2) % 5}")
        rig.step()
    settle(rig)
    by_kind = rig.cache.hints.action_counts
    assert by_kind.get(("session.demote", "done"), 0) > 0
    assert {s for _, s in by_kind} <= {"done", "clipped", "dropped", "deferred", "missing"}


def test_no_host_tier_is_said(make_rig):
    rig = make_rig(hicache=False)
    rig.run(text(1), session="a")
    result = rig.hint("demote", "a", release="now")
    assert (result.status, result.reason) == ("clipped", "no_host_tier")
    assert rig.on_tiers("a")[0] >= 64


def test_long_prompt_in_chunks_comes_back_whole(make_rig):
    """(7)"""
    rig = make_rig(page_size=16, tokens=512)
    ids = text(1, 300)
    req = rig.queue(ids, session="a")
    while not rig.prefilled(req):
        rig.admit(req, chunk=64)
    rig.finish(req)
    offload_now(rig, "a")
    req = rig.run(ids, session="a")
    assert req.host_loaded_length == req.reused == 288


def test_a_failing_hint_is_counted_and_never_fails_the_request(make_rig, monkeypatch):
    from sam.config import SamConfig

    rig = make_rig(config=SamConfig())
    monkeypatch.setattr(
        rig.cache.hints.table, "bind", lambda *a: (_ for _ in ()).throw(RuntimeError("x"))
    )
    req = rig.run(text(1), session="a")
    assert req.finished() and rig.cache.n_errors == 1
    no_actions = SimpleNamespace(actions=None, message_id="m")
    assert rig.cache.apply_kv_hints(SimpleNamespace(kv_hints=no_actions, http_worker_ipc=None))
    rig.cache.n_errors = 0


def grown(rig, session_id, n_turns=8):
    """A branch of as many nodes."""
    ids = text(1, 16)
    for turn in range(n_turns):
        ids = rig.full_ids(rig.run(ids + text(turn + 2, 8), session=session_id, n_out=1))
    return ids


def test_an_evict_frees_so_many_nodes_a_step(make_rig, monkeypatch):
    from sam.srt.mem_cache import tier_tasks

    monkeypatch.setattr(tier_tasks, "NODES_PER_POLL", 2)
    rig = make_rig(tokens=512)
    grown(rig, "a")
    n_left = [len(rig.branch("a"))]
    assert rig.hint("evict", "a").status == "deferred"
    while rig.cache.tree_core.live_nodes():
        n_left.append(len(rig.cache.tree_core.live_nodes()))
        rig.step()
    steps = [a - b for a, b in zip(n_left, n_left[1:], strict=False)]
    assert len(steps) > 3 and all(0 < step <= 2 for step in steps), n_left
    settle(rig)
    assert rig.later_result().status == "done"
    assert rig.allocator.available_size() == rig.tokens


def test_an_offload_copies_so_much_at_a_time(make_rig):
    config = SamConfig(raise_on_error=True, max_offload_in_flight_tokens=16)
    rig = make_rig(tokens=512, config=config, write_policy="write_back")
    grown(rig, "a")
    device, before = rig.on_tiers("a")
    rig.slow_transfers = "write"
    rig.hint("demote", "a")
    under_way = rig.on_tiers("a")[1] - before
    assert 0 < under_way < device - before
    rig.step()
    assert rig.on_tiers("a")[1] - before == under_way
    rig.slow_transfers = ""
    settle(rig, 12)
    assert rig.later_result().status == "done"
    assert rig.on_tiers("a") == (device, device)


def test_what_fails_takes_nothing_else_down(make_rig, caplog):
    rig = make_rig(tokens=512, config=SamConfig())
    for name in "abc":
        rig.run(text(ord(name)), session=name)
    rig.slow_transfers = "write"
    messages = []
    for name in "abc":
        rig.hint("demote", name, release="now")
        messages.append(rig.last_message_id)
    broken = rig.cache.hints._tickets[0].task
    broken.poll = lambda: 1 / 0
    rig.slow_transfers = ""
    settle(rig)
    outcomes = [rig.later_result(message_id) for message_id in messages]
    assert [(o.status, o.reason) for o in outcomes[:1]] == [("dropped", "internal_error")]
    assert all(o.status == "done" for o in outcomes[1:])
    rig.cache.hints.moves.expect = lambda action: 1 / 0
    actions = [("expect", "b", {"expected_idle_s": 1.0}), ("evict", "b", {})]
    results = rig.submit(rig.envelope(actions))
    assert [r.status for r in results] == ["dropped", "done"]
    assert rig.cache.n_errors == 2 and "ZeroDivisionError" in caplog.text
    rig.cache.n_errors = 0


def test_an_evict_gives_back_at_once(make_rig):
    """However many nodes: the allocator joins its free list anew with each free."""
    rig = make_rig(tokens=512, hicache=False)
    grown(rig, "a")
    assert len(rig.branch("a")) > 8
    n_frees, free = [], rig.allocator.free
    rig.allocator.free = lambda indices: (n_frees.append(len(indices)), free(indices))
    result = rig.hint("evict", "a")
    rig.allocator.free = free
    assert result.status == "done" and len(n_frees) == 1
    assert n_frees[0] == result.detail["tokens"]["device"]


def test_an_offload_larger_than_the_host_ends(make_rig):
    """Making room for the next copy must not undo the last one for ever."""
    config = SamConfig(raise_on_error=True, max_offload_in_flight_tokens=20)
    rig = make_rig(tokens=256, host_ratio=0.6, config=config, write_policy="write_back")
    grown(rig, "a", n_turns=20)
    rig.hint("demote", "a")
    settle(rig, 60)
    result = rig.later_result()
    assert (result.status, result.reason) == ("clipped", "host_full")
