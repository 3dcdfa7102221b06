"""The shadow stays exact over a real L3: file storage attached and detached under way, backups
of what has landed on host, prefetch into the tree beside running requests, every policy.
"""

import json
import random
import time

import pytest

pytest.importorskip("sglang")

from sglang.srt.runtime_context import get_parallel


@pytest.fixture(autouse=True)
def one_rank():
    ranks = dict.fromkeys(
        ["tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dcp_rank"], 0
    )
    sizes = dict.fromkeys(["tp_size", "pp_size", "attn_tp_size", "attn_cp_size"], 1)
    with get_parallel().override(**ranks, **sizes):
        yield


def attach(rig, folder, write_policy):
    extra = {"prefetch_threshold": 1, "file_storage_path": str(folder)}
    done, text = rig.cache.attach_storage_backend(
        "file",
        storage_backend_extra_config_json=json.dumps(extra),
        served_model_name="tiny",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_write_policy=write_policy,
    )
    assert done, text


def wait(rig, done):
    """The first page hash of a machine compiles an extension: that takes a while."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        rig.step()
        if done():
            return
        time.sleep(0.001)
    raise AssertionError("storage does not answer")


def prefetch(rig, req):
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
    )
    wait(rig, lambda: cache.check_prefetch_progress(req.cache_request_handle))
    return cache.pop_prefetch_loaded_tokens(req.cache_request_handle)


def round_of_traffic(rig, rng, texts, n_ops):
    loaded = 0
    for i in range(n_ops):
        op = rng.random()
        if op < 0.6 and len(rig.running) < 3:
            head = rng.choice(texts[-40:])[: rng.choice([0, 32, 64, 90])]
            ids = head + [rng.randrange(3) * 50 + k for k in range(rng.randrange(4, 40))]
            req = rig.queue(ids, session=rng.choice([None, "a", "b", "c"]))
            loaded += prefetch(rig, req)
            if rig.cache.is_write_back:  # what storage reads can neither be freed nor dropped
                wait(rig, lambda: not rig.cache.ongoing_backup)
            if rig.admit(req):
                texts.append(rig.full_ids(req))
            else:
                rig.abort_queued(req)
        elif op < 0.85 and rig.running:
            rig.finish(rng.choice(list(rig.running.values())))
        elif op < 0.95:
            rig.cache.evict_host(rng.choice([16, 64]))
        else:
            rig.hint(rng.choice(["demote", "evict"]), rng.choice("abc"))
        rig.step()
        if i % 4 == 0:
            rig.check_shadow()
    for req in list(rig.running.values()):
        rig.finish(req)
    wait(rig, lambda: not rig.cache.ongoing_backup and not rig.cache.ongoing_prefetch)
    wait(rig, lambda: not rig.cache.hints.n_pending)  # an evict waits for the pool's worker
    rig.check_shadow()
    assert not rig.cache.tree_core.shadow.segments
    return loaded


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_attach_traffic_detach_attach(make_shadow, tmp_path, page_size, write_policy):
    rig = make_shadow(page_size=page_size, tokens=256, host_ratio=1.2, write_policy=write_policy)
    rng, texts = random.Random(f"{page_size}{write_policy}"), [[]]
    round_of_traffic_without(rig, rng, texts)
    attach(rig, tmp_path, write_policy)
    loaded = round_of_traffic(rig, rng, texts, 150)
    done, text = rig.cache.detach_storage_backend()
    assert done, text
    rig.check_shadow()
    round_of_traffic_without(rig, rng, texts)
    attach(rig, tmp_path, write_policy)
    loaded += round_of_traffic(rig, rng, texts, 100)
    assert loaded > 0
    done, text = rig.cache.detach_storage_backend()
    assert done, text


def round_of_traffic_without(rig, rng, texts):
    """Nodes without hashes, which the next attach has to fill in."""
    for _ in range(25):
        ids = rng.choice(texts[-20:])[:48] + [rng.randrange(3) * 50 + k for k in range(20)]
        texts.append(rig.full_ids(rig.run(ids)))
        rig.step()
    rig.check_shadow()
