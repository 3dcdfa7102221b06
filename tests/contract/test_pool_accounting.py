"""The pool's books are what lies in the folder: by state, by tenant, peak, removed, refused."""

import pytest

pytest.importorskip("sglang")

import recording_storage
from harness_pool import (
    flush,
    in_pool,
    keys_of,
    make_pool,
    one_rank,
    outcome,
    settle,
    text,
    wait,
)

from sam.config import SamConfig
from sam.srt.mem_cache.inspect import sessions_report

__all__ = ["make_pool", "one_rank"]

PAGE_BYTES = 256


def books(rig):
    """The report after a measurement that saw all that happened before."""
    settle(rig)
    pool = rig.cache.pool
    job = pool._worker.submit(pool._measure)
    wait(rig, lambda: job.ready)
    return sessions_report(rig.cache, 0, 1)["summary"]["pool"]


def on_disk(folder):
    return sum(path.stat().st_size for path in folder.glob("*.bin"))


def test_bytes_follow_the_states_of_sessions(make_pool, tmp_path):
    rig = make_pool()
    for i, name in enumerate(["idle", "away", "back", "busy"]):
        rig.run(text(500 * i, 60), session=name)
        settle(rig)
    assert outcome(rig, "demote", "away").status == "done"
    flush(rig)
    assert outcome(rig, "prefetch", "back").status == "done"
    req = rig.queue(text(1_500, 60), session="busy")
    found = books(rig)
    own = 14 * PAGE_BYTES
    assert found["bytes_by_state"] == {
        "running": own,
        "resuming": own,
        "idle": own,
        "offloaded": own,
        "ended": 0,
        "shared": 4 * 2 * PAGE_BYTES,
    }
    assert found["bytes"] == found["bytes_peak"] == on_disk(tmp_path)
    rig.abort_queued(req)
    assert outcome(rig, "evict", "busy").status == "done"
    after = books(rig)
    assert after["bytes_by_state"]["running"] == 0
    assert after["bytes_removed"] == own
    assert after["bytes_peak"] == found["bytes_peak"] == after["bytes"] + own + 2 * PAGE_BYTES
    assert after["bytes"] == on_disk(tmp_path) - 2 * PAGE_BYTES, "the first group of 'busy' stays"


def test_what_is_shared_counts_once_and_owners_are_told_apart(make_pool, tmp_path):
    rig = make_pool()
    shared = text(0, 40)
    rig.run([*shared, *text(700, 24)], session="a")
    settle(rig)
    rig.run([*shared, *text(800, 24)], session="b")
    settle(rig)
    envelope = rig.envelope([("bind", "c", {"tenant": "other"})])
    rig.run(text(2_000, 60), envelope=envelope)
    found = books(rig)
    assert found["bytes"] == on_disk(tmp_path)
    assert list(found["bytes_by_tenant"]) == ["t", "other"]
    assert found["bytes_by_tenant"]["other"] == 16 * PAGE_BYTES
    assert sum(found["bytes_by_tenant"].values()) == found["bytes"]


def test_owners_in_the_report_are_bounded(make_pool):
    rig = make_pool(tokens=1_024)
    for i in range(20):
        envelope = rig.envelope([("bind", "s", {"tenant": f"t{i:02}"})])
        rig.run(text(100 * i, 20 + i), envelope=envelope)
        settle(rig)
    found = books(rig)["bytes_by_tenant"]
    assert len(found) == 17 and list(found)[-1] == "(others)"
    assert sum(found.values()) == books(rig)["bytes"]


def test_measured_by_itself(make_pool):
    """Without anybody asking for it, and not on the scheduler thread."""
    rig = make_pool()
    rig.cache.pool.account.period_s = 1e-3
    rig.run(text(0, 60), session="a")
    wait(rig, lambda: sessions_report(rig.cache, 0, 1)["summary"]["pool"]["bytes"] > 0)


