"""Sessions on the real cache: who owns what, and what an evict takes away.

Numbers in comments are those of the list of cases that broke real systems.
"""

import pytest

from sam.config import SamConfig
from sam.core.retention import NextUseRank
from sam.core.sessions import SessionState

pytestmark = pytest.mark.parametrize("page_size", [1, 16])

SYSTEM = list(range(1_000, 1_048))  # 48 tokens: whole pages of either size


def text(seed, n=48):
    return [seed * 100 + i for i in range(n)]


def private(rig, session_id):
    """(device, host) tokens that only this session uses."""
    core = rig.cache.tree_core
    own = core.tags.private_ids(rig.ref(session_id))
    sizes = [core.tokens_of(node) for node in rig.branch(session_id) if node.id in own]
    return sum(d for d, _ in sizes), sum(h for _, h in sizes)


def test_a_request_opens_its_session_and_tags_its_branch(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    req = rig.queue(text(1), session="a", parent_session_id="p")
    assert rig.session("a").state is SessionState.RUNNING
    assert not rig.branch("a")
    rig.admit(req)
    rig.decode(req, 20)
    rig.finish(req)
    assert rig.session("a").state is SessionState.IDLE
    assert rig.session("p").state is SessionState.NAMED
    device, _ = rig.on_tiers("a")
    assert device == (48 + 20) // page_size * page_size
    assert rig.ranks(rig.branch("a")) == {NextUseRank.IDLE}


def test_requests_without_a_session_are_not_tagged(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    rig.run(text(1))
    shared = rig.run(text(2), session="default_session")
    assert shared.finished() and not rig.cache.tree_core.tags.refs()
    assert not rig.cache.hints.requests


def test_evict_frees_exactly_the_private_part(make_rig, page_size):
    """(15, 16)"""
    rig = make_rig(page_size=page_size)
    rig.run(SYSTEM + text(1), session="a")
    rig.run(SYSTEM + text(2), session="b")
    before = rig.allocator.available_size()
    own, _ = private(rig, "a")
    assert own == 48 // page_size * page_size + (4 if page_size == 1 else 0)
    result = rig.hint("evict", "a")
    assert result.status == "done"
    assert result.detail["tokens"]["device"] == own
    assert rig.allocator.available_size() == before + own
    rig.check_balance()
    again = rig.queue(SYSTEM + text(2), session="b")
    again.init_next_round_input(rig.cache)
    assert again.prefix_len == 95 // page_size * page_size
    rig.abort_queued(again)


def test_compressor_child_leaves_its_parents_prefix_alone(make_rig, page_size):
    """(15) The child sends all of its parent's messages, then is evicted."""
    rig = make_rig(page_size=page_size)
    parent = rig.run(text(1, 96), session="p", n_out=16)
    rig.run(rig.full_ids(parent) + text(9, 32), session="c", parent_session_id="p")
    whole = rig.on_tiers("p")
    own, _ = private(rig, "c")
    result = rig.hint("evict", "c")
    assert result.detail["tokens"]["device"] == own > 0
    assert rig.on_tiers("p") == whole


def test_evict_of_a_name_that_never_ran_cascades(make_rig, page_size):
    """(17) Two levels deep, one of the children offloaded to the host."""
    rig = make_rig(page_size=page_size)
    rig.run(SYSTEM + text(1), session="lead", parent_session_id="team")
    rig.run(SYSTEM + text(2), session="member", parent_session_id="lead")
    rig.run(text(3), session="other")
    rig.hint("demote", "member", release="now")
    for _ in range(3):
        rig.step()
    device, host = rig.on_tiers("member")
    assert rig.session("team").state is SessionState.NAMED
    in_use = rig.tokens - rig.allocator.available_size()
    kept, _ = rig.on_tiers("other")
    result = rig.hint("evict", "team")
    assert result.status == "done"
    assert result.detail["tokens"]["device"] == in_use - kept
    assert result.detail["tokens"]["host"] >= host > 0
    assert rig.tokens - rig.allocator.available_size() == kept
    assert [rig.session(s).state for s in ("lead", "member")] == [SessionState.ENDED] * 2


def test_scope_subtree_on_a_nested_session_keeps_lineage(make_rig, page_size):
    """(18)"""
    rig = make_rig(page_size=page_size)
    rig.run(text(1), session="root")
    rig.run(text(2), session="mid", parent_session_id="root")
    rig.run(text(3), session="leaf", parent_session_id="mid")
    rig.hint("evict", "mid", parent_session_id="mid", scope="subtree")
    table = rig.cache.hints.table
    assert table.parent(rig.ref("mid").key) == rig.ref("root").key
    assert rig.session("leaf").state is SessionState.ENDED
    assert rig.session("root").state is SessionState.IDLE


def test_evict_while_running_waits_for_the_request(make_rig, page_size):
    """(11) The late finish does not resurrect, its KV goes as well."""
    rig = make_rig(page_size=page_size)
    req = rig.queue(text(1), session="a")
    rig.admit(req)
    assert rig.hint("evict", "a").status == "deferred"
    assert rig.session("a").state is SessionState.ENDED
    rig.decode(req, 20)
    message_id = rig.last_message_id
    rig.finish(req)
    result = rig.later_result(message_id)
    assert result.status == "done"
    assert result.detail["tokens"]["device"] == 68 // page_size * page_size
    assert not rig.cache.tree_core.tags.refs()
    assert rig.allocator.available_size() == rig.tokens
    assert rig.session("a").state is SessionState.ENDED


def test_evict_of_a_queued_session_and_its_abort(make_rig, page_size):
    """(10)"""
    rig = make_rig(page_size=page_size)
    first = rig.run(text(1), session="a")
    req = rig.queue(rig.full_ids(first), session="a")
    rig.abort_queued(req)
    assert rig.session("a").state is SessionState.IDLE
    req = rig.queue(rig.full_ids(first), session="a")
    assert rig.hint("evict", "a").status == "deferred"
    rig.abort_queued(req)
    assert rig.later_result().status == "done"
    assert rig.allocator.available_size() == rig.tokens
    rig.run(rig.full_ids(first), session="a")
    assert rig.session("a").generation == 2


def test_reuse_of_an_id_is_a_new_generation_and_keeps_what_is_left(make_rig, page_size):
    """(11)"""
    rig = make_rig(page_size=page_size)
    old = rig.queue(text(1), session="a")
    rig.admit(old)
    rig.hint("evict", "a")
    message_id = rig.last_message_id
    new = rig.queue(text(1) + text(2), session="a")
    assert rig.session("a").generation == 2
    rig.finish(old)
    assert rig.later_result(message_id).status == "dropped"
    assert rig.later_result(message_id).reason == "resumed"
    assert rig.session("a").state is SessionState.RUNNING
    rig.admit(new)
    rig.finish(new)
    device, _ = rig.on_tiers("a")
    assert device == 96
    assert {ref.generation for ref in rig.cache.tree_core.tags.refs()} == {2}
    assert rig.outcome("evict", "a").detail["tokens"]["device"] == 96


def test_evict_follows_a_node_that_is_split_while_in_use(make_rig, page_size):
    """The node waits for its backup; a stranger's match splits it; both halves go."""
    rig = make_rig(page_size=page_size, write_policy="write_through")
    rig.run(text(1, 96), session="a", n_out=1)
    assert rig.cache.ongoing_write_through
    assert rig.hint("evict", "a").status == "deferred"
    stranger = rig.queue(text(1, 96)[:48] + text(5, 3))
    stranger.init_next_round_input(rig.cache)
    assert stranger.prefix_len == 48
    rig.abort_queued(stranger)
    rig.step()
    assert rig.later_result().status == "done"
    n_tokens = 97 if page_size == 1 else 96
    assert rig.later_result().detail["tokens"]["device"] == n_tokens
    assert rig.allocator.available_size() == rig.tokens


def test_two_evicts_that_wait_for_each_other_leave_nothing(make_rig, page_size):
    """The first one's node is the parent of what the second one frees."""
    rig = make_rig(page_size=page_size, write_policy="write_through")
    req = rig.queue(SYSTEM, session="a")
    rig.admit(req)
    rig.run(SYSTEM + text(1), session="b")
    for session in ("a", "b"):
        assert rig.hint("evict", session).status == "deferred"
    rig.finish(req)
    for _ in range(3):
        rig.step()
    assert rig.allocator.available_size() == rig.tokens


def test_evict_leaves_what_a_stranger_builds_on(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    first = rig.run(text(1), session="a", n_out=16)
    stranger = rig.run(rig.full_ids(first) + text(2))
    result = rig.outcome("evict", "a")
    assert result.status == "done" and result.detail["tokens"]["device"] == 0
    again = rig.run(rig.full_ids(stranger) + [7])
    assert again.reused >= 96 // page_size * page_size


def test_retraction_keeps_the_session_running(make_rig, page_size):
    """(12)"""
    rig = make_rig(page_size=page_size)
    first = rig.run(text(1), session="a", n_out=16)
    req = rig.queue(rig.full_ids(first) + text(2), session="a")
    rig.admit(req)
    rig.decode(req, 8)
    rig.retract(req)
    session = rig.session("a")
    assert session.state is SessionState.RUNNING and session.n_running == 1
    assert rig.ranks(rig.branch("a")) == {NextUseRank.QUEUED}
    rig.admit(req)
    rig.finish(req)
    assert rig.session("a").state is SessionState.IDLE
    assert rig.session("a").generation == 1


def test_retraction_that_aborts_ends_the_request(make_rig, page_size):
    """Out of memory even alone: the scheduler releases it and tells nobody else."""
    rig = make_rig(page_size=page_size)
    envelope = rig.envelope([("bind", "a", {}), ("evict", "a", {})])
    req = rig.queue(text(1), envelope=envelope)
    rig.admit(req)
    rig.retract(req, drop=True)
    assert rig.session("a").state is SessionState.ENDED
    assert rig.later_result(envelope["message_id"]).status == "done"
    assert not rig.cache.hints.requests


def test_edits_of_an_inference_run_after_it(make_rig, page_size):
    """(9) Also when the client went away."""
    rig = make_rig(page_size=page_size)
    for how in ("stop", "abort"):
        envelope = rig.envelope([("bind", "a", {}), ("demote", "a", {}), ("evict", "a", {})])
        req = rig.queue(text(1), envelope=envelope)
        rig.admit(req)
        assert rig.session("a").state is SessionState.RUNNING
        rig.finish(req, how)
        results = {}
        for output in rig.sent:
            if output.message_id == envelope["message_id"]:
                results |= {r.action_id: r.status for r in output.results}
        for _ in range(3):
            rig.step()
        assert rig.later_result(envelope["message_id"]).status == "done"
        assert rig.allocator.available_size() == rig.tokens


def test_edits_of_parallel_samples_run_after_the_last(make_rig, page_size):
    """n > 1: upstream warms the prefix with a request of its own first."""
    rig = make_rig(page_size=page_size)
    envelope = rig.envelope([("bind", "a", {}), ("evict", "a", {})])
    mark = {"action_id": "", "action_type": "sam.parallel", "action_version": "0.1"}
    envelope["actions"].append(mark | {"payload": {}})
    warmup = rig.queue(text(1), envelope=envelope, max_new=0)
    rig.admit(warmup)
    rig.finish(warmup, "length")
    assert rig.session("a").state is SessionState.IDLE
    samples = [rig.queue(text(1), envelope=envelope) for _ in range(2)]
    for req in samples:
        rig.admit(req)
    rig.finish(samples[0])
    assert rig.session("a").state is SessionState.RUNNING
    assert rig.later_result(envelope["message_id"]).action_type == "session.bind"
    rig.finish(samples[1])
    rig.step()
    evicted = rig.later_result(envelope["message_id"])
    assert (evicted.action_type, evicted.status) == ("session.evict", "done")
    assert rig.session("a").generation == 1
    assert rig.allocator.available_size() == rig.tokens


def test_an_aborted_chunk_lets_a_waiting_evict_finish_without_hicache(make_rig, page_size):
    rig = make_rig(page_size=page_size, hicache=False)
    req = rig.queue(text(1, 96), session="a")
    rig.admit(req, chunk=32)
    rig.admit(req, chunk=32)
    assert rig.hint("evict", "a").status == "deferred"
    rig.abort_chunked(req)
    assert rig.later_result().status == "done"
    assert rig.allocator.available_size() == rig.tokens


def test_flush_keeps_sessions_as_empty(make_rig, page_size):
    """(24) No stale node ids: the next turn, evict and offload all work."""
    rig = make_rig(page_size=page_size)
    first = rig.run(text(1), session="a")
    rig.run(text(2), session="b")
    rig.hint("demote", "b", release="now")
    message_id = rig.last_message_id
    rig.flush()
    assert rig.later_result(message_id).status == "dropped"
    assert rig.session("a").state is SessionState.IDLE
    assert rig.branch("a") == [] and rig.branch("b") == []
    assert rig.hint("prefetch", "b").status == "done"
    assert rig.hint("evict", "b").detail["tokens"] == {"device": 0, "host": 0, "pool": 0}
    again = rig.run(rig.full_ids(first), session="a")
    assert again.reused == 0 and rig.on_tiers("a")[0] > 0


def test_duplicates_are_idempotent(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    rig.run(text(1), session="a")
    envelope = rig.envelope([("evict", "a", {})], message_id="same")
    first = rig.submit(envelope)[0]
    second = rig.submit(envelope)[0]
    assert first == second and first.status == "done"
    assert rig.hint("evict", "a").status == "missing"
    assert rig.hint("evict", "never").status == "missing"


def test_accesses_after_a_flush_happen_after_it(make_rig, page_size):
    """(24)"""
    rig = make_rig(page_size=page_size)
    for i in range(40):
        rig.run(text(i), session="a")
    rig.flush()
    rig.clock += 500.0
    rig.run(text(1), session="a")
    rig.run(text(7))
    orders = rig.cache.tree_core.orders
    whens = [orders.device.view.when_of(node) for node in rig.cache.tree_core.live_nodes()]
    assert all(orders.clock.time_of(when) > rig.clock - 10.0 for when in whens)


def test_rollback_supersedes_the_old_branch_and_end_frees_both(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    rig.run(SYSTEM + text(1), session="a")
    rig.run(SYSTEM + text(2), session="a")
    tags = rig.cache.tree_core.tags
    current = {n.id for n in _path(tags.current(rig.ref("a")))}
    old = [n for n in rig.branch("a") if n.id not in current]
    assert rig.ranks(old) == {NextUseRank.SUPERSEDED}
    tail = 4 if page_size == 1 else 0
    assert rig.outcome("evict", "a").detail["tokens"]["device"] == 3 * 48 + 2 * tail
    assert rig.allocator.available_size() == rig.tokens


def _path(node):
    while node.parent is not None:
        yield node
        node = node.parent


def test_a_late_action_does_not_reach_the_session_s_new_life(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    rig.run(text(1), session="a")
    late = [rig.envelope([(kind, "a", {})]) for kind in ("evict", "demote", "prefetch")]
    req = rig.queue(text(2), session="a")
    rig.admit(req)
    results = [rig.submit(envelope)[0] for envelope in late]
    assert [(r.status, r.reason) for r in results] == [("dropped", "overtaken")] * 3
    assert rig.session("a").state is SessionState.RUNNING
    rig.finish(req)
    assert rig.hint("evict", "a").status == "done"


def test_one_client_s_waiting_actions_leave_room_for_others(make_rig, page_size):
    config = SamConfig(raise_on_error=True, max_pending_actions=8)
    rig = make_rig(page_size=page_size, config=config)
    rig.run(text(2), session="b")
    req = rig.queue(text(1), session="a")
    rig.admit(req)
    results = [rig.hint("demote", "a", target="tokens", start=i) for i in range(10)]
    assert [r.reason for r in results] == ["running"] * 4 + ["too_many_pending"] * 6
    other = rig.envelope([("evict", "b", {})])
    other["actions"][0]["payload"]["tenant"] = "key-other"
    assert rig.submit(other)[0].reason != "too_many_pending"
    rig.finish(req)


def test_the_tree_names_its_sessions(make_rig, page_size):
    from sam.srt.mem_cache.inspect import tree_dump

    rig = make_rig(page_size=page_size)
    rig.run(SYSTEM + text(1), session="a")
    rig.run(SYSTEM + text(2), session="b")
    named = {tuple(node["sessions"]) for node in tree_dump(rig.cache, 100)}
    assert named == {("a", "b"), ("a",), ("b",)}
