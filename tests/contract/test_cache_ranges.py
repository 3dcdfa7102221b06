"""Token ranges, retention and tool waits on the real cache, both tree cores.

Numbers in comments are those of the list of cases that broke real systems.
"""

from array import array

import pytest

pytest.importorskip("sglang")

from sam.core.retention import NextUseRank
from sam.core.sessions import SessionState
from sam.srt.entrypoints.tenant import client_of
from sam.srt.mem_cache.ownership import path_up

pages = pytest.mark.parametrize("page_size", [1, 16])
SYSTEM = [9_000 + i for i in range(32)]


def text(seed, n=64):
    return [seed * 100 + i for i in range(n)]


def window(ids, start, end=None, **extra):
    """The payload of a range as the ingress makes it."""
    span = {"target": "tokens", "start": start, "source": "messages"} | extra
    span["token_ids"] = array("i", ids).tobytes()
    return span if end is None else span | {"end": end}


def freed(result):
    return result.detail["tokens"]["device"], result.detail["tokens"]["host"]


def up(n, page):
    return -(-n // page) * page


@pages
def test_evict_frees_the_tail_and_the_next_turn_reuses_the_rest(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    ids = rig.full_ids(rig.run(SYSTEM + text(1), session="a"))
    before = rig.allocator.available_size()
    cached = rig.on_tiers("a")[0]
    result = rig.outcome("evict", "a", **window(ids[:-4], 50))
    assert result.status == "done"
    start = up(50, page_size)
    assert freed(result) == (cached - start, 0)
    assert result.detail["span"] == [start, cached]
    assert rig.allocator.available_size() == before + cached - start
    again = rig.run(ids[:50] + text(7), session="a")
    assert again.reused == start if page_size == 1 else again.reused == 48


@pages
def test_what_others_use_stays(make_rig, page_size):
    """(15, 16)"""
    rig = make_rig(page_size=page_size)
    ids = rig.full_ids(rig.run(SYSTEM + text(1), session="a"))
    rig.run(SYSTEM + text(1, 32) + text(2), session="b")
    result = rig.outcome("evict", "a", **window(ids, 16))
    shared = 64
    assert result.detail["tokens"]["device"] == (len(ids) - 1) // page_size * page_size - shared
    assert rig.run(SYSTEM + text(1, 32) + text(2), session="b").reused >= 112
    assert rig.branch("a")


@pages
def test_a_range_that_a_newer_request_overtook_frees_only_what_that_left(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    old = rig.full_ids(rig.run(SYSTEM + text(1), session="a"))
    late = rig.envelope([("evict", "a", window(old, 48))])
    new = rig.run(SYSTEM + text(1, 16) + text(2), session="a")
    before = rig.on_tiers("a")[0]
    rig.submit(late)
    assert rig.on_tiers("a")[0] == before - ((len(old) - 1) // page_size * page_size - 48)
    assert rig.run(rig.full_ids(new), session="a").reused >= 112


@pages
def test_overtaken_while_the_newer_request_runs(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    old = rig.full_ids(rig.run(SYSTEM + text(1), session="a"))
    late = rig.envelope([("evict", "a", window(old, 48))])
    req = rig.queue(SYSTEM + text(1, 16) + text(2), session="a")
    rig.admit(req, chunk=32)
    result = rig.submit(late)[0]
    cached = (len(old) - 1) // page_size * page_size
    assert result.status == "done" and freed(result)[0] == cached - 48
    while not rig.prefilled(req):
        rig.admit(req)
    rig.finish(req)
    assert rig.run(rig.full_ids(req), session="a").reused >= 112


@pages
def test_a_running_session_is_cut_after_its_request(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    req = rig.queue(SYSTEM + text(1), session="a")
    rig.admit(req)
    result = rig.hint("evict", "a", **window(SYSTEM + text(1), 48))
    assert (result.status, result.reason) == ("deferred", "running")
    message_id = rig.last_message_id
    rig.decode(req, 4)
    rig.finish(req)
    assert rig.later_result(message_id).status == "done"
    assert rig.on_tiers("a")[0] == 48


def test_a_newer_request_drops_what_waits(make_rig):
    rig = make_rig()
    req = rig.queue(text(1), session="a")
    rig.admit(req)
    rig.hint("evict", "a", **window(text(1), 8))
    message_id = rig.last_message_id
    second = rig.queue(text(2), session="a")
    assert (rig.later_result(message_id).status, rig.later_result(message_id).reason) == (
        "dropped",
        "resumed",
    )
    rig.finish(req)
    rig.admit(second)
    rig.finish(second)
    assert rig.on_tiers("a")[0] > 64


@pages
def test_a_range_that_stops_short_takes_what_follows_and_says_so(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    ids = rig.full_ids(rig.run(SYSTEM + text(1), session="a"))
    cached = rig.on_tiers("a")[0]
    result = rig.outcome("evict", "a", **window(ids, 32, 64))
    assert (result.status, result.reason) == ("clipped", "what_follows_too")
    assert result.detail["span"] == [32, cached] and rig.on_tiers("a")[0] == 32


@pages
def test_offloaded_tail_goes_first_and_comes_back(make_rig, page_size):
    rig = make_rig(page_size=page_size, write_policy="write_through_selective")
    ids = rig.full_ids(rig.run(SYSTEM + text(1), session="a"))
    device = rig.on_tiers("a")[0]
    result = rig.outcome("demote", "a", **window(ids, 48))
    assert result.status == "done" and rig.on_tiers("a")[0] == device
    tags = rig.cache.tree_core.tags
    top = tags.current(rig.ref("a"))
    assert rig.cache.tree_core.path_end(top) == 48
    tail = [n for n in rig.branch("a") if rig.cache.tree_core.path_end(n) > 48]
    assert rig.ranks(tail) == {NextUseRank.OFFLOADED}
    assert rig.ranks([top]) == {NextUseRank.IDLE}
    assert rig.session("a").state is SessionState.IDLE
    rig.hint("prefetch", "a")
    assert rig.cache.tree_core.path_end(tags.current(rig.ref("a"))) == device
    assert rig.run(ids, session="a").reused >= 96


@pages
def test_offload_now_then_prefetch_of_a_part(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    ids = rig.full_ids(rig.run(SYSTEM + text(1), session="a"))
    device = rig.on_tiers("a")[0]
    result = rig.outcome("demote", "a", release="now", **window(ids, 32))
    assert result.status == "done" and freed(result)[0] == device - 32
    assert rig.on_tiers("a")[0] == 32
    result = rig.outcome("prefetch", "a", **window(ids, 32, 64))
    assert result.status == "done" and freed(result)[0] == 32
    assert rig.on_tiers("a")[0] == 64
    assert rig.session("a").state is SessionState.RESUMING
    again = rig.run(ids, session="a")
    assert again.reused >= 96 and again.host_loaded_length == device - 64


@pages
def test_other_tokens_and_other_namespaces_are_missing(make_rig, page_size):
    """(8)"""
    rig = make_rig(page_size=page_size)
    ids = rig.full_ids(rig.run(SYSTEM + text(1), session="a"))
    before = rig.on_tiers("a")
    for payload in (
        window(text(5, 100), 64),
        window(ids, 64, cache_salt="other"),
        window(ids, 64, extra_key="other"),
        window(ids + text(6, 200), len(ids) + 100),
    ):
        result = rig.hint("evict", "a", **payload)
        assert (result.status, result.reason) == ("missing", "not_cached")
    assert rig.hint("evict", "nobody", **window(ids, 8)).status == "missing"
    assert rig.on_tiers("a") == before


def test_a_range_without_its_tokens_ends_at_nodes(make_rig):
    rig = make_rig()
    ids = rig.full_ids(rig.run(SYSTEM + text(1), session="a"))
    rig.run(SYSTEM + text(2), session="b")
    result = rig.outcome("evict", "a", target="tokens", start=20)
    assert (result.status, result.reason) == ("clipped", "node_boundary")
    assert result.detail["span"] == [32, len(ids) - 1]
    assert rig.on_tiers("a")[0] == 32


def test_less_than_a_page_is_nothing(make_rig):
    rig = make_rig(page_size=16)
    ids = rig.full_ids(rig.run(SYSTEM + text(1), session="a"))
    result = rig.hint("evict", "a", **window(ids, 33, 47))
    assert (result.status, result.reason) == ("clipped", "less_than_a_page")


@pages
def test_edits_on_tokens_of_a_request_use_its_own(make_rig, page_size):
    rig = make_rig(page_size=page_size)
    edit = {"target": "tokens", "start": 40}
    envelope = rig.envelope([("bind", "a", {}), ("evict", "a", edit)])
    req = rig.queue(SYSTEM + text(1), envelope=envelope)
    rig.admit(req)
    rig.decode(req, 4)
    rig.finish(req)
    assert rig.on_tiers("a")[0] == up(40, page_size)


def test_the_whole_window(make_rig):
    rig = make_rig()
    ids = rig.full_ids(rig.run(text(1), session="a"))
    assert rig.outcome("evict", "a", **window(ids, 0)).status == "done"
    assert not rig.branch("a") and rig.session("a").state is SessionState.IDLE
    assert rig.allocator.available_size() == rig.tokens


# -- soft keep-alive, tool waits -------------------------------------------------------


def test_retained_for_a_while(make_rig):
    rig = make_rig(tokens=512)
    rig.run(text(1), session="a")
    assert rig.hint("retain", "a", ttl_s=60.0).status == "done"
    assert rig.ranks(rig.branch("a")) == {NextUseRank.QUEUED}
    rig.clock += 61.0
    rig.run(text(2), session="b")
    assert rig.ranks(rig.branch("a")) == {NextUseRank.IDLE}
    assert not rig.cache.hints.moves.retained


def test_one_owner_retains_at_most_its_share(make_rig):
    rig = make_rig(tokens=512)
    for name in "abc":
        rig.run(text(ord(name)), session=name)
    results = [rig.hint("retain", name, ttl_s=60.0) for name in "abc"]
    assert [r.status for r in results] == ["done", "dropped", "dropped"]
    assert results[1].reason == "over_share"
    assert rig.hint("retain", "a", ttl_s=0.0).status == "done"
    assert rig.hint("retain", "b", ttl_s=60.0).status == "done"
    assert rig.ranks(rig.branch("a")) == {NextUseRank.IDLE}


def retained(rig):
    found = rig.cache.hints.moves.retained
    client = client_of(rig.ref("a").key.tenant)
    own = found._clients.get(client)
    if own is not None:
        paid = [(n, t) for entry in own.entries.values() for n, t in entry.nodes.values()]
        assert own.n_tokens == sum(n_tokens for _, n_tokens in paid)
        assert sorted(node.id for node, _ in paid) == sorted(own.payers)
        assert all(own.payers[i] is e for e in own.entries.values() for i in e.nodes)
    return found.tokens_of(client)


def on_device(rig, *names):
    """Device tokens of the nodes of these sessions' current branches, each once."""
    tree = rig.cache.tree_core
    nodes = {
        node.id: node for name in names for node in path_up(tree.tags.current(rig.ref(name)))
    }
    return sum(tree.tokens_of(node)[0] for node in nodes.values())


def test_a_shared_prefix_is_retained_once(make_rig):
    rig = make_rig(tokens=512)
    shared = text(1, 64)
    for name in "abc":
        rig.run(shared + text(ord(name), 16), session=name)
    assert [rig.hint("retain", n, ttl_s=60.0).status for n in "abc"] == ["done"] * 3
    assert retained(rig) == on_device(rig, "a", "b", "c") < 128
    rig.hint("retain", "a", ttl_s=0.0)
    assert retained(rig) == on_device(rig, "b", "c")
    rig.hint("evict", "b")
    assert retained(rig) == on_device(rig, "c")
    rig.clock += 61.0
    rig.run(text(2, 16), session="d")
    assert retained(rig) == 0 and not rig.cache.hints.moves.retained._clients


def test_a_retained_session_that_grows_is_counted_and_may_lose_it(make_rig):
    rig = make_rig(tokens=512)
    rig.run(text(1, 32), session="a")
    assert rig.hint("retain", "a", ttl_s=600.0).status == "done"
    rig.run(text(1, 32) + text(2, 48), session="a")
    assert retained(rig) == on_device(rig, "a") >= 64
    assert NextUseRank.QUEUED in rig.ranks(rig.branch("a"))
    rig.run(text(1, 32) + text(2, 48) + text(3, 80), session="a")
    assert not retained(rig) and NextUseRank.QUEUED not in rig.ranks(rig.branch("a"))


def test_what_a_retained_session_left_is_charged_to_who_shares_it(make_rig):
    rig = make_rig(tokens=512)
    shared = text(1, 64)
    for name in "ab":
        rig.run(shared + text(ord(name), 16), session=name)
        assert rig.hint("retain", name, ttl_s=600.0).status == "done"
    rig.run(text(7, 16), session="a")
    assert retained(rig) == on_device(rig, "a", "b") >= 80


def test_a_session_that_leaves_hands_what_it_paid_to_the_next(make_rig):
    """Whoever goes first, in any order; one that comes again pays for nothing twice."""
    rig = make_rig(tokens=512)
    shared = text(1, 64)
    for name in "abc":
        rig.run(shared + text(ord(name), 16), session=name)
        rig.hint("retain", name, ttl_s=600.0)
    left = ["a", "b", "c"]
    for name in "bac":
        rig.hint("retain", name, ttl_s=0.0)
        left.remove(name)
        assert retained(rig) == (on_device(rig, *left) if left else 0)
    for name in "cab":
        rig.hint("retain", name, ttl_s=600.0)
    assert retained(rig) == on_device(rig, "a", "b", "c")


def test_a_flush_leaves_nothing_charged(make_rig):
    rig = make_rig(tokens=512)
    rig.run(text(1, 64), session="a")
    rig.hint("retain", "a", ttl_s=600.0)
    rig.flush()
    assert retained(rig) == 0
    rig.run(text(1, 32), session="a")
    assert retained(rig) == on_device(rig, "a") > 0


def test_one_client_retains_a_bounded_number_of_sessions(make_rig, monkeypatch):
    monkeypatch.setattr("sam.srt.managers.retained.MAX_PER_CLIENT", 2)
    rig = make_rig(tokens=512)
    for name in "abc":
        rig.run(text(ord(name), 16), session=name)
    statuses = [rig.hint("retain", n, ttl_s=60.0).status for n in "abca"]
    assert statuses == ["done", "done", "dropped", "done"]


def test_retained_sessions_still_give_way(make_rig):
    """(1)"""
    rig = make_rig(tokens=512, hicache=False)
    rig.run(text(1), session="a")
    rig.hint("retain", "a", ttl_s=600.0)
    assert rig.run(text(3, 460)).finished()


def test_a_tool_wait_is_labelled_and_learned(make_rig):
    from sam.srt.managers.bindings import ANSWERED_ACTION

    rig = make_rig()
    for gap_s in (40.0, 40.0, 40.0):
        rig.run(text(1), session="a")
        envelope = rig.envelope([("bind", "a", {})])
        answer = {"finish_reason": "tool_calls", "tool_name": "build"}
        envelope["actions"][0]["action_type"] = ANSWERED_ACTION
        envelope["actions"][0]["payload"] |= answer
        assert rig.submit(envelope) == []
        session = rig.session("a")
        assert session.waiting_tool and session.tool_name == "build"
        rig.clock += gap_s
    before = rig.cache.hints.retention.gaps.gap_s(None, "build")
    rig.run(text(1), session="a")
    assert not rig.session("a").waiting_tool
    gaps = rig.cache.hints.retention.gaps
    assert 10.0 < before < gaps.gap_s(None, "build") < 42.0
    assert gaps.gap_s(rig.ref("a").key, "build") > 20.0
