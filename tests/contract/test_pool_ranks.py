"""Two ranks see the ends of their pool work in the same step, however fast each of them is."""

import json
import random
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sam.config import SamConfig
from sam.core.manifests import BranchTokens
from sam.core.sessions import SessionTable
from sam.srt.mem_cache.storage.pool import SessionPool

N_JOBS = 12


def work(rng, i, rank):
    """Unequal times, now and then a failure; the last one reads what only one rank has."""
    time.sleep(rng.random() * 0.02)
    if i % 5 == 3 and rank == 1:
        raise OSError("this rank's shard is gone")
    return None if i == N_JOBS - 1 and rank else BranchTokens(token_ids=bytes([i] * 4))


def lowest_of_ranks(value):
    found = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found.item())


def pool_of_rank():
    cache = SimpleNamespace(
        enable_storage=True,
        lowest_of_ranks=lowest_of_ranks,
        _all_reduce=dist.all_reduce,
        hints=SimpleNamespace(table=SessionTable()),
        ongoing_backup={},
        cache_controller=SimpleNamespace(storage_backend=object()),
    )
    pool = SessionPool(cache, SamConfig(pool_keep_alive_s=0.0))
    pool.account.period_s = 0.0
    return pool


def refuse_on_one_rank(rank, folder):
    """Of three writes, each rank's pool refuses another one; one is under way on both."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    pool = pool_of_rank()
    for write in range(4):
        pool.writes(10 + write, node_id=write)
    pool._cache.ongoing_backup[13] = None
    pool.transfers.refused.update({10 + rank, 13} if rank else {10})
    pool.sync()
    stored = [pool.is_stored(node_id) for node_id in range(4)]
    pool._cache.ongoing_backup.clear()
    pool.sync()
    after = pool.is_stored(3)
    left = len(pool.transfers.refused) + len(pool.stored._writing)
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump([stored, after, left], file)
    dist.destroy_process_group()


def test_what_one_rank_refused_is_stored_on_none(tmp_path):
    mp.spawn(refuse_on_one_rank, args=(str(tmp_path),), nprocs=2)
    one, two = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert one == two == [[False, False, True, True], False, 0]


def lose_on_one_rank(rank, folder):
    """One rank's pool was seen to lose pages, once; then nothing more."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    pool, stored = pool_of_rank(), []
    pool.writes(10, node_id=0)
    pool.agree_on_losses()
    stored.append(pool.is_stored(0))
    pool.keep_alive.n_losses += rank
    pool.agree_on_losses()
    stored.append(pool.is_stored(0))
    pool.writes(11, node_id=0)
    pool.agree_on_losses()
    stored.append(pool.is_stored(0))
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(stored, file)
    dist.destroy_process_group()


def test_what_one_rank_lost_is_stored_on_none(tmp_path):
    mp.spawn(lose_on_one_rank, args=(str(tmp_path),), nprocs=2)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == [True, False, True]


def test_a_loss_is_no_refusal_of_what_is_on_its_way(monkeypatch):
    """Two offloads, one of which sees the loss while the other one writes."""
    pool = pool_of_rank()
    monkeypatch.setattr(pool._cache, "lowest_of_ranks", lambda value: value)
    monkeypatch.setattr(pool._cache, "_all_reduce", lambda tensor, op: None)
    pool.writes(10, node_id=0)
    pool.writes(11, node_id=1)
    pool.transfers.refused.add(11)
    pool.keep_alive.n_losses = 1
    pool.agree_on_losses()
    pool.sync()
    assert pool.is_stored(0) and not pool.stored.was_refused(0)
    assert not pool.is_stored(1) and pool.stored.was_refused(1)
    pool.writes(12, node_id=1)
    assert not pool.stored.was_refused(1)


def run_rank(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    rng = random.Random(rank)
    pool = pool_of_rank()
    jobs, ready_at = [], {}
    for step in range(2_000):
        if len(jobs) < N_JOBS and step % 3 == 0:
            i = len(jobs)
            agreed = i in (N_JOBS - 1, 0)
            job = pool._worker.submit(lambda i=i: work(rng, i, rank), same_on_ranks=agreed)
            jobs.append(job)
        pool.sync()
        for i, job in enumerate(jobs):
            if job.ready:
                ready_at.setdefault(i, step)
        time.sleep(rng.random() * 0.002)
        if len(ready_at) == N_JOBS:
            break
    results = {i: jobs[i].result is not None for i in (0, N_JOBS - 1)}
    report = {"ready_at": ready_at, "results": results, "errors": pool._worker.n_errors}
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(report, file)
    pool.close()
    dist.destroy_process_group()


def test_jobs_are_ready_in_the_same_step(tmp_path):
    mp.spawn(run_rank, args=(str(tmp_path),), nprocs=2)
    one, two = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert one["ready_at"] == two["ready_at"] and len(one["ready_at"]) == N_JOBS
    assert one["results"] == two["results"] == {"0": True, str(N_JOBS - 1): False}
    assert (one["errors"], two["errors"]) == (0, 2)
