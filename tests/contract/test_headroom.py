"""Tier moves leave the room that a prompt cut into chunks has still to take.

What a copy locks is neither free nor evictable, and SGLang ends the scheduler if a later chunk
finds no room.
"""

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sam.config import SamConfig

pages = pytest.mark.parametrize("page_size", [1, 16])
SIZE = 256
PROMPT = 192


def make(make_rig, page_size):
    config = SamConfig(raise_on_error=True, prefetch_pool_share=0.5)
    return make_rig(
        page_size=page_size, tokens=SIZE, write_policy="write_through_selective", config=config
    )


def text(seed, n=64):
    return [seed * 1_000 + i for i in range(n)]


def first_chunk(rig):
    req = rig.queue(text(9, PROMPT), max_new=16)
    assert rig.admit(req, chunk=32)
    return req


def all_chunks(rig, req):
    while not rig.prefilled(req):
        assert rig.admit(req, chunk=32)
        rig.step()
    rig.decode(req, 4)
    rig.finish(req)


@pages
def test_a_prefetch_leaves_room_for_the_chunks_to_come(make_rig, page_size):
    rig = make(make_rig, page_size)
    rig.run(text(1), session="a")
    rig.hint("demote", "a", release="now")
    rig.step(), rig.step()
    assert rig.on_tiers("a")[0] == 0
    req = first_chunk(rig)
    assert rig.cache.headroom.tokens() == PROMPT - 32 + 16
    rig.slow_transfers = "load"
    assert rig.hint("prefetch", "a").status in ("dropped", "clipped")
    all_chunks(rig, req)
    rig.slow_transfers = ""
    assert len(rig.cache.headroom) == 0 and rig.cache.headroom.tokens() == 0
    assert rig.hint("prefetch", "a").status in ("deferred", "done")


@pages
def test_an_offload_waits_while_its_copy_would_lock_that_room(make_rig, page_size):
    rig = make(make_rig, page_size)
    rig.run(text(1), session="a")
    req = first_chunk(rig)
    rig.slow_transfers = "write"
    assert rig.hint("demote", "a").status == "deferred"
    rig.step()
    assert not rig.cache.ongoing_write_through
    all_chunks(rig, req)
    rig.slow_transfers = ""
    for _ in range(4):
        rig.step()
    assert rig.later_result().status in ("done", "clipped")


@pages
@pytest.mark.parametrize("end", ["abort_queued", "abort_chunked"])
def test_no_request_is_counted_for_ever(make_rig, page_size, end):
    rig = make(make_rig, page_size)
    req = rig.queue(text(9, PROMPT)) if end == "abort_queued" else first_chunk(rig)
    assert len(rig.cache.headroom) == 1
    getattr(rig, end)(req)
    assert len(rig.cache.headroom) == 0


@pages
@pytest.mark.parametrize("write_policy", ["write_through_selective", "write_back"])
def test_memory_that_only_a_copy_locks_is_waited_for(make_rig, page_size, write_policy):
    """SGLang ends the scheduler where an allocation finds nothing to evict."""
    rig = make_rig(page_size=page_size, tokens=SIZE, write_policy=write_policy)
    rig.run(text(1), session="a")
    rig.slow_transfers = "write"
    assert rig.hint("demote", "a").status == "deferred"
    assert rig.cache.ongoing_write_through and not rig.cache.tree_core.full_evictable_size()
    assert rig.cache.evict(EvictParams(num_tokens=64)).num_tokens_evicted >= 64
    assert not rig.cache.own_copies.under_way()
    rig.slow_transfers = ""
    for _ in range(4):
        rig.step()
    assert rig.later_result().status in ("done", "clipped")
