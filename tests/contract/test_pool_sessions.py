"""Sessions in a real pool: remembered, reclaimed, fetched by id; `file` backend, in-process."""

from array import array

import pytest

pytest.importorskip("sglang")

from harness_pool import (
    PAGE,
    attach,
    flush,
    in_pool,
    keys_of,
    make_pool,
    manifests_in,
    one_rank,
    outcome,
    run,
    settle,
    text,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sam.config import SamConfig
from sam.srt.mem_cache.inspect import sessions_report

__all__ = ["make_pool", "one_rank"]
pytestmark = pytest.mark.usefixtures("one_rank")


def test_evict_takes_private_pages_out_of_the_pool(make_pool, tmp_path):
    rig = make_pool()
    a = rig.run(text(0, 60), session="a")
    b = rig.run(text(500, 60), session="b")
    settle(rig)
    pages = keys_of(rig.full_ids(a)[:-1])
    assert in_pool(tmp_path) == {*pages, *keys_of(rig.full_ids(b)[:-1])}
    assert len(manifests_in(tmp_path)) == 2
    result = outcome(rig, "evict", "a")
    assert result.status == "done"
    assert result.detail["tokens"]["pool"] == (len(pages) - 2) * PAGE
    assert result.detail["tokens"]["device"] == len(pages) * PAGE
    assert in_pool(tmp_path) == {*pages[:2], *keys_of(rig.full_ids(b)[:-1])}
    assert len(manifests_in(tmp_path)) == 1


def test_what_siblings_share_stays(make_pool, tmp_path):
    """Case 16 in the pool: the sibling that runs later gets the shared prefix from there."""
    rig = make_pool()
    shared = text(0, 40)
    rig.run([*shared, *text(700, 24)], session="a")
    b = rig.run([*shared, *text(800, 24)], session="b")
    settle(rig)
    before = in_pool(tmp_path)
    result = outcome(rig, "evict", "a")
    assert 0 < result.detail["tokens"]["pool"] <= 24
    assert set(keys_of(rig.full_ids(b)[:-1])) <= in_pool(tmp_path) < before
    flush(rig)
    _, fetched = run(rig, [*shared, *text(800, 24)], session="b")
    assert fetched >= 60


def test_evict_when_no_tree_holds_anything_of_it(make_pool, tmp_path):
    rig = make_pool()
    a = rig.run(text(0, 60), session="a")
    flush(rig)
    result = outcome(rig, "evict", "a")
    assert result.detail["tokens"] == {"device": 0, "host": 0, "pool": 56}
    assert in_pool(tmp_path) == set(keys_of(rig.full_ids(a)[:-1])[:2])
    assert not manifests_in(tmp_path)


def test_branches_that_a_session_left_go_too(make_pool, tmp_path):
    rig = make_pool()
    rig.run(text(0, 60), session="a")
    settle(rig)
    rig.run([*text(0, 20), *text(300, 40)], session="a")
    settle(rig)
    result = outcome(rig, "evict", "a")
    assert in_pool(tmp_path) == set(keys_of(text(0, 8)))
    assert result.detail["tokens"]["pool"] == (14 + 11) * PAGE


def test_cascade_over_all_tiers(make_pool, tmp_path):
    """Case 17: the root never ran; children two levels deep, one on host, one in the pool."""
    rig = make_pool()
    rig.run(text(0, 48), session="child", parent_session_id="root")
    rig.run(text(400, 48), session="grand", parent_session_id="child")
    flush(rig)
    rig.run(text(200, 48), session="other", parent_session_id="root")
    settle(rig)
    rig.hint("demote", "other", release="now")
    settle(rig)
    assert rig.on_tiers("other")[0] == 0 < rig.on_tiers("other")[1]
    result = outcome(rig, "evict", "root", scope="subtree")
    assert result.status == "done"
    tokens = result.detail["tokens"]
    assert tokens["host"] > 0 and tokens["pool"] == 3 * (13 - 2) * PAGE
    assert len(in_pool(tmp_path)) == 3 * 2 and not manifests_in(tmp_path)


def test_a_session_that_resumes_meanwhile_keeps_its_pages(make_pool, tmp_path):
    """Case 11 in the pool: the next life's pages are not taken by the evict of the last."""
    rig = make_pool()
    rig.run(text(0, 60), session="a")
    settle(rig)
    rig.hint("evict", "a")
    a = rig.run(text(0, 60), session="a")
    settle(rig)
    flush(rig)
    assert rig.session("a").generation == 2
    assert len(manifests_in(tmp_path)) == 1
    req, _ = run(rig, rig.full_ids(a), session="a")
    assert rig.full_ids(req)[: len(rig.full_ids(a))] == rig.full_ids(a)


def test_an_aged_out_session_leaves_the_pool(make_pool, tmp_path):
    config = SamConfig(raise_on_error=True, pool_group_pages=2, session_idle_timeout_s=10)
    rig = make_pool(config=config)
    rig.run(text(0, 60), session="a")
    settle(rig)
    rig.clock += 60
    rig.run(text(500, 20), session="b")
    settle(rig)
    assert set(keys_of(text(0, 60))) & in_pool(tmp_path) == set(keys_of(text(0, 8)))
    assert len(manifests_in(tmp_path)) == 1


def test_a_range_takes_its_pages_along(make_pool, tmp_path):
    rig = make_pool()
    a = rig.run(text(0, 60), session="a")
    settle(rig)
    pages = keys_of(rig.full_ids(a)[:-1])
    span = {"target": "tokens", "start": 32, "token_ids": array("i", rig.full_ids(a)).tobytes()}
    result = outcome(rig, "evict", "a", **span)
    assert result.status == "done"
    assert result.detail["tokens"]["pool"] == (len(pages) - 8) * PAGE
    settle(rig)
    assert in_pool(tmp_path) == set(pages[:8])
    flush(rig)
    assert outcome(rig, "prefetch", "a").detail["tokens"]["pool"] == 32


def test_prefetch_from_the_pool_when_the_tree_is_empty(make_pool):
    rig = make_pool()
    a = rig.run(text(0, 60), session="a")
    flush(rig)
    result = outcome(rig, "prefetch", "a")
    assert result.status == "done"
    assert result.detail["tokens"] == {"device": 64, "host": 0, "pool": 64}
    assert rig.session("a").state == "resuming"
    req = rig.run(rig.full_ids(a), session="a")
    assert req.reused == 64


def test_prefetch_by_id_on_another_server(make_pool):
    """Session offloaded on one server, prefetched by id on one that never saw it."""
    first, second = make_pool(), make_pool()
    a = first.run(text(0, 60), session="a", cache_salt=None)
    settle(first)
    result = outcome(second, "prefetch", "a")
    assert result.status == "done", result
    assert result.detail["tokens"] == {"device": 64, "host": 0, "pool": 64}
    req = second.run(first.full_ids(a), session="a")
    assert req.reused == 64
    assert second.cache.pool.counters["manifests_read"] == 1


def test_evict_by_id_on_another_server(make_pool, tmp_path):
    """What its manifest names as private goes, a sibling's pages stay."""
    first, second = make_pool(), make_pool()
    shared = text(0, 40)
    first.run([*shared, *text(700, 24)], session="a")
    settle(first)
    b = first.run([*shared, *text(800, 24)], session="b")
    settle(first)
    before, theirs = in_pool(tmp_path), set(keys_of(first.full_ids(b)[:-1]))
    result = outcome(second, "evict", "a")
    assert result.status == "done"
    n_gone = len(before - in_pool(tmp_path))
    assert result.detail["tokens"]["pool"] == n_gone * PAGE > 0
    assert theirs <= in_pool(tmp_path) and len(manifests_in(tmp_path)) == 1
    assert outcome(second, "evict", "a").reason == "not_in_pool"
    assert second.session("a") is None


def test_prefetch_of_what_nobody_knows_is_missing(make_pool):
    rig = make_pool()
    rig.run(text(0, 60), session="a")
    settle(rig)
    result = outcome(rig, "prefetch", "nobody")
    assert (result.status, result.reason) == ("missing", "not_in_pool")
    assert rig.session("nobody") is None
    assert rig.cache.pool.misses == {"absent": 1}


def test_only_what_is_missing_is_fetched(make_pool):
    rig = make_pool()
    a = rig.run(text(0, 32), session="a")
    b = rig.run([*rig.full_ids(a), *text(300, 24)], session="a")
    flush(rig)
    head, _ = run(rig, text(0, 32))
    settle(rig)
    result = outcome(rig, "prefetch", "a")
    assert result.status == "done"
    assert result.detail["tokens"]["pool"] == 64 - len(rig.full_ids(head)[:-1]) // 4 * 4
    assert rig.run(rig.full_ids(b), session="a").reused == len(rig.full_ids(b)) // 4 * 4


def test_a_request_takes_over_what_is_under_way(make_pool):
    """Case 20's other half: the request comes while the pool still answers."""
    rig = make_pool()
    a = rig.run(text(0, 60), session="a")
    flush(rig)
    rig.hint("prefetch", "a")
    message_id = rig.last_message_id
    req, fetched = run(rig, rig.full_ids(a), session="a")
    result = rig.later_result(message_id)
    assert result.reason == "resumed"
    assert fetched + result.detail["tokens"]["pool"] == req.reused == 64
    assert rig.cache.cache_controller.prefetch_tokens_occupied == 0


def test_another_tenant_gets_nothing(make_pool):
    """Case 8: B names A's session id, with and without A's salt."""
    rig = make_pool()
    ids = text(0, 60)
    rig.run(ids, session="a")
    flush(rig)
    envelope = rig.envelope([("prefetch", "a", {"tenant": "other"})])
    assert rig.submit(envelope)[0].status == "deferred"
    settle(rig)
    assert rig.later_result().status == "missing"
    envelope = rig.envelope([("evict", "a", {"tenant": "other"})])
    rig.submit(envelope)
    settle(rig)
    assert rig.later_result(envelope["message_id"]).status == "missing"
    assert outcome(rig, "prefetch", "a").status == "done"


def test_offload_reaches_the_pool(make_pool, tmp_path):
    """Also of what lay on the host before the pool was attached."""
    rig = make_pool()
    done, why = rig.cache.detach_storage_backend()
    assert done, why
    a = rig.run(text(0, 60), session="a")
    for _ in range(4):
        rig.step()
    assert rig.on_tiers("a") == (64, 64)
    attach(rig, tmp_path)
    assert not in_pool(tmp_path)
    result = outcome(rig, "demote", "a", release="now")
    assert result.status == "done"
    assert result.detail["tokens"] == {"device": 64, "host": 0, "pool": 64}
    assert in_pool(tmp_path) == set(keys_of(rig.full_ids(a)[:-1]))
    assert outcome(rig, "demote", "a").detail["tokens"]["pool"] == 0


def test_a_request_does_not_wait_for_an_offload_to_the_pool(make_pool, tmp_path):
    rig = make_pool()
    a = rig.run(text(0, 60), session="a")
    rig.hint("demote", "a")
    message_id = rig.last_message_id
    rig.queue(rig.full_ids(a), session="a", rid="next")
    rig.cache.hints.poll()
    result = rig.later_result(message_id)
    settle(rig)
    result = result or rig.later_result(message_id)
    assert result.status in ("done", "clipped")
    rig.abort_queued(rig.queued["next"])


def test_inspection_shows_the_pool(make_pool):
    rig = make_pool()
    rig.run(text(0, 60), session="a")
    settle(rig)
    report = sessions_report(rig.cache, 0, 10)
    assert report["sessions"][0]["tokens"]["pool"] == {"private": 56, "shared": 8}
    assert report["summary"]["pool"]["manifests"] == 1
    outcome(rig, "evict", "a")
    report = sessions_report(rig.cache, 0, 10)
    assert report["sessions"][0]["tokens"]["pool"] == {"private": 0, "shared": 0}
    assert report["summary"]["pool"]["pages_removed"] == 14


def test_what_was_shared_before_a_restart_stays(make_pool, tmp_path):
    """The new server never saw the sibling: the session's manifest says how much is shared."""
    first, second = make_pool(), make_pool()
    shared = text(0, 40)
    a = first.run([*shared, *text(700, 24)], session="a")
    settle(first)
    b = first.run([*shared, *text(800, 24)], session="b")
    settle(first)
    theirs = set(keys_of(first.full_ids(b)[:-1]))
    before = in_pool(tmp_path)
    run(second, first.full_ids(a)[:64], session="a")
    settle(second)
    assert outcome(second, "evict", "a").detail["tokens"]["pool"] > 0
    assert theirs <= in_pool(tmp_path) < before


def test_pages_of_unknown_origin_stay(make_pool, tmp_path):
    """A session that finds pages in the pool, on a server that does not know whose they are."""
    first, second = make_pool(), make_pool()
    b = first.run(text(0, 60), session="b")
    settle(first)
    ids = [*first.full_ids(b)[:48], *text(300, 24)]
    _, fetched = run(second, ids, session="c")
    assert fetched == 48
    run(second, [*ids, *text(400, 8)], session="c")
    settle(second)
    assert outcome(second, "evict", "c").detail["tokens"]["pool"] > 0
    assert set(keys_of(first.full_ids(b)[:-1])) <= in_pool(tmp_path)


@pytest.mark.parametrize("in_the_pool", [True, False])
def test_offloaded_host_copies_in_the_pool_give_way_first(make_pool, in_the_pool):
    """Of two sessions on the host only, the older one goes unless the newer is stored below."""
    rig = make_pool()
    if not in_the_pool:
        done, why = rig.cache.detach_storage_backend()
        assert done, why
    for i, name in enumerate(["old", "new"]):
        rig.run(text(100 * i, 60), session=name)
        settle(rig)
        rig.clock += 5
    assert outcome(rig, "demote", "new", release="now").status == "done"
    rig.cache.evict(EvictParams(num_tokens=64))
    settle(rig)
    assert rig.on_tiers("old") == rig.on_tiers("new") == (0, 64)
    rig.cache.evict_host(4)
    gone, kept = ("new", "old") if in_the_pool else ("old", "new")
    assert (rig.on_tiers(gone), rig.on_tiers(kept)) == ((0, 60), (0, 64))
