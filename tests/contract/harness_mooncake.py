"""Caches on a real Mooncake Store of the test module's own.

Owns: the pool's life, and caches attached to it. Must never reach another pool.
"""

import sys

import harness_cache
import pytest
from harness_pools import server_settings

from sam.testing.pool import MIB, MooncakePool, mooncake_folder


@pytest.fixture(scope="module")
def mooncake():
    """Mooncake can be imported."""
    folder = mooncake_folder()
    if folder is None:
        pytest.skip("no Mooncake: run scripts/pool.sh install")
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def mooncake_pool(mooncake, tmp_path_factory):
    """The least that a store can have, and pages that age in seconds."""
    pool = MooncakePool(tmp_path_factory.mktemp("pool"), n_bytes=16 * MIB, lease_ms=5_000)
    pool.start()
    assert pool.is_up()
    yield pool
    pool.stop()
    assert not pool.is_up()


@pytest.fixture
def make_server(mooncake_pool, make_pool, monkeypatch, request):
    """Factory of caches on one Mooncake, under a name of this test's own."""

    def settings(**given):
        override = server_settings(**given)
        override._fields["hicache_mem_layout"] = "page_first_direct"
        return override

    monkeypatch.setattr(harness_cache, "server_settings", settings)
    extra = mooncake_pool.extra_config(backend="mooncake", extra_backend_tag=request.node.name)
    return lambda **given: make_pool(storage=extra, **given)


def n_present(rig, keys):
    """How many of these pages the pool has; asking renews them."""
    backend = rig.cache.cache_controller.storage_backend
    return sum(backend.batch_exists([key]) for key in keys)
