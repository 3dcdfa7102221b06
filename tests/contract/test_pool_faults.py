"""What goes wrong in a pool is a miss: nothing leaks, nothing waits, no wrong token."""

import os
import random

import pytest

pytest.importorskip("sglang")

from harness_pool import (
    PAGE,
    SETTINGS,
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
    wait,
)
from sglang.srt.environ import envs

from sam.config import SamConfig
from sam.srt.mem_cache.storage.worker import PoolWorker

__all__ = ["make_pool", "one_rank"]


def check_nothing_in_flight(rig):
    """Case 3: all counters of prefetches are back to where they were."""
    cache, controller = rig.cache, rig.cache.cache_controller
    assert not cache.ongoing_prefetch and not cache.ongoing_backup
    assert controller.prefetch_tokens_occupied == 0
    assert not cache.prefetch_loaded_tokens_by_reqid
    pending = [rid for rid in cache.storage_prefetch_retries._pending if rid.startswith("sam")]
    assert not pending
    assert not cache._storage_prefetch_wait


def test_partial_hit_then_host_pages_are_used_again(make_pool, tmp_path):
    """Case 2: every second page of the tail is gone; the host pool balances."""
    rig = make_pool()
    a = rig.run(text(0, 60), session="a")
    flush(rig)
    gone = keys_of(rig.full_ids(a)[:-1])[9]
    next(tmp_path.glob(f"{gone}*")).unlink()
    for _ in range(3):
        result = outcome(rig, "prefetch", "a")
        assert (result.status, result.reason) == ("clipped", "not_in_pool")
        assert result.detail["tokens"]["pool"] == 9 * PAGE
        rig.check_balance()
        rig.cache.evict_host(1_000)
        rig.run(text(900, 200))
        rig.check_balance()
        flush(rig)
        check_nothing_in_flight(rig)


@pytest.mark.parametrize("how", ["gone", "short", "ended"])
def test_prefetches_that_come_to_nothing_leave_nothing(make_pool, tmp_path, how):
    """Case 3: not in the pool, too short to be fetched, ended meanwhile; then one that works."""
    rig = make_pool(storage={"prefetch_threshold": 32} if how == "short" else None)
    names = [f"s{i}" for i in range(8)]
    for i, name in enumerate(names):
        rig.run(text(100 * i, 10 if how == "short" else 40), session=name)
        settle(rig)
    good = rig.run(text(2_000, 60), session="good")
    flush(rig)
    if how == "gone":
        keep = set(keys_of(rig.full_ids(good)[:-1]))
        for key in in_pool(tmp_path) - keep:
            next(tmp_path.glob(f"{key}*")).unlink()
    ids = {}
    for name in names:
        ids[name] = (rig.hint("prefetch", name), rig.last_message_id)
        if how == "ended":
            rig.hint("evict", name)
    settle(rig)
    results = [rig.later_result(message_id) or first for first, message_id in ids.values()]
    if how != "ended":
        assert {result.status for result in results} <= {"missing", "clipped"}
    assert all(result.detail["tokens"]["device"] == 0 for result in results) or how == "ended"
    check_nothing_in_flight(rig)
    assert outcome(rig, "prefetch", "good").detail["tokens"]["pool"] == 64


def test_refill_under_a_node_that_the_host_lacks(make_pool):
    """Case 4: A on device only, A+B in the pool: A is backed up first."""
    rig = make_pool(write_policy="write_through_selective", storage={"write_policy": None})
    ids = text(0, 60)
    rig.cache.cache_controller.write_policy = "write_through"
    rig.cache.write_through_threshold = 1
    rig.run(ids, session="a")
    flush(rig)
    rig.cache.cache_controller.write_policy = "write_through_selective"
    rig.cache.write_through_threshold = 1_000
    rig.run(ids[:32])
    assert not rig.cache.ongoing_write_through
    result = outcome(rig, "prefetch", "a")
    assert result.status == "done" and result.detail["tokens"]["pool"] > 0
    rig.check_balance()
    rig.cache.sanity_check()
    assert rig.run(ids, session="a").reused >= 60 - PAGE