def test_metrics_have_a_bounded_number_of_series(make_pool):
    from prometheus_client import REGISTRY

    from sam.srt.mem_cache.storage.accounting import SHARED, STATES
    from sam.srt.observability.pool_metrics import PoolMetrics

    rig = make_pool(tokens=1_024)
    metrics = rig.cache.pool.account.metrics = PoolMetrics((*STATES, SHARED))
    try:
        for i in range(8):
            envelope = rig.envelope([("bind", "s", {"tenant": f"t{i}"})])
            rig.run(text(100 * i, 20 + 4 * i), envelope=envelope)
            settle(rig)
        found = books(rig)

        def value(name, **labels):
            return REGISTRY.get_sample_value(f"sglang:sam_pool_{name}", labels)

        by_state = {state: value("bytes", state=state) for state in found["bytes_by_state"]}
        assert by_state == found["bytes_by_state"]
        sizes = list(found["bytes_by_tenant"].values())
        places = [value("owner_bytes", place=place) for place in ("1", "2", "3", "4", "rest")]
        assert places == [*sizes[:4], sum(sizes[4:])]
        assert value("peak_bytes") == found["bytes"]
        outcome(rig, "prefetch", "nobody")
        rig.submit(rig.envelope([("evict", "s", {"tenant": "t7"})]))
        found = books(rig)
        assert value("reclaimed_bytes_total") == found["bytes_removed"] > 0
        assert value("taken_bytes_total") == found["bytes_taken"] > 0
        assert value("refused_bytes_total") == value("damaged_pages_total") == 0
    finally:
        for collector in [*vars(metrics).values(), *metrics._counters.values()]:
            if hasattr(collector, "collect"):
                REGISTRY.unregister(collector)


def test_a_full_folder_refuses_and_that_is_counted(make_pool, tmp_path):
    """The `file` backend's own bound, smaller than one request, and its pages."""
    rig = make_pool(storage={"max_size": str(3 * PAGE_BYTES), "eviction_ratio": 1.0})
    rig.cache.cache_controller.storage_backend._evictor.max_size_bytes = PAGE_BYTES - 1
    rig.run(text(0, 60), session="a")
    found = books(rig)
    assert found["bytes_refused"] == 16 * PAGE_BYTES and found["bytes_taken"] == 0
    rig.cache.cache_controller.storage_backend._evictor.max_size_bytes = 1 << 20
    result = outcome(rig, "demote", "a")
    assert (result.status, result.detail["tokens"]["pool"]) == ("done", 64)
    assert books(rig)["bytes_taken"] == on_disk(tmp_path) == 16 * PAGE_BYTES


def test_an_offload_that_the_pool_refuses_says_so(make_pool, tmp_path):
    rig = make_pool(config=SamConfig(raise_on_error=True, pool_group_pages=2))
    evictor_size = {"max_size": str(1 << 20), "eviction_ratio": 1.0}
    rig = make_pool(storage=evictor_size)
    evictor = rig.cache.cache_controller.storage_backend._evictor
    evictor.max_size_bytes = PAGE_BYTES - 1
    rig.run(text(0, 60), session="a")
    settle(rig)
    result = outcome(rig, "demote", "a", release="now")
    assert (result.status, result.reason) == ("clipped", "pool_refused")
    assert result.detail["tokens"] == {"device": 64, "host": 0, "pool": 0}
    assert not in_pool(tmp_path)
    evictor.max_size_bytes = 1 << 20
    result = outcome(rig, "demote", "a")
    assert (result.status, result.detail["tokens"]["pool"]) == ("done", 64)


def test_writes_say_whose_they_are(make_pool, tmp_path):
    """In `extra_info`, of a backend that SGLang loads by name; others see no difference."""
    recording_storage.SEEN.clear()
    rig = make_pool(
        storage={
            "backend": "dynamic",
            "backend_name": "recording",
            "module_path": "recording_storage",
            "class_name": "RecordingStorage",
            "interface_v1": 1,
        }
    )
    a = rig.run(text(0, 60), session="a")
    settle(rig)
    nobody = rig.run(text(500, 20))
    settle(rig)
    shared = rig.run(text(700, 20), session="default_session")
    settle(rig)
    b = rig.run([*text(0, 40), *text(900, 24)], session="b")
    settle(rig)
    told = {}
    for key, info in recording_storage.SEEN:
        told.setdefault(key, info)
    for req, info in ((a, "a"), (nobody, None), (shared, None)):
        expected = None if info is None else {"session_id": info}
        assert {repr(told[key]) for key in keys_of(rig.full_ids(req)[:-1])} == {repr(expected)}
    of_b = [told[key] for key in keys_of(rig.full_ids(b)[:-1])]
    assert of_b == [{"session_id": "a"}] * 10 + [{"session_id": "b"}] * 7
    flush(rig)
    assert outcome(rig, "prefetch", "a").detail["tokens"]["pool"] == 64
