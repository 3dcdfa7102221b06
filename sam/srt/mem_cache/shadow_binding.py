"""SGLang's adapter of the Rust TreeCore, for trees of full attention alone.

Owns the way of results and receipts across the boundary, without the parts that only other
components have: those conversions cost more than the core's own work. Must never change what
a call means: where a result has such a part after all, the adapter converts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    IncLockRefResult,
    InsertResult,
    MatchResult,
)
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import InsertStepResult

_FULL = int(BASE_COMPONENT_TYPE)


class FullTreeCore(RustUnifiedTreeCore):
    """Source: `sglang.srt.mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore`."""

    def inc_lock_ref(self, node_id: int, skip_lock_components: Sequence[Any] = ()) -> Any:
        if skip_lock_components:
            return super().inc_lock_ref(node_id, skip_lock_components)
        taken = self._binding.inc_lock_ref(node_id, [])
        uuids = taken.component_lock_uuids
        ours = {BASE_COMPONENT_TYPE: uuids[_FULL]} if uuids else {}
        return IncLockRefResult(taken.delta, node_id, (), ours)

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        if params.skipped_lock_components or params.component_host_lock_uuids:
            return super().dec_lock_ref(node_id, params, skip_swa)
        receipt = self._bindings.DecLockRefParamsBinding(
            node_id=params.node_id,
            skipped_lock_components=[],
            component_lock_uuids=params.component_lock_uuids,
            component_host_lock_uuids={},
        )
        self._binding.dec_lock_ref(node_id, receipt, skip_swa)
        return DecLockRefResult()

    def _match_result_from_binding(self, result: Any) -> MatchResult:
        return MatchResult(
            result.device_prefix_len,
            result.last_device_node_id,
            result.last_host_node_id,
            result.best_match_node_id,
            result.host_hit_length,
            full_kv_hit_length=result.full_kv_hit_length,
            cache_actions=self._cache_actions_from_tagged(result.cache_actions),
            last_visited_node_id=result.last_visited_node_id,
            full_device_match_len=result.full_device_match_len,
        )

    def _insert_step_from_binding(self, step: Any) -> InsertStepResult:
        found = step.result
        if found is None or found.adopted_ranges is not None:
            return super()._insert_step_from_binding(step)
        result = InsertResult(
            found.prefix_len,
            last_device_node=found.last_device_node,
            rotation_tail_declined=found.rotation_tail_declined,
            host_insert_dropped=found.host_insert_dropped,
        )
        return InsertStepResult(self._cache_actions_from_tagged(step.actions), result)

    def _add_evicted(self, freed: Any, result: Any) -> int:
        """Add what one eviction freed on device to the result of several; tokens."""
        n_tokens = int(freed.tracker.get(_FULL, 0))
        result.tracker[BASE_COMPONENT_TYPE] += n_tokens
        result.unbacked_tokens += freed.unbacked_tokens
        for ours, theirs in (
            (result.device_frees, freed.new_device_frees),
            (result.host_frees, freed.new_host_frees),
        ):
            if theirs:
                ours[BASE_COMPONENT_TYPE] += theirs[_FULL]
        if freed.cache_actions:
            result.cache_actions += self._cache_actions_from_tagged(freed.cache_actions)
        return n_tokens