def test_twelve_prefetches_larger_than_the_host(make_pool):
    """Case 14: some are clipped, none blocks, requests go on, nothing leaks."""
    rig = make_pool(tokens=128, host_ratio=1.5)
    names = [f"s{i}" for i in range(12)]
    for i, name in enumerate(names):
        rig.run(text(200 * i, 60), session=name)
        settle(rig)
    flush(rig)
    sent = []
    for name in names:
        rig.hint("prefetch", name)
        sent.append(rig.last_message_id)
    assert rig.run(text(5_000, 60)).reused == 0
    wait(rig, lambda: all(rig.later_result(message_id) for message_id in sent))
    statuses = [str(rig.later_result(message_id).status) for message_id in sent]
    assert set(statuses) <= {"done", "clipped", "dropped", "missing"}
    assert "done" in statuses and len(set(statuses)) > 1
    check_nothing_in_flight(rig)
    for i, name in enumerate(names):
        run(rig, text(200 * i, 60), session=name)
    settle(rig)


@pytest.mark.parametrize("seed", range(3))
def test_random_failures_and_delays_of_the_backend(make_pool, seed):
    """SGLang's own switches; the rig checks every reused row against what it must hold."""
    rng = random.Random(seed)
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.002),
    ):
        rig = make_pool()
    texts = {name: text(100 * i, 40) for i, name in enumerate("abcd")}
    for _ in range(60):
        name, op = rng.choice("abcd"), rng.random()
        if op < 0.5:
            req, _ = run(rig, texts[name], session=name)
            texts[name] = rig.full_ids(req)[:120]
        elif op < 0.7:
            rig.hint("prefetch", name)
        elif op < 0.8:
            rig.hint("evict", name)
        elif op < 0.9:
            rig.hint("demote", name, release="now")
        else:
            flush(rig)
        rig.step()
        if rng.random() < 0.2:
            settle(rig)
            rig.check_balance()
    settle(rig)
    check_nothing_in_flight(rig)
    assert rig.cache.pool._worker.n_errors == 0


def test_a_damaged_manifest_is_a_miss(make_pool, tmp_path):
    first, second = make_pool(), make_pool()
    first.run(text(0, 60), session="a")
    settle(first)
    (manifest,) = manifests_in(tmp_path)
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(data)
    result = outcome(second, "prefetch", "a")
    assert (result.status, result.reason) == ("missing", "not_in_pool")
    assert second.cache.pool.misses == {"corrupt": 1}


def test_a_damaged_page_ends_the_hit(make_pool, tmp_path):
    """A page file that is too short; the rest is computed."""
    rig = make_pool()
    a = rig.run(text(0, 60), session="a")
    flush(rig)
    page = next(tmp_path.glob(f"{keys_of(rig.full_ids(a)[:-1])[5]}*"))
    page.write_bytes(page.read_bytes()[:-3])
    result = outcome(rig, "prefetch", "a")
    assert result.status in ("clipped", "missing")
    check_nothing_in_flight(rig)
    rig.run(rig.full_ids(a), session="a")


def test_a_pool_that_cannot_be_written(make_pool, tmp_path):
    """The folder is gone, then back: counted, nothing stops, it works again."""
    rig = make_pool()
    settle(rig)
    moved = tmp_path.with_name("moved")
    os.rename(tmp_path, moved)
    rig.run(text(0, 60), session="a")
    settle(rig)
    assert rig.cache.pool._worker.n_errors == 0
    assert rig.cache.pool.counters["manifests_failed"] == 1
    assert rig.cache.pool.transfers.n_refused_pages == 16
    assert outcome(rig, "evict", "a").status == "done"
    os.rename(moved, tmp_path)
    rig.run(text(200, 60), session="b")
    flush(rig)
    assert outcome(rig, "prefetch", "b").detail["tokens"]["pool"] == 64


def test_a_removes_while_b_reads(make_pool, tmp_path):
    """Two servers on one pool: for the reader it is a miss, not an error."""
    a, b = make_pool(), make_pool()
    ids = a.full_ids(a.run(text(0, 120), session="a"))
    settle(a)
    b.hint("prefetch", "a")
    message_id = b.last_message_id
    a.hint("evict", "a")
    settle(a)
    settle(b)
    assert b.later_result(message_id).status in ("done", "clipped", "missing")
    check_nothing_in_flight(b)
    run(b, ids, session="a")
    settle(b)


def test_detach_and_attach_while_sessions_live(make_pool, tmp_path):
    """Case 24."""
    rig = make_pool()
    rig.run(text(0, 60), session="a")
    settle(rig)
    done, why = rig.cache.detach_storage_backend()
    assert done, why
    assert outcome(rig, "prefetch", "a").status == "done"
    assert outcome(rig, "prefetch", "nobody").status == "missing"
    b = rig.run(text(500, 60), session="b")
    assert outcome(rig, "evict", "b").detail["tokens"]["pool"] == 0
    attach(rig, tmp_path)
    flush(rig)
    assert outcome(rig, "prefetch", "a").detail["tokens"]["pool"] == 64
    rig.run(rig.full_ids(b), session="b")
    settle(rig)
    assert outcome(rig, "evict", "a").detail["tokens"]["pool"] > 0


