"""The session tree core: SGLang's Python TreeCore plus ownership tags and an eviction order.

Owns the order of victims, kept up to date instead of sorted anew for each eviction, and the
dropping of a chosen node. Must never decide *what* to drop or move (the tier manager does),
nor touch a locked node. With no tags the victim order is LRU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core import (
    UnifiedTreeCore,
    get_and_increase_time_counter,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    BaseEvictionResult,
    DriveHostEvictionResult,
    EvictDeviceNextNodeResult,
)

from sam.srt.mem_cache.ownership import OwnershipTags, path_up
from sam.srt.mem_cache.tier_orders import TierOrders

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


class DropResult(BaseEvictionResult):
    """What dropping one node freed, in tokens; the caller drains the frees."""

    dropped: bool = False
    device_tokens: int = 0
    host_tokens: int = 0


class SessionTreeCore(UnifiedTreeCore):
    """Source: `sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore`."""

    n_mismatches = 0
    free_at_once = 0
    """It is the tree itself: nothing can disagree, one victim a step. See `ShadowTreeCore`."""

    def __init__(self, params: CacheInitParams, components: dict[Any, Any]) -> None:
        self.tags = OwnershipTags()
        self.tags.changed = self._users_changed
        self.orders = TierOrders(
            self.tags,
            lambda node: node in self.evictable_device_leaves,
            lambda node: node in self.evictable_host_leaves,
            when="last_access_time",
        )
        self._walk: tuple[int, list[Any]] | None = None
        super().__init__(params, components)

    def reset(self) -> None:
        super().reset()
        self.tags.clear()
        self.orders.bind(self._node_arena)

    def use_policy(self, policy: str) -> None:
        """Choose the retention policy, on an empty tree. Raises ValueError."""
        self.orders.use_policy(policy)

    def tell_time(self, time_s: float) -> None:
        """Message time moved on."""
        if time_s > self.orders.now_s:
            self.orders.advance(time_s, get_and_increase_time_counter())

    def _split_node(self, key, child, split_len):
        new_node, action = super()._split_node(key, child, split_len)
        self.tags.on_split(new_node, child)
        return new_node, action

    def _remove_leaf_from_parent(self, node) -> None:
        self.tags.on_delete(node)
        super()._remove_leaf_from_parent(node)

    def _unregister_node(self, node) -> None:
        super()._unregister_node(node)
        self.orders.device.discard(node.id)
        self.orders.host.discard(node.id)

    def _update_evictable_leaf_sets(self, node) -> None:
        """The core's two sets; a leaf is offered to the order of its tier. With one component
        a node is a leaf of one tier at most, and asked once for what it holds."""
        if len(self.components) > 1:
            super()._update_evictable_leaf_sets(node)
            self.orders.device.offer(node)
            self.orders.host.offer(node)
            return
        data = node.component_data[BASE_COMPONENT_TYPE]
        if data.value is not None:
            self.evictable_host_leaves.discard(node)
            if not data.lock_ref and node.parent is not None and not _has_device_child(node):
                self.evictable_device_leaves.add(node)
                self.orders.device.offer_leaf(node)
            else:
                self.evictable_device_leaves.discard(node)
            return
        self.evictable_device_leaves.discard(node)
        if self._is_host_leaf(node):
            self.evictable_host_leaves.add(node)
            self.orders.host.offer_leaf(node)
        else:
            self.evictable_host_leaves.discard(node)

    def _users_changed(self, node) -> None:
        self.orders.host.offer(node)
        while node.evicted and node.parent is not None:
            node = node.parent
        self.orders.device.offer(node)

    # -- eviction in our order ----------------------------------------------------

    def evict_device_start(self, component_type: Any, request_cnt: int) -> None:
        if component_type == BASE_COMPONENT_TYPE:
            self._walk = (request_cnt, [])
        else:
            super().evict_device_start(component_type, request_cnt)

    def evict_device_next_node(self, component_type: Any, tracker: dict[Any, int]) -> Any:
        if component_type != BASE_COMPONENT_TYPE or self._walk is None:
            return super().evict_device_next_node(component_type, tracker)
        request_cnt, given = self._walk
        node = None
        if tracker.get(component_type, 0) < request_cnt:
            node = self.orders.device.pop(self.orders.now_s)
        if node is None:
            return EvictDeviceNextNodeResult()
        given.append(node)
        return EvictDeviceNextNodeResult(node_id=node.id, made_progress=True)

    def evict_device_end(self, component_type: Any) -> None:
        """Victims that stayed, because their backup failed, are leaves as before."""
        if component_type != BASE_COMPONENT_TYPE or self._walk is None:
            super().evict_device_end(component_type)
            return
        (_, given), self._walk = self._walk, None
        for node in given:
            if self.find_node(node.id) is node:
                self.orders.device.offer(node)

    def drive_host_eviction(self, component_type: Any, num_tokens: int) -> Any:
        if component_type != BASE_COMPONENT_TYPE:
            return super().drive_host_eviction(component_type, num_tokens)
        result = DriveHostEvictionResult()
        frees = (result.tracker, result.device_frees, result.host_frees)
        actions = result.cache_actions
        if self.is_write_back and not envs.SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM.get():
            self._reclaim_full_host_duplicates(num_tokens, *frees, cache_actions=actions)
        while result.tracker[component_type] < num_tokens:
            node = self.orders.host.pop(self.orders.now_s)
            if node is None:
                break
            self._evict_host_leaf(node, *frees, cache_actions=actions)
        return result

    # -- commands on a chosen node ------------------------------------------------

    def find_node(self, node_id: int) -> Any | None:
        """The live node, or None if it was deleted."""
        return self._node_arena.get(node_id)

    def root(self) -> Any:
        return self.root_node

    def path_end(self, node: Any) -> int:
        """Tokens from the root to the node's end. O(depth)."""
        return sum(len(step.key) for step in path_up(node))

    def live_nodes(self) -> list[Any]:
        """All nodes but the root, in order of creation."""
        return [n for n in self._node_arena.values() if n is not self.root_node]

    def tokens_of(self, node: Any) -> tuple[int, int]:
        """(device, host) tokens that the node holds; both, where it sits on both tiers."""
        data = node.component_data[BASE_COMPONENT_TYPE]
        device = 0 if data.value is None else len(data.value)
        host = 0 if data.host_value is None else len(data.host_value)
        return device, host

    def is_locked(self, node: Any) -> bool:
        """In use by a request or a transfer, on any tier."""
        return any(cd.lock_ref > 0 or cd.host_lock_ref > 0 for cd in node.component_data)

    def drop_leaf(self, node: Any) -> DropResult:
        """Free one childless node on both tiers; `dropped` is False if it is in use."""
        result = DropResult()
        if node.children or self.is_locked(node):
            return result
        device, host = self.tokens_of(node)
        frees = (result.tracker, result.device_frees, result.host_frees)
        if device:
            self._delete_unbacked_device_leaf(node, *frees, cache_actions=result.cache_actions)
        elif host:
            self._evict_host_leaf(node, *frees, cache_actions=result.cache_actions)
        else:
            return result
        result.dropped, result.device_tokens, result.host_tokens = True, device, host
        return result

    def unbacked_chain(self, node: Any) -> list[int]:
        """Ids of the nodes root..`node` that lack a host copy, root first.

        Stops above a node whose transfer is in flight or that holds nothing.
        """
        chain = []
        for step in reversed(list(path_up(node))):
            if step.backuped:
                continue
            if step.evicted or step.write_through_pending_id is not None:
                break
            chain.append(step.id)
        return chain

    def check_tags(self) -> None:
        """Raise AssertionError if the tags, the orders and the tree disagree."""
        self.tags.check(self._node_arena)
        for order, leaves, is_leaf in (
            (self.orders.device, self.evictable_device_leaves, self._is_device_leaf),
            (self.orders.host, self.evictable_host_leaves, self._is_host_leaf),
        ):
            assert leaves == set(filter(is_leaf, self._node_arena.values())), "wrong leaves"
            lost = [node.id for node in leaves if not order.holds(node)]
            assert not lost, f"leaves that are not queued: {lost[:10]}"


def _has_device_child(node: Any) -> bool:
    for child in node.children.values():
        if child.component_data[BASE_COMPONENT_TYPE].value is not None:
            return True
    return False
