"""What the cache tells the timeline: requests that ended, how full pools are, victims.

Owns the reading of these from the cache. Must never change it, nor take longer than O(1) and
the few users of one node.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from sam.srt.observability.timeline import MAX_NAMED_USERS

if TYPE_CHECKING:
    from sam.core.leaf_order import LeafOrder


WATCH_S = 900.0
"""Victims are told for so long after the last look: each costs about 10 us, which is as much as
the rest of what an eviction does beside the tree core."""


def watch_victims(cache: Any, now_s: float) -> None:
    """Somebody looks: victims count from now on."""
    cache.hints.timeline.watched_until_s = now_s + WATCH_S
    cache.tree_core.orders.on_victim = partial(cache._guard, note_victim, cache)


def note_request(cache: Any, req: Any) -> None:
    """A request ended: count it, and once a bucket how full the pools are."""
    timeline = cache.hints.timeline
    now_s = timeline.clock()
    if now_s > timeline.watched_until_s:
        cache.tree_core.orders.on_victim = None
    timeline.request_over(req)
    if not timeline.series.knows(now_s, "device_free"):
        note_levels(cache, now_s)


def note_levels(cache: Any, now_s: float) -> None:
    """How full the pools are, in tokens."""
    core = cache.tree_core
    levels = {
        "device_total": cache.token_to_kv_pool_allocator.size,
        "device_free": cache._component_available_size(BASE_COMPONENT_TYPE),
        "device_evictable": core.full_evictable_size(),
        "device_protected": core.full_protected_size(),
    }
    if cache.cache_controller is not None:
        pool = cache.cache_controller.mem_pool_host
        levels["host_free"] = pool.available_size()
        levels["host_total"] = pool.anchor_entry.host_pool.size
    cache.hints.timeline.series.level(now_s, **levels)


def note_victim(cache: Any, tier: str, order: LeafOrder, node: Any) -> None:
    """A node was chosen to leave a tier because memory ran short."""
    core = cache.tree_core
    users = core.tags.users_of(node)
    if not users:
        rank = "plain"
    elif len(users) > MAX_NAMED_USERS:
        rank = "shared"
    else:
        rank = order.key_of(node, core.orders.now_s).rank.name.lower()
    device, host = core.tokens_of(node)
    n_tokens = device if tier == "device" else host
    moved = host > 0 if tier == "device" else core.orders.is_stored(node.id)
    cache.hints.timeline.victim(tier, n_tokens, rank, users, moved)
