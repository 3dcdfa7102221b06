"""The `file` pool on a disk that is full, read-only, gone, slow or damaged, and two servers that
must not read each other's pages. Requests go on with the right KV (the rig checks every row that
it reuses), what was lost is counted, one line says why, and nothing has to be restarted.
"""

import logging
import os
import shutil
import subprocess

import pytest

pytest.importorskip("sglang")

import torch
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
    wait,
)
from sglang.srt.environ import envs

from sam.config import SamConfig
from sam.srt.mem_cache.inspect import sessions_report
from sam.srt.observability.log_limit import LOGGERS, OncePerPlace

__all__ = ["make_pool", "one_rank"]

N_PAGES = 16
"""Of one request in these tests."""


class Disk:
    """A small file system of its own."""

    def __init__(self, folder):
        self.folder = folder

    def set(self, options):
        subprocess.run(["mount", "-o", f"remount,{options}", self.folder], check=True)


@pytest.fixture
def disk(tmp_path):
    """Room for four pages; a block is 4 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=777", "sam-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield Disk(str(folder))
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def said(caplog):
    """Our own lines about the pool, from warnings on."""
    caplog.set_level(logging.INFO, logger="sam")

    def lines(level=logging.WARNING):
        records = [r for r in caplog.records if r.name.startswith("sam.") and r.levelno >= level]
        return [record.getMessage() for record in records]

    return lines


def books(rig):
    return sessions_report(rig.cache, 0, 1)["summary"]["pool"]


def pool_works(rig, name):
    """A new session goes to the pool and comes back from it whole."""
    a = rig.run(text(3_000, 60), session=name)
    flush(rig)
    result = outcome(rig, "prefetch", name)
    assert (result.status, result.detail["tokens"]["pool"]) == ("done", N_PAGES * PAGE)
    assert rig.run(rig.full_ids(a), session=name).reused == N_PAGES * PAGE


def test_a_full_disk(make_pool, disk, said):
    rig = make_pool(storage={"file_storage_path": disk.folder})
    for i in range(3):
        a = rig.run(text(100 * i, 60), session=f"s{i}")
        settle(rig)
    assert 0 < len(os.listdir(disk.folder)) <= 4
    pool = rig.cache.pool
    assert pool.transfers.n_refused_pages >= 2 * N_PAGES and not pool.transfers.refused
    assert pool.counters["manifests_failed"] >= 1 and pool._worker.n_errors == 0
    (line,) = said()
    assert "refuses" in line and "0 bytes" in line and disk.folder in line
    flush(rig)
    rig.run(rig.full_ids(a), session="s2")
    settle(rig)
    disk.set("size=1m")
    pool_works(rig, "later")
    assert len(said()) == 1 and "takes" in said(logging.INFO)[-1]


def test_a_read_only_disk(make_pool, disk, said):
    disk.set("size=1m")
    rig = make_pool(storage={"file_storage_path": disk.folder})
    a = rig.run(text(0, 60), session="a")
    flush(rig)
    disk.set("ro")
    rig.run(text(500, 60), session="b")
    settle(rig)
    result = outcome(rig, "prefetch", "a")
    assert result.detail["tokens"]["pool"] == N_PAGES * PAGE, "what is there can be read"
    assert rig.run(rig.full_ids(a), session="a").reused == N_PAGES * PAGE
    settle(rig)
    (line,) = said()
    assert "read-only" in line
    result = outcome(rig, "evict", "a")
    assert (result.status, result.detail["tokens"]["pool"]) == ("done", 0)
    disk.set("rw")
    pool_works(rig, "later")
    assert rig.cache.pool.transfers.n_refused_pages >= N_PAGES


def test_a_folder_that_is_deleted(make_pool, tmp_path, said):
    folder = tmp_path / "pool"
    rig = make_pool(storage={"file_storage_path": str(folder)})
    a = rig.run(text(0, 60), session="a")
    flush(rig)
    shutil.rmtree(folder)
    result = outcome(rig, "prefetch", "a")
    assert (result.status, result.reason) == ("missing", "not_in_pool")
    rig.run(rig.full_ids(a), session="a")
    rig.run(text(500, 60), session="b")
    settle(rig)
    (line,) = said()
    assert "No such file or directory" in line and str(folder) in line
    assert rig.cache.pool._worker.n_errors == 0
    assert outcome(rig, "evict", "a").status == "done"
    folder.mkdir()
    pool_works(rig, "later")


@pytest.mark.parametrize("n_bytes", [0, 100, 300])
def test_page_files_of_the_wrong_length(make_pool, tmp_path, said, n_bytes):
    """Cut by a crash, say: a miss, then computed and written anew; longer ones are foreign."""
    rig = make_pool()
    a = rig.run(text(0, 60), session="a")
    flush(rig)
    key = keys_of(rig.full_ids(a)[:-1])[5]
    page = next(tmp_path.glob(f"{key}*"))
    page.write_bytes((page.read_bytes() * 2)[:n_bytes])
    result = outcome(rig, "prefetch", "a")
    if n_bytes > 256:
        assert result.status == "done", "the page itself is whole: only its beginning is read"
        return
    assert result.status in ("missing", "clipped") and not page.exists()
    assert books(rig)["pages_damaged"] == 1
    (line,) = said()
    assert "wrong length" in line
    req, _ = run(rig, rig.full_ids(a), session="a")
    flush(rig)
    assert page.exists()
    assert outcome(rig, "prefetch", "a").status == "done"
    assert rig.run(rig.full_ids(a), session="a").reused == N_PAGES * PAGE


def test_a_request_of_nobody_finds_a_damaged_page(make_pool, tmp_path):
    """What the scheduler itself fetches is watched as well."""
    rig = make_pool()
    a = rig.run(text(0, 60))
    flush(rig)
    page = next(tmp_path.glob(f"{keys_of(rig.full_ids(a)[:-1])[5]}*"))
    page.write_bytes(b"")
    _, fetched = run(rig, rig.full_ids(a))
    assert fetched < 5 * PAGE + 1 and rig.cache.pool.transfers.n_damaged_pages == 1
    flush(rig)
    _, fetched = run(rig, rig.full_ids(a))
    assert fetched == N_PAGES * PAGE


def test_a_slow_pool_holds_nobody_back(make_pool, tmp_path):
    """Hints that would wait too long are dropped and said to be; what is owed is done later."""
    config = SamConfig(raise_on_error=True, pool_group_pages=2, pool_max_jobs=2)
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.05):
        rig = make_pool(config=config, tokens=1_024)
    names = [f"s{i}" for i in range(6)]
    for i, name in enumerate(names):
        rig.run(text(100 * i, 40), session=name)
    settle(rig)
    ids, at_once = [], []
    wait(rig, lambda: not rig.cache.pool.backlog.late)
    settle(rig)
    for name in names:
        at_once.append(rig.hint("evict", name).reason)
        ids.append(rig.last_message_id)
    assert rig.run(text(2_000, 40), session="other").reused == 0
    backlog = rig.cache.pool.backlog
    wait(rig, lambda: not backlog.owed and not backlog.late)
    settle(rig)
    assert rig.cache.pool._worker.n_refused >= 4
    reasons = [rig.later_result(i).reason if rig.later_result(i) else "" for i in ids]
    assert reasons.count("pool_busy") >= 1 or "pool_busy" in at_once
    left = {key for i in range(6) for key in keys_of(text(100 * i, 8))}
    own = set(keys_of(text(2_000, 40)))
    assert in_pool(tmp_path) - own <= left | in_pool_of(rig, "other")
    assert len(manifests_in(tmp_path)) == 1
    assert rig.cache.pool._worker.n_errors == 0


def in_pool_of(rig, name):
    pages = rig.cache.pool._ledger.pages(rig.ref(name).key)
    return {page.hex() for page in pages}


@pytest.mark.parametrize("other", [{"dtype": torch.int32}, {"layout": "page_first_direct"}])
def test_two_servers_whose_pages_differ_share_a_folder(make_pool, monkeypatch, tmp_path, other):
    """Same model, same tokens, pages of the same size, other bytes: neither reads the other's.

    Whole numbers in place of a second float type of this size: the rig compares exact values.
    """
    import harness_cache

    first = make_pool()
    a = first.run(text(0, 60), session="a")
    flush(first)
    values = harness_cache.fingerprints
    kind = other.get("dtype", torch.float32)
    monkeypatch.setattr(harness_cache, "fingerprints", lambda ids: values(ids).to(kind))
    second = make_pool(**other)
    assert outcome(second, "prefetch", "a").status == "missing"
    assert outcome(second, "evict", "a").status == "missing"
    b, fetched = run(second, text(0, 60), session="a")
    flush(second)
    assert fetched == 0
    assert outcome(second, "prefetch", "a").detail["tokens"]["pool"] == N_PAGES * PAGE
    assert second.run(second.full_ids(b), session="a").reused == N_PAGES * PAGE
    settle(second)
    assert outcome(second, "evict", "a").detail["tokens"]["pool"] > 0
    monkeypatch.setattr(harness_cache, "fingerprints", values)
    assert outcome(first, "prefetch", "a").detail["tokens"]["pool"] == N_PAGES * PAGE
    assert first.run(first.full_ids(a), session="a").reused == N_PAGES * PAGE


def test_names_are_the_same_when_a_pool_is_attached_later(make_pool, tmp_path):
    rig = make_pool()
    rig.run(text(0, 60), session="a")
    settle(rig)
    before = {path.name for path in tmp_path.glob("*.bin")}
    done, why = rig.cache.detach_storage_backend()
    assert done, why
    attach(rig, tmp_path)
    flush(rig)
    assert outcome(rig, "prefetch", "a").detail["tokens"]["pool"] == N_PAGES * PAGE
    assert all("tiny-float32-layer_first" in name for name in before)


def test_lines_from_one_place_are_left_out_and_counted(caplog):
    logger = logging.getLogger("sam.test.places")
    limit = OncePerPlace(period_s=3_600.0)
    logger.addFilter(limit)
    with caplog.at_level(logging.INFO):
        for i in range(3):
            logger.error("first %d", i)
            logger.info("info %d", i)
        logger.error("second %s", "place")
        limit.period_s = 0.0
        logger.error("more")
        for place, (since_s, _) in list(limit._places.items()):
            limit._places[place] = (since_s, 7)
        for i in range(2):
            logger.error("third %d", i)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:4] == ["first 0", "info 0", "info 1", "info 2"]
    assert lines[4:6] == ["second place", "more"]
    assert [line.partition(" (")[0] for line in lines[6:]] == ["third 0", "third 1"]


def test_upstreams_loggers_are_limited_once(make_pool):
    make_pool(), make_pool()
    for name in LOGGERS:
        limits = [f for f in logging.getLogger(name).filters if isinstance(f, OncePerPlace)]
        assert len(limits) == 1, name
