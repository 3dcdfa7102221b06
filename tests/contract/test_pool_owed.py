"""A reclaim that is owed ends with the life it is about: whoever opens the session again keeps
what is in the pool, from the moment that its request waits or its prefetch begins."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from harness_pool import (
    in_pool,
    keys_of,
    make_pool,
    manifests_in,
    one_rank,
    outcome,
    settle,
    text,
    wait,
)

from sam.config import SamConfig

__all__ = ["make_pool", "one_rank"]

MAX_JOBS = 4


@pytest.fixture
def rig(make_pool):
    config = SamConfig(raise_on_error=True, pool_group_pages=2, pool_max_jobs=MAX_JOBS)
    return make_pool(config=config)


@contextmanager
def full_worker(rig):
    """As many jobs wait as may; they end with the block, the first one when `one` is set."""
    one, rest, worker = threading.Event(), threading.Event(), rig.cache.pool._worker
    jobs = [worker.submit(one.wait), *(worker.submit(rest.wait) for _ in range(MAX_JOBS - 1))]
    try:
        yield SimpleNamespace(one=one, jobs=jobs)
    finally:
        one.set()
        rest.set()
    wait(rig, lambda: all(job.ready for job in jobs))


def removed(rig):
    return rig.cache.pool.counters["pages_removed"]


def test_what_is_owed_is_done_when_there_is_room(rig, tmp_path):
    rig.run(text(0, 60), session="a")
    settle(rig)
    with full_worker(rig):
        assert outcome(rig, "evict", "a").reason == "pool_busy"
        assert len(rig.cache.pool.backlog.owed) == 1
    settle(rig)
    assert removed(rig) > 0 and not manifests_in(tmp_path)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_request_that_waits_voids_what_is_owed(rig, tmp_path, aborted):
    """Also one that never ends by itself: the session is live all the same."""
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    with full_worker(rig):
        assert outcome(rig, "evict", "a").reason == "pool_busy"
        req = rig.queue(ids, session="a")
        assert not rig.cache.pool.backlog.owed
    settle(rig)
    assert removed(rig) == 0 and len(manifests_in(tmp_path)) == 1
    assert set(keys_of(ids[:-1])) <= in_pool(tmp_path)
    if aborted:
        rig.abort_queued(req)
    else:
        assert rig.admit(req)
        rig.decode(req, 4)
        rig.finish(req)
    settle(rig)
    assert removed(rig) == 0
    assert outcome(rig, "evict", "a").detail["tokens"]["pool"] > 0
    assert not manifests_in(tmp_path)


def test_a_session_that_was_opened_without_a_request_keeps_its_pages(rig, tmp_path):
    """What is owed is looked at once more when its turn comes."""
    rig.run(text(0, 60), session="a")
    settle(rig)
    with full_worker(rig):
        assert outcome(rig, "evict", "a").reason == "pool_busy"
        rig.hint("bind", "a")
        assert rig.session("a").live
    wait(rig, lambda: not rig.cache.pool.backlog.owed)
    settle(rig)
    assert removed(rig) == 0 and len(manifests_in(tmp_path)) == 1


def test_a_prefetch_voids_what_is_owed(make_pool, tmp_path):
    """The server has forgotten the session and finds it in the pool, if it can ask."""
    bounds = {"pool_group_pages": 2, "pool_max_jobs": MAX_JOBS, "max_sessions": 2}
    rig = make_pool(config=SamConfig(raise_on_error=True, **bounds))
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    with full_worker(rig) as full:
        for name in "bc":
            rig.hint("bind", name)
        assert rig.session("a") is None and len(rig.cache.pool.backlog.owed) == 1
        assert rig.hint("prefetch", "a").status == "missing"
        assert len(rig.cache.pool.backlog.owed) == 1
        full.one.set()
        wait(rig, lambda: full.jobs[0].ready)
        rig.hint("prefetch", "a")
        message_id = rig.last_message_id
        assert not rig.cache.pool.backlog.owed
    settle(rig)
    assert rig.later_result(message_id).status == "done" and rig.session("a").live
    assert removed(rig) == 0
    assert set(keys_of(ids[:-1])) <= in_pool(tmp_path)
