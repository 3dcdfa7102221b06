"""The same sessions in a real Mooncake Store: a master, a store, two caches on it.

Needs `scripts/pool.sh install`.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import harness_cache
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
from harness_pools import server_settings

from sam.core.manifests import manifest_key
from sam.srt.mem_cache.storage.page_keys import fingerprint_of
from sam.testing.server import free_port

__all__ = ["make_pool", "one_rank"]

REPO = Path(__file__).resolve().parents[2]
MOONCAKE = Path(os.environ.get("SAM_POOL_LIB", REPO / ".cache" / "mooncake"))


@pytest.fixture(scope="module")
def pool_port(tmp_path_factory):
    if not (MOONCAKE / "mooncake").is_dir():
        pytest.skip("no Mooncake: run scripts/pool.sh install")
    env = {
        **os.environ,
        "SAM_POOL_RUN": str(tmp_path_factory.mktemp("pool")),
        "SAM_POOL_PORT": str(free_port()),
        "SAM_POOL_BYTES": str(64 << 20),
        "SAM_PYTHON": sys.executable,
    }
    script = functools.partial(subprocess.run, env=env, capture_output=True, text=True)
    started = script([REPO / "scripts" / "pool.sh", "start"])
    assert started.returncode == 0, started.stderr
    sys.path.append(str(MOONCAKE))
    yield int(env["SAM_POOL_PORT"])
    sys.path.remove(str(MOONCAKE))
    assert script([REPO / "scripts" / "pool.sh", "status"]).returncode == 0
    assert script([REPO / "scripts" / "pool.sh", "stop"]).returncode == 0
    assert script([REPO / "scripts" / "pool.sh", "status"]).returncode == 1


@pytest.fixture
def make_server(pool_port, make_pool, monkeypatch, request):
    """Factory of caches on one Mooncake, under a name of this test's own."""

    def settings(**given):
        override = server_settings(**given)
        override._fields["hicache_mem_layout"] = "page_first_direct"
        return override

    monkeypatch.setattr(harness_cache, "server_settings", settings)
    storage = {
        "backend": "mooncake",
        "master_server_address": f"127.0.0.1:{pool_port}",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "global_segment_size": 0,
        "local_hostname": "127.0.0.1",
        "extra_backend_tag": request.node.name,
    }
    return lambda **given: make_pool(storage=storage, **given)


def n_present(rig, keys):
    backend = rig.cache.cache_controller.storage_backend
    return sum(backend.batch_exists([key]) for key in keys)


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
    name = manifest_key(
        second.ref("a").key, fingerprint_of(second.cache.cache_controller)
    )
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