def test_the_cache_is_flushed_while_sessions_live(make_pool, tmp_path):
    """Case 24, what a weights update does: sessions in every state survive as empty, and none
    of their node ids is used again."""
    rig = make_pool(tokens=512)
    ids = {}
    for i, name in enumerate(["idle", "away", "back", "gone"]):
        ids[name] = rig.full_ids(rig.run(text(200 * i, 60), session=name))
        settle(rig)
    assert outcome(rig, "demote", "away", release="now").status == "done"
    assert outcome(rig, "evict", "gone").status == "done"
    rig.hint("prefetch", "back")
    rig.run(text(2_000, 60), session="last")
    settle(rig)
    rig.flush()
    for name in ("idle", "away", "back", "last"):
        assert rig.session(name).live and rig.on_tiers(name) == (0, 0)
    check_nothing_in_flight(rig)
    for name in ("idle", "away", "back"):
        assert outcome(rig, "prefetch", name).detail["tokens"]["pool"] == 64
        assert rig.run(ids[name], session=name).reused == 64
    assert outcome(rig, "evict", "away").detail["tokens"]["pool"] > 0
    settle(rig)


def test_the_pool_is_cleared_while_sessions_live(make_pool, tmp_path):
    """Case 24: what was there is not taken for there, and comes again with the next offload."""
    rig = make_pool()
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    assert rig.cache.clear_storage_backend()
    settle(rig)
    assert not in_pool(tmp_path) and len(rig.cache.pool._ledger) == 0
    assert outcome(rig, "demote", "a").detail["tokens"]["pool"] == 64
    assert in_pool(tmp_path) == set(keys_of(ids[:-1]))
    assert rig.cache.clear_storage_backend()
    flush(rig)
    assert outcome(rig, "prefetch", "a").status == "missing"
    rig.run(ids, session="a")
    flush(rig)
    assert outcome(rig, "prefetch", "a").status == "done"
    assert outcome(rig, "evict", "a").detail["tokens"]["pool"] > 0


def test_manifests_in_the_folder_are_bounded_across_restarts(make_pool, tmp_path):
    bound = SamConfig(raise_on_error=True, pool_group_pages=2, pool_manifest_bytes=1_500)
    for start in (0, 5_000):
        rig = make_pool(config=bound)
        for i in range(8):
            rig.run(text(start + 100 * i, 60), session=f"s{start + i}")
            settle(rig)
        assert sum(file.stat().st_size for file in manifests_in(tmp_path)) <= 1_500
    assert 1 < len(manifests_in(tmp_path)) < 8
    assert outcome(rig, "prefetch", "s5007").status == "done"


def test_what_waits_is_done_before_the_end(make_pool, tmp_path):
    rig = make_pool()
    for i in range(10):
        rig.run(text(100 * i, 20), session=f"s{i}")
        rig.step()
    rig.cache.pool.close()
    assert len(manifests_in(tmp_path)) == 10


def test_without_a_pool_nothing_is_kept(one_rank, make_rig):
    rig = make_rig(**SETTINGS, config=SamConfig(raise_on_error=True))
    rig.run(text(0, 60), session="a")
    assert len(rig.cache.pool.manifests) == 0 and rig.cache.pool._worker._thread is None
    assert outcome(rig, "evict", "a").detail["tokens"]["pool"] == 0


def test_worker_bounds_what_waits():
    import threading

    go, worker = threading.Event(), PoolWorker(max_jobs=3)
    jobs = [worker.submit(go.wait), *(worker.submit(lambda i=i: i) for i in range(2))]
    assert worker.submit(lambda: 9) is None and worker.n_refused == 1
    ran = []
    for i in range(5):
        worker.submit_latest("a", lambda i=i: ran.append(i))
    worker.seal("a")
    worker.submit_latest("a", lambda: ran.append("sealed"))
    worker.submit_latest("b", lambda: ran.append("b"))
    worker.submit_latest("c", lambda: 1 / 0)
    worker.submit_latest("d", lambda: ran.append("d"))
    go.set()
    while worker.n_waiting or worker.n_finished() < 3:
        pass
    assert worker.take(3) == jobs and [job.result for job in jobs] == [True, 0, 1]
    last = worker.submit(lambda: "last")
    while not last.finished:
        pass
    assert ran == [4, "sealed", "b"] and worker.n_errors == 1 and worker.n_refused == 2
    worker.stop(5.0)
