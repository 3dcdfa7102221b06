"""A real Mooncake Store that is full, dies and comes back; case 13 on it.

Needs `scripts/pool.sh install`. The rig checks every reused row against what it must hold.
"""

import itertools
import logging
import time

import pytest

pytest.importorskip("sglang")

from harness_mooncake import make_server, mooncake, mooncake_pool, n_present
from harness_pool import (
    PAGE,
    fetch,
    flush,
    keys_of,
    make_pool,
    one_rank,
    outcome,
    run,
    settle,
    text,
    wait,
)

from sam.config import SamConfig
from sam.testing.pool import MIB

__all__ = ["make_pool", "make_server", "mooncake", "mooncake_pool", "one_rank"]

pytestmark = pytest.mark.parametrize("make_rig", ["rust"], indirect=True)
BLOCK = bytes(MIB // 4)
UNTIL_S = 60.0


def config(**changes):
    return SamConfig(**{"raise_on_error": True, "pool_group_pages": 2} | changes)


def put(client, name, rig=None):
    """As another writer does: until there is room, which Mooncake makes in the background."""
    until = time.monotonic() + UNTIL_S
    while client.put(name, BLOCK) != 0:
        assert time.monotonic() < until, f"no room for {name}"
        if rig is not None:
            rig.step()
        time.sleep(0.02)


def flood(pool, rig, tag, n_pools=4):
    """Another writer's blocks, several times what the pool holds, from the client's memory."""
    client = pool.client()
    for i in range(n_pools * pool.n_bytes // len(BLOCK)):
        put(client, f"{tag}-{i}", rig)
        rig.step()
    client.close()


@pytest.fixture
def emptied(mooncake_pool):
    """The pool, without what other tests left."""
    client = mooncake_pool.client()
    client.remove_all()
    client.close()
    return mooncake_pool


def test_a_live_session_survives_a_flood(make_server, emptied):
    """Every block of the flood finds room, too."""
    rig = make_server(config=config(pool_keep_alive_s=0.1))
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    wait(rig, lambda: rig.cache.pool.keep_alive.n_found == 64 // PAGE)
    flood(emptied, rig, "renewed")
    flush(rig)
    assert outcome(rig, "prefetch", "a").detail["tokens"]["pool"] == 64
    assert rig.run(ids, session="a").reused == 64


def test_a_flood_takes_a_session_that_is_not_renewed(make_server, emptied):
    """What the test above would see without keep-alive: nothing is left."""
    rig = make_server(config=config(pool_keep_alive_s=0.0))
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    flood(emptied, rig, "unrenewed")
    assert n_present(rig, keys_of(ids[:-1])) == 0
    flush(rig)
    assert outcome(rig, "prefetch", "a").detail["tokens"]["pool"] == 0
    assert rig.run(ids, session="a").reused == 0


def n_manifests(rig):
    counters = rig.cache.pool.counters
    return counters["manifests_written"], counters["manifests_failed"]


@pytest.fixture
def said_by_pool(caplog):
    """Lines of the log with a text."""
    caplog.set_level(logging.INFO, logger="sam")
    return lambda part: [text for text in caplog.messages if part in text]


def whole(ids):
    """Tokens of the pages that a session of these ids has in the pool."""
    return (len(ids) - 1) // PAGE * PAGE


def check_works_again(make_server, rig):
    """What is new comes back on another server, by its id, as soon as the pool takes it."""
    other, until, found = make_server(), time.monotonic() + UNTIL_S, 0
    for i in itertools.count():
        ids = rig.full_ids(rig.run(text(2_000 + 100 * i, 60), session=f"new{i}"))
        settle(rig)
        found = outcome(other, "prefetch", f"new{i}").detail["tokens"]["device"]
        if found == whole(ids) or time.monotonic() > until:
            break
        time.sleep(0.1)
    assert found == whole(ids), "the pool takes nothing again"
    assert other.run(ids, session=f"new{i}").reused == found
    for server in (rig, other):
        assert server.cache.pool._worker.n_errors == 0


def test_the_master_dies_and_comes_back(make_server, emptied, said_by_pool):
    """Each call of Mooncake's client takes seconds meanwhile; requests do not wait for it."""
    rig = make_server(config=config(pool_keep_alive_s=0.0))
    a = rig.full_ids(rig.run(text(0, 60), session="a"))
    flush(rig)
    emptied.kill("master")
    assert not emptied.is_up()
    b = rig.full_ids(rig.run(text(300, 60), session="b"))
    assert rig.run(b).reused == whole(b)
    assert fetch(rig, rig.queue(a)) == 0
    settle(rig)
    assert n_manifests(rig)[1] == 1
    assert len(said_by_pool("the pool refuses")) == 1
    emptied.start()
    check_works_again(make_server, rig)
    assert said_by_pool("the pool takes")


def test_what_the_pool_lost_is_written_again(make_server, emptied, said_by_pool):
    """As after a restart of the master: nothing is there, and nobody said so."""
    rig = make_server(config=config(pool_keep_alive_s=0.05))
    ids = rig.full_ids(rig.run(text(0, 60), session="a"))
    settle(rig)
    pages, keep_alive = keys_of(ids[:-1]), rig.cache.pool.keep_alive
    wait(rig, lambda: keep_alive.n_found == len(pages))
    rig.cache.cache_controller.storage_backend.batch_remove(pages)
    wait(rig, lambda: keep_alive.n_losses and keep_alive.n_found == 0)
    assert n_present(rig, pages) == 0
    assert outcome(rig, "demote", "a").detail["tokens"]["pool"] == whole(ids)
    assert n_present(rig, pages) == len(pages)
    assert len(said_by_pool("has lost pages")) == 1
    flush(rig)
    assert outcome(rig, "prefetch", "a").detail["tokens"]["pool"] == whole(ids)


def test_the_store_dies_and_comes_back(make_server, emptied):
    """Its pages count as present for a while, and cannot be read."""
    rig = make_server(config=config(pool_keep_alive_s=0.0))
    a = rig.full_ids(rig.run(text(0, 60), session="a"))
    flush(rig)
    emptied.kill("store")
    assert not emptied.is_up()
    _, fetched = run(rig, a, session="a")
    assert fetched == 0
    assert outcome(rig, "evict", "a").status == "done"
    emptied.start()
    check_works_again(make_server, rig)


def test_a_pool_without_room(make_server, emptied, said_by_pool):
    """All of it is leased by another writer: sessions go on without, and are taken later."""
    rig = make_server(config=config(pool_keep_alive_s=0.0))
    other, names = emptied.client(), []
    for size in (len(BLOCK), 4_096, 64):
        while other.put(f"hold-{len(names)}", bytes(size)) == 0:
            names.append(f"hold-{len(names)}")
            other.batch_is_exist(names)
    ids = rig.full_ids(rig.run(text(0, 60), session="full"))
    wait(rig, lambda: other.batch_is_exist(names) and n_manifests(rig)[1])
    assert rig.run(ids, session="full").reused == whole(ids)
    other.batch_is_exist(names)
    settle(rig)
    assert len(said_by_pool("the pool refuses")) == 1
    other.batch_remove(names, True)
    other.close()
    check_works_again(make_server, rig)
    assert said_by_pool("the pool takes")


def test_a_pool_that_does_not_answer(make_server, emptied):
    """Nothing waits for it; what was asked meanwhile is done when it answers."""
    rig = make_server(config=config(pool_keep_alive_s=0.0))
    emptied.pause("master")
    try:
        for i in range(3):
            ids = rig.full_ids(rig.run(text(300 * i, 60), session=f"s{i}"))
            assert rig.run(ids, session=f"s{i}").reused == whole(ids)
            rig.hint("evict", f"s{i}")
            rig.step()
        assert n_manifests(rig) == (0, 0)
    finally:
        emptied.pause("master", resume=True)
    check_works_again(make_server, rig)


def test_what_one_removes_while_another_reads_is_a_miss(make_server, emptied):
    first, second = make_server(), make_server()
    for i in range(8):
        name = f"s{i}"
        ids = first.full_ids(first.run(text(300 * i, 100), session=name))
        settle(first)
        result = second.hint("prefetch", name)
        message_id = second.last_message_id
        first.hint("evict", name)
        settle(first)
        settle(second)
        result = second.later_result(message_id) or result
        assert result.status in ("done", "clipped", "missing"), result
        second.run(ids, session=name)
        settle(second)
        assert outcome(second, "evict", name).status == "done"
    for rig in (first, second):
        assert rig.cache.pool._worker.n_errors == 0
