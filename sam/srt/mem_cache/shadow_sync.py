"""Compare a shadow with its tree core, and rebuild it from what the core says.

Owns the reading of the core's tree through its public calls. Must never change the core,
nor be called on a hot path: both walk the whole tree. The core lists no nodes: those that
the shadow knows are asked for, and the ids around the newest, which are handed out in order.
"""

from __future__ import annotations

from array import array
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from sam.srt.mem_cache.shadow_tree import (
    ShadowNode,
    ShadowTree,
    is_device_leaf,
    is_host_leaf,
)
from sam.srt.mem_cache.tier_orders import TierOrders

_NEWEST_IDS = 4_096


def is_unlocked(core: Any, node_id: int, n_tokens: int) -> bool:
    """Whether no request locks a node that is on device: a pin taken now protects it."""
    before = core.full_protected_size()
    core.inc_full_pin(node_id)
    protected = core.full_protected_size() - before
    core.dec_full_pin(node_id)
    return protected >= n_tokens


def end_of_host_insert(core: Any, anchor: ShadowNode, key: Any) -> int | None:
    """The node at which a host insert ended that found all of `key` on device, below
    `anchor`; the core does not say. None where the tokens above cannot be had: nodes that
    are neither on host nor hashed, which are none while a storage is attached."""
    tokens, node = array("q", key.raw_token_ids()), anchor
    while node.parent is not None:
        spec = core.build_storage_backup_spec(node.id, False)
        snapshot = None if spec else core.snapshot_buffer_backup(node.id, False)
        if spec is None and snapshot is None:
            return None
        tokens = (spec.token_ids if spec else snapshot.key.raw_token_ids()) + tokens
        node = node.parent
    whole = RadixKey(tokens, key.extra_key, cache_salt=key.cache_salt)
    return core.match_full_device_prefix(whole)[1]


def paths(core: Any, node_ids: Any) -> dict[int, Any]:
    """`TreePathNodeInfo` of all nodes on the paths to those that the core knows."""
    found: dict[int, Any] = {}
    for node_id in node_ids:
        if node_id in found:
            continue
        try:
            path = core.collect_path_info([node_id])[0]
        except KeyError:
            continue
        for info in path:
            found[info.node_id] = info
    return found


def compare(core: Any, shadow: ShadowTree) -> list[str]:
    """What differs, in words; empty if the shadow is exact. Recency cannot be asked for."""
    errors = []
    infos = paths(core, shadow.nodes)
    if infos.keys() != shadow.nodes.keys() - {shadow.root.id}:
        errors.append(f"nodes: {sorted(infos.keys() ^ shadow.nodes.keys())[:10]}")
    for node in shadow.nodes.values():
        if node.parent is not None and node.id in infos:
            errors += _differences(core, node, infos[node.id])
    in_core = core.full_evictable_size() + core.full_protected_size()
    on_device = sum(node.n_tokens for node in shadow.nodes.values() if node.device)
    if in_core != on_device:
        errors.append(f"device tokens: core {in_core}, shadow {on_device}")
    for name, queue, is_leaf in (
        ("device", shadow.device_leaves, is_device_leaf),
        ("host", shadow.host_leaves, is_host_leaf),
    ):
        lost = [n.id for n in shadow.nodes.values() if is_leaf(n) and not queue.holds(n)]
        if lost:
            errors.append(f"{name} leaves that are not queued: {lost[:10]}")
    return errors


def _differences(core: Any, node: ShadowNode, info: Any) -> list[str]:
    errors = []
    device_children = sum(child.device for child in node.children.values())
    for what, ours, theirs in (
        ("parent", node.parent.id, info.parent_id),
        ("end", node.end, info.path_end),
        ("device tokens", node.n_tokens if node.device else None, info.full_value_len),
        ("children", len(node.children), info.num_children),
        ("host copy", node.backuped, core.is_backuped(node.id)),
        ("guard", node.backuped, node.guard is not None),
        ("device children", node.n_device, device_children),
    ):
        if ours != theirs:
            errors.append(f"node {node.id}: {what}: shadow {ours}, core {theirs}")
    if node.device and info.full_value_len is not None and not node.n_device:
        unlocked = is_unlocked(core, node.id, info.full_value_len)
        if unlocked == bool(node.below):
            errors.append(f"node {node.id}: locks: shadow {node.below}, core {not unlocked}")
    return errors


def rebuild(core: Any, old: ShadowTree, orders: TierOrders) -> ShadowTree:
    """A new shadow with the core's shape, tiers and locks, and the recency known so far.

    Raises AssertionError if nodes are missing that the core counts.
    """
    newest = max(old.nodes, default=0)
    extra = range(max(0, newest - _NEWEST_IDS), newest + _NEWEST_IDS)
    infos = paths(core, [*old.nodes, *extra])
    new = ShadowTree(core.root_node_handle(), orders)
    new.clock = max([old.clock, *(node.lat for node in old.nodes.values())])
    for info in sorted(infos.values(), key=lambda info: info.path_end):
        _add(core, new, info, old.nodes.get(info.node_id))
    for info in infos.values():
        assert len(new.nodes[info.node_id].children) == info.num_children, "missing nodes"
    in_core = core.full_evictable_size() + core.full_protected_size()
    on_device = sum(node.n_tokens for node in new.nodes.values() if node.device)
    assert in_core == on_device, f"device tokens: core {in_core}, found {on_device}"
    _restore_locks(core, old, new)
    known = [node_id for node_id in old.duplicates if node_id in new.nodes]
    new.duplicates.update(dict.fromkeys(known))
    for node in list(new.nodes.values()):
        new.update_duplicate(node)
        new.offer(node)
    return new


def _add(core: Any, new: ShadowTree, info: Any, known: ShadowNode | None) -> None:
    parent = new.nodes[info.parent_id]
    node = ShadowNode(info.node_id, parent, info.path_end)
    new.nodes[node.id] = node
    new.adopt(parent, node)
    node.device = info.full_value_len is not None
    parent.n_device += node.device
    node.backuped = core.is_backuped(node.id)
    if known is None:
        node.lat = node.thru = new.tick()
        return
    node.lat, node.thru = known.lat, known.thru
    node.write_through_pending_id = known.write_through_pending_id
    node.load_back_pending_id = known.load_back_pending_id


def _restore_locks(core: Any, old: ShadowTree, new: ShadowTree) -> None:
    """Device leaves by asking the core; the rest from the receipts that are still out."""
    for (node_id, boundary), (_, top_id, count) in old.segments.items():
        if node_id in new.nodes and top_id in new.nodes:
            for _ in range(count):
                new.lock_host(new.nodes[node_id], boundary)
            new.segments[node_id, boundary][1] = top_id
            node = new.nodes[node_id]
            while node.id != top_id:
                node = node.parent
                node.host_locks += count
    for node in new.nodes.values():
        known = old.nodes.get(node.id)
        evicted = sum(c.below for c in known.children.values() if not c.device) if known else 0
        own = known.below - evicted if known else 0
        for _ in range(max(0, own)):
            new.lock(node)
    for node in new.nodes.values():
        if node.device and not node.n_device and node.parent is not None:
            unlocked = is_unlocked(core, node.id, node.n_tokens)
            if unlocked or not node.below:
                node.below = 0 if unlocked else 1
