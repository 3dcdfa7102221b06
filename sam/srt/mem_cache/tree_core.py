"""The session tree core: SGLang's Python TreeCore plus ownership tags and an eviction order.

Owns the order of victims and the dropping of a chosen node. Must never decide *what* to
drop or move (the tier manager does), nor touch a locked node. With no tags the victim
order is that of the base policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import BaseEvictionResult

from sam.srt.mem_cache.ownership import OwnershipTags, path_up

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


class SessionEvictionStrategy(EvictionStrategy):
    """(retention class, base policy): smaller goes first.

    Source: `sglang.srt.mem_cache.evict_policy.EvictionStrategy`.
    """

    def __init__(self, tags: OwnershipTags, base: EvictionStrategy) -> None:
        self._tags = tags
        self._base = base

    def get_priority(self, node: Any) -> tuple[int, Any]:
        cls = self._tags.retention_class(node, node.backuped)
        return int(cls), self._base.get_priority(node)


class DropResult(BaseEvictionResult):
    """What dropping one node freed, in tokens; the caller drains the frees."""

    dropped: bool = False
    device_tokens: int = 0
    host_tokens: int = 0


class SessionTreeCore(UnifiedTreeCore):
    """Source: `sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore`."""

    n_mismatches = 0
    """It is the tree itself: nothing can disagree. See `ShadowTreeCore`."""

    def __init__(self, params: CacheInitParams, components: dict[Any, Any]) -> None:
        self.tags = OwnershipTags()
        super().__init__(params, components)
        self.eviction_strategy = SessionEvictionStrategy(self.tags, self.eviction_strategy)

    def reset(self) -> None:
        super().reset()
        self.tags.clear()

    def _split_node(self, key, child, split_len):
        new_node, action = super()._split_node(key, child, split_len)
        self.tags.on_split(new_node, child)
        return new_node, action

    def _remove_leaf_from_parent(self, node) -> None:
        self.tags.on_delete(node)
        super()._remove_leaf_from_parent(node)

    # -- commands on a chosen node ------------------------------------------------

    def find_node(self, node_id: int) -> Any | None:
        """The live node, or None if it was deleted."""
        return self._node_arena.get(node_id)

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
        """Raise AssertionError if the tags and the tree disagree."""
        self.tags.check(self._node_arena)
