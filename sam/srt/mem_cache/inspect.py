"""What the inspection routes show of one scheduler: sessions, tokens per tier, counters.

Owns the answer to the internal query action. Must never change anything.
"""

from __future__ import annotations

import math
from typing import Any

from sglang.srt.managers.kv_hints import KvHintResult
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from sam.core.sessions import SessionKey, SessionRef
from sam.srt.mem_cache.ownership import path_up

MAX_PAGE = 1_000
MAX_NAMED = 16


def answer_query(cache: Any, action: Any) -> Any:
    """`KvHintResult` whose detail is the report; payload: `what`, `offset`, `limit`."""
    payload = action.payload
    what = payload.get("what", "sessions")
    if what == "tree":
        detail = {"nodes": tree_dump(cache, int(payload.get("limit", 1_000)))}
    else:
        detail = sessions_report(
            cache, int(payload.get("offset", 0)), int(payload.get("limit", 100))
        )
    return KvHintResult(
        action_id=action.action_id, action_type=action.action_type, status="done", detail=detail
    )


def sessions_report(cache: Any, offset: int, limit: int) -> dict[str, Any]:
    """One page of sessions in order of first appearance, with totals."""
    table = cache.hints.table
    page = table.snapshot(offset, min(limit, MAX_PAGE))
    for record in page:
        key = SessionKey(record["tenant"], record["session_id"])
        record["tokens"] = session_tokens(cache, SessionRef(key, record["generation"]))
        record["tokens"]["pool"] = pool_tokens(cache, key)
    return {
        "offset": offset,
        "n_sessions": len(table),
        "sessions": page,
        "summary": summary(cache),
    }


def summary(cache: Any) -> dict[str, Any]:
    """Cheap totals: pools, counters, pending actions."""
    core = cache.tree_core
    counts = cache.hints.action_counts.items()
    return {
        "counters": dict(cache.hints.table.counters),
        "actions": {f"{kind}:{status}": n for (kind, status), n in counts},
        "pending_actions": cache.hints.n_pending,
        "errors": cache.n_errors,
        "device": {
            "free": cache._component_available_size(BASE_COMPONENT_TYPE),
            "evictable": core.full_evictable_size(),
            "protected": core.full_protected_size(),
        },
        "host": _host_pool(cache),
        "pool": cache.pool.report(),
        "tree_core": type(core).__name__,
        "tree_core_mismatches": core.n_mismatches,
        "retention": retention(cache),
    }


def retention(cache: Any) -> dict[str, Any]:
    """The order in which KV goes, and whether one of its brakes is on."""
    orders, watch = cache.tree_core.orders, cache.regret
    trust = cache.hints.retention.end_trust
    return {
        "policy": orders.policy,
        "in_stock_order": not getattr(cache.tree_core, "ordering", True),
        "ends_trusted": trust.trusted,
        "ends": trust.n_ends,
        "returns_after_end": trust.n_returns,
        "lru_by_regret": orders.use_lru,
        "regret_switches": 0 if watch is None else watch.n_switches,
    }


def session_tokens(
    cache: Any, ref: SessionRef, nodes: list[Any] | None = None
) -> dict[str, dict[str, int]]:
    """Tokens on the session's branches by tier; a node on both tiers counts on both. `nodes`:
    those of the branches, where the caller has them."""
    core = cache.tree_core
    private = core.tags.private_ids(ref)
    tokens = {tier: {"private": 0, "shared": 0} for tier in ("device", "host")}
    for node in core.tags.branch_nodes(ref) if nodes is None else nodes:
        share = "private" if node.id in private else "shared"
        device, host = core.tokens_of(node)
        tokens["device"][share] += device
        tokens["host"][share] += host
    return tokens


def _finite(seconds: float) -> float | None:
    """None for who is promised, not queued."""
    return round(seconds, 3) if math.isfinite(seconds) else None


def tree_dump(cache: Any, limit: int) -> list[dict[str, Any]]:
    """The radix tree, node by node in order of creation, at most `limit`."""
    core = cache.tree_core
    nodes = []
    for node in core.live_nodes()[: min(limit, 10 * MAX_PAGE)]:
        device, host = core.tokens_of(node)
        next_use = core.orders.key_of(node)
        nodes.append(
            {
                "id": node.id,
                "parent": node.parent.id,
                "depth": sum(1 for _ in path_up(node)),
                "key_tokens": len(node.key),
                "device_tokens": device,
                "host_tokens": host,
                "n_tags": core.tags.n_tags(node),
                "sessions": sessions_of(core, node),
                "next_use": next_use.rank.name.lower(),
                "next_use_in_s": _finite(next_use.use_in_s),
                "locked": core.is_locked(node),
            }
        )
    return nodes


def pool_tokens(cache: Any, key: SessionKey) -> dict[str, int]:
    """What the session wrote to L3 or read from there; the pool may have dropped some."""
    n_pages, n_private = cache.pool.pages_of(key)
    private = n_private * cache.page_size
    return {"private": private, "shared": n_pages * cache.page_size - private}


def sessions_of(core: Any, node: Any) -> list[str]:
    """Ids of the sessions that use what lies at or below the node, at most `MAX_NAMED`."""
    ids: dict[str, None] = {}
    for user in core.tags.users_of(node):
        if isinstance(user, SessionRef):
            user = user.key
        elif not isinstance(user, SessionKey):
            user = user.session
        ids[user.session_id] = None
        if len(ids) == MAX_NAMED:
            break
    return list(ids)


def _host_pool(cache: Any) -> dict[str, int] | None:
    if cache.cache_controller is None:
        return None
    pool = cache.cache_controller.mem_pool_host
    return {"free": pool.available_size(), "total": pool.anchor_entry.host_pool.size}
