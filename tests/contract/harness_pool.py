"""A rig over a real pool: the `file` backend in a folder, attached as the admin API does.

Owns: attaching, waiting for what runs on other threads, what lies in the folder, and the way
in which the scheduler fetches for a queued request. Must never look into the ledger.
"""

import json
import time

import pytest
from sglang.srt.runtime_context import get_parallel

from sam.config import SamConfig
from sam.srt.mem_cache.storage.objects import SUFFIX
from sam.srt.mem_cache.storage.page_keys import page_keys, token_bytes

PAGE = 4
SETTINGS = {"page_size": PAGE, "tokens": 256, "write_policy": "write_through"}


def text(start, n_tokens):
    return list(range(start, start + n_tokens))


@pytest.fixture
def one_rank():
    """Storage backends ask for the rank of this process."""
    ranks = dict.fromkeys(
        ["tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dcp_rank"], 0
    )
    sizes = dict.fromkeys(["tp_size", "pp_size", "attn_tp_size", "attn_cp_size"], 1)
    with get_parallel().override(**ranks, **sizes):
        yield


@pytest.fixture
def make_pool(one_rank, make_rig, tmp_path):
    """Factory of rigs on one pool in `tmp_path`."""

    def make(*, storage=None, **settings):
        config = SamConfig(raise_on_error=True, pool_group_pages=2)
        rig = make_rig(**{"config": config} | SETTINGS | settings)
        attach(rig, tmp_path, **(storage or {}))
        return rig

    return make


def attach(
    rig, folder, *, backend="file", policy="wait_complete", write_policy="write_through", **extra
):
    config = {"prefetch_threshold": 1, "file_storage_path": str(folder), **extra}
    done, text = rig.cache.attach_storage_backend(
        backend,
        storage_backend_extra_config_json=json.dumps(config),
        served_model_name="tiny",
        hicache_storage_prefetch_policy=policy,
        hicache_write_policy=write_policy,
    )
    assert done, text


def wait(rig, done):
    """The first page hash of a machine compiles an extension: that takes a while.

    Looks after a pause, not right after a step: a step may hand the worker thread new work
    (renewals are due in every one), which it can only begin when this thread sleeps.
    """
    until = time.monotonic() + 120
    while time.monotonic() < until:
        rig.step()
        time.sleep(0.001)
        if done():
            return
    raise AssertionError("the pool does not answer")


def settle(rig):
    """All that was on its way to the pool or from it has arrived."""
    cache, worker = rig.cache, rig.cache.pool._worker
    wait(
        rig,
        lambda: (
            not cache.ongoing_backup
            and not cache.ongoing_write_through
            and not cache.ongoing_prefetch
            and not worker.n_waiting
            and not worker.n_tracked
        ),
    )
    worker_is_idle(rig)


def worker_is_idle(rig):
    """What the worker thread was at is over, too."""
    job = rig.cache.pool._worker.submit(lambda: "idle")
    wait(rig, lambda: job.ready)


def outcome(rig, kind, session_id, **extra):
    """One action and its final result."""
    result = rig.hint(kind, session_id, **extra)
    message_id = rig.last_message_id
    if result.status in ("deferred", "accepted"):
        wait(rig, lambda: rig.later_result(message_id) is not None)
        result = rig.later_result(message_id)
    return result


def in_pool(folder):
    """Keys of the pages in the folder."""
    return {path.name.partition("_")[0] for path in folder.glob("*.bin")}


def manifests_in(folder):
    return list(folder.glob(f"*{SUFFIX}"))


def keys_of(ids, **namespace):
    from sam.core.manifests import BranchTokens

    return page_keys(BranchTokens(token_ids=token_bytes(ids), **namespace), PAGE)


def flush(rig):
    """Nothing is left on device or host, the pool keeps what it has."""
    settle(rig)
    rig.flush()


def run(rig, ids, **settings):
    """A request with what the scheduler fetches for it from the pool before admission."""
    req = rig.queue(ids, **settings)
    fetched = req.storage_hit_length = fetch(rig, req)
    assert rig.admit(req), "no room"
    rig.decode(req, 4)
    rig.finish(req)
    return req, fetched


def fetch(rig, req):
    """Source: `Scheduler._prefetch_kvcache`, then waiting as admission does."""
    cache = rig.cache
    req.init_next_round_input(cache)
    node = req.last_host_node
    if not (cache.is_backuped(node) or cache.is_root(node)):
        return 0
    start = req.prefix_len + req.host_hit_length
    ids = req.full_untruncated_fill_ids
    cache.prefetch_from_storage(
        req.cache_request_handle,
        node,
        ids[start : req._compute_max_prefix_len(len(ids))],
        cache.get_last_hash_value(node),
        None,
        matched_prefix_tokens=ids[:start],
        extra_key=req.extra_key,
        cache_salt=req.cache_salt,
    )
    wait(rig, lambda: cache.check_prefetch_progress(req.cache_request_handle))
    return cache.pop_prefetch_loaded_tokens(req.cache_request_handle)
