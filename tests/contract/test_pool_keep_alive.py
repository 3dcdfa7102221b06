"""Case 13: live sessions' pages outlive a flood, within a budget, and others find room."""

import pytest

pytest.importorskip("sglang")

from harness_pool import (
    attach,
    flush,
    in_pool,
    keys_of,
    make_pool,
    one_rank,
    outcome,
    settle,
    text,
    wait,
    worker_is_idle,
)

from sam.config import SamConfig
from sam.srt.mem_cache.storage.reclaim import Removed

__all__ = ["make_pool", "one_rank"]

PAGE_BYTES = 256
ROOM = 64
"""Pages that the folder may hold."""


def config(**changes):
    return SamConfig(
        **{"raise_on_error": True, "pool_group_pages": 2, "pool_keep_alive_s": 1e-4} | changes
    )


def make(make_pool, **changes):
    storage = {"max_size": str(ROOM * PAGE_BYTES), "eviction_ratio": 1.0}
    return make_pool(config=config(**changes), storage=storage)


def flood(rig, n_requests=10):
    """Requests of nobody, several times what the folder holds; the last one's tokens."""
    for i in range(n_requests):
        last = rig.run(text(1_000 + 100 * i, 60))
        settle(rig)
    return rig.full_ids(last)


def test_a_live_session_survives_a_flood(make_pool, tmp_path):
    rig = make(make_pool)
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    last = flood(rig)
    assert set(keys_of(ids[:-1])) <= in_pool(tmp_path)
    assert set(keys_of(last[:-1])) <= in_pool(tmp_path), "others' writes were refused"
    assert len(in_pool(tmp_path)) <= ROOM
    flush(rig)
    assert outcome(rig, "prefetch", "a").detail["tokens"]["pool"] == 64


def test_without_keep_alive_the_flood_takes_it(make_pool, tmp_path):
    """What the test above would see if nothing were renewed."""
    rig = make(make_pool, pool_keep_alive_s=0.0)
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    flood(rig)
    assert not set(keys_of(ids[:-1])) & in_pool(tmp_path)
    assert rig.cache.pool.keep_alive.n_rounds == 0


def test_no_more_than_the_budget_is_kept(make_pool, tmp_path):
    """From the root on: the rest is of no use without it."""
    rig = make(make_pool, pool_keep_alive_bytes=8 * PAGE_BYTES)
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    flood(rig)
    pages = keys_of(ids[:-1])
    assert in_pool(tmp_path) & set(pages) == set(pages[:8])
    assert rig.cache.pool.keep_alive.n_over_budget > 0


def test_an_ended_session_is_not_kept(make_pool, tmp_path):
    rig = make(make_pool)
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    assert outcome(rig, "evict", "a").status == "done"
    assert len(rig.cache.pool.keep_alive) == 0
    flood(rig)
    assert not set(keys_of(ids[:-1])) & in_pool(tmp_path)


def test_what_a_pool_lost_is_written_again(make_pool, tmp_path):
    """Somebody empties the folder: the host's copies go there with the next offload."""
    rig = make_pool(config=config())
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    pages, keep_alive = set(keys_of(ids[:-1])), rig.cache.pool.keep_alive
    wait(rig, lambda: keep_alive.n_found == len(pages))
    assert outcome(rig, "demote", "a").detail["tokens"]["pool"] == 0, "it is all there"
    assert rig.cache.pool.report()["losses_seen"] == 0
    for path in tmp_path.glob("*.bin"):
        path.unlink()
    wait(rig, lambda: keep_alive.n_losses and keep_alive.n_found == 0)
    assert outcome(rig, "demote", "a").detail["tokens"]["pool"] == 64
    assert pages <= in_pool(tmp_path)
    flush(rig)
    assert outcome(rig, "prefetch", "a").detail["tokens"]["pool"] == 64
    assert rig.run(ids, session="a").reused == 64


def test_what_is_taken_out_on_purpose_is_no_loss(make_pool, tmp_path):
    """Its id comes back with the same context at once: its pages are expected, not yet there."""
    rig = make_pool(config=config(pool_keep_alive_s=3_600.0))
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    worker_is_idle(rig)
    pool, backend = rig.cache.pool, rig.cache.cache_controller.storage_backend
    pages = [bytes.fromhex(page) for page in keys_of(ids[:-1])]
    pool.keep_alive.renew(backend, lambda key: pages, PAGE_BYTES)
    assert pool.keep_alive.n_found == len(pages)
    pool._remove_pages(pages, Removed())
    pool.keep_alive.renew(backend, lambda key: pages, PAGE_BYTES)
    assert pool.keep_alive.n_found == pool.keep_alive.n_losses == 0


def test_a_pool_that_does_not_answer_is_not_asked_again_and_again(make_pool, tmp_path):
    rig = make_pool(config=config(pool_keep_alive_s=3_600.0))
    rig.run(text(0, 60), session="a")
    settle(rig)
    worker_is_idle(rig)
    rounds = rig.cache.pool.keep_alive.n_rounds
    for _ in range(20):
        rig.step()
    worker_is_idle(rig)
    assert rig.cache.pool.keep_alive.n_rounds == rounds <= 1
    done, why = rig.cache.detach_storage_backend()
    assert done, why
    rig.step()
    attach(rig, tmp_path)
