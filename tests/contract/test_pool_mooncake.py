"""The same sessions in a real Mooncake Store: a master, a store, two caches on it.

Needs `scripts/pool.sh install`.
"""

import pytest

pytest.importorskip("sglang")

from harness_mooncake import make_server, mooncake, mooncake_pool, n_present
from harness_pool import (
    PAGE,
    flush,
    keys_of,
    make_pool,
    one_rank,
    outcome,
    run,
    settle,
    text,
)

from sam.core.manifests import manifest_key
from sam.srt.mem_cache.storage.page_keys import fingerprint_of

__all__ = ["make_pool", "make_server", "mooncake", "mooncake_pool", "one_rank"]


def test_from_one_server_to_the_other_and_out_of_the_pool(make_server):
    """Offloaded on A, fetched by id on B before its request, device hit there; then ended."""
    first, second = make_server(), make_server()
    a = first.run(text(0, 60), session="a")
    assert outcome(first, "demote", "a").status == "done"
    settle(first)
    pages = keys_of(first.full_ids(a)[:-1])
    assert n_present(first, pages) == len(pages) == 16
    result = outcome(second, "prefetch", "a")
    assert result.detail["tokens"] == {"device": 64, "host": 0, "pool": 64}, result
    assert second.run(first.full_ids(a), session="a").reused == 64
    settle(second)
    result = outcome(second, "evict", "a")
    assert result.status == "done" and result.detail["tokens"]["pool"] >= (16 - 2) * PAGE
    assert n_present(second, pages) == 2
    store = second.cache.cache_controller.storage_backend.store
    name = manifest_key(second.ref("a").key, fingerprint_of(second.cache.cache_controller))
    assert store.is_exist(name) == 0
    for rig in (first, second):
        assert rig.cache.pool._worker.n_errors == 0


def test_sibling_keeps_what_it_shares(make_server):
    rig = make_server()
    shared = text(0, 40)
    rig.run([*shared, *text(700, 24)], session="a")
    b = rig.run([*shared, *text(800, 24)], session="b")
    settle(rig)
    assert 0 < outcome(rig, "evict", "a").detail["tokens"]["pool"] <= 28
    pages = keys_of(rig.full_ids(b)[:-1])
    assert n_present(rig, pages) == len(pages)
    flush(rig)
    _, fetched = run(rig, [*shared, *text(800, 24)], session="b")
    assert fetched >= 60


def test_the_newest_turn_is_what_comes_back(make_server):
    """Mooncake never replaces a value: the manifest of each turn is another one."""
    first, second = make_server(), make_server()
    a = first.run(text(0, 20), session="a")
    for i in range(3):
        settle(first)
        a = first.run([*first.full_ids(a), *text(300 + 50 * i, 11)], session="a")
    settle(first)
    n_tokens = (len(first.full_ids(a)) - 1) // PAGE * PAGE
    assert outcome(second, "prefetch", "a").detail["tokens"]["pool"] == n_tokens
