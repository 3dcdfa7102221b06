"""SGLang's Rust TreeCore with a shadow that follows every call of the controller.

Owns the shadow, the ownership tags and the guards: one host lock of ours per host-resident
node, so that the core frees no host copy that we did not choose. Must never let a fault of
the shadow reach the controller: it is counted, the shadow is rebuilt from the core, and
after too many faults the core goes on alone, in its own order, until the next reset.

The core reports splits only in the mode of a transient host buffer; for full attention that
mode changes nothing else (shared/treecore.md), so it is on here and hidden from callers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.cache_action import (
    BackupKV,
    UpdatePendingBackupOnNodeSplit,
)
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from sam.srt.mem_cache.shadow_binding import FullTreeCore
from sam.srt.mem_cache.shadow_sync import end_of_host_insert, rebuild
from sam.srt.mem_cache.shadow_tags import ShadowTags
from sam.srt.mem_cache.shadow_tree import ShadowNode, ShadowTree, create_orders

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

logger = logging.getLogger(__name__)

_FULL = int(BASE_COMPONENT_TYPE)
MAX_REBUILDS = 8
"""Rebuilds of the shadow between two resets; after that the core goes on alone."""


class Mismatch(Exception):
    """The shadow and the core disagree."""


class FollowedTreeCore(FullTreeCore):
    """`ordering`: the shadow is trusted. Without it every call is the plain core's."""

    def __init__(self, params: CacheInitParams) -> None:
        super().__init__(params)
        super().set_host_memory_buffer_only()
        self.tags = ShadowTags()
        self.orders = create_orders(self.tags)
        self.tags.changed = self._users_changed
        self.tags.faulted = self._mismatch
        self.n_mismatches = self.n_unseen_touches = 0
        self._rebuilding = False
        self._whole_pages = self.page_size
        self._start_over()

    def reset(self) -> None:
        super().reset()
        self._start_over()

    @property
    def is_host_memory_buffer_only(self) -> bool:
        return False

    def _start_over(self) -> None:
        self.tags.clear()
        former = getattr(self, "shadow", None)
        self.shadow = ShadowTree(self.root_node_handle(), self.orders)
        if former is not None:
            self.shadow.clock = former.clock
            former.dismantle()
        self.ordering = True
        self._n_rebuilds = 0
        self._insert_tokens = 0
        self._inserting = False

    def use_policy(self, policy: str) -> None:
        """Choose the retention policy, on an empty tree. Raises ValueError."""
        self.orders.use_policy(policy)
        self._start_over()

    def tell_time(self, time_s: float) -> None:
        """Message time moved on."""
        self.orders.advance(time_s, self.shadow.clock)

    def _users_changed(self, node: ShadowNode) -> None:
        self.shadow.users_changed(node)

    # -- faults -------------------------------------------------------------------

    def _follow(self, call: Callable[..., None], *args: Any) -> None:
        if self.ordering:
            try:
                call(*args)
            except Exception as error:
                self._mismatch(error)

    def _mismatch(self, error: Exception) -> None:
        """Make the shadow fit the core again, or stop using it."""
        self.n_mismatches += 1
        if self.n_mismatches <= 10:
            logger.error(
                "sam: shadow and tree core disagree (%d): %r",
                self.n_mismatches,
                error,
                exc_info=error,
            )
        if not self.ordering:
            return
        if self._rebuilding:
            raise error
        self._n_rebuilds += 1
        self._rebuilding = True
        try:
            if self._n_rebuilds > MAX_REBUILDS:
                raise Mismatch("too many rebuilds")
            guards = {n.id: n.guard for n in self.shadow.nodes.values() if n.guard is not None}
            self.tags.clear()
            former = self.shadow
            self.shadow = rebuild(self, former, self.orders)
            former.dismantle()
            for node in self.shadow.nodes.values():
                if node.backuped:
                    node.guard = guards.get(node.id)
                    if node.guard is None:
                        self._guard(node)
        except Exception as again:
            self._go_on_alone(again)
        finally:
            self._rebuilding = False

    def _go_on_alone(self, error: Exception) -> None:
        logger.error("sam: the tree core goes on in stock order until a flush: %r", error)
        self.ordering = False
        self.tags.clear()
        for node in self.shadow.nodes.values():
            if node.guard is not None:
                try:
                    self._unguard(node)
                except KeyError:
                    pass

    # -- guards -------------------------------------------------------------------

    def _guard(self, node: ShadowNode) -> None:
        receipt = self._binding.inc_host_lock_ref(node.id)
        node.guard = receipt.component_host_lock_uuids[_FULL]

    def _unguard(self, node: ShadowNode) -> None:
        guard, node.guard = node.guard, None
        if guard is None:
            raise Mismatch(f"host node {node.id} has no guard")
        self._release_guard(node.id, guard)

    def _release_guard(self, node_id: int, guard: int) -> None:
        receipt = self._bindings.DecLockRefParamsBinding(
            node_id=node_id,
            skipped_lock_components=[],
            component_lock_uuids={},
            component_host_lock_uuids={_FULL: guard},
        )
        self._binding.dec_host_lock_ref(node_id, receipt)

    # -- walks --------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        result = super().match_prefix(params)
        if self.ordering:
            try:
                if result.cache_actions:
                    self._take_splits(result.cache_actions, result.full_kv_hit_length)
                shadow = self.shadow
                node = shadow.nodes[result.best_match_node]
                if node.device:
                    shadow.clock = node.lat = node.thru = shadow.clock + 1
                else:
                    shadow.touch(node)
            except Exception as error:
                self._mismatch(error)
        return result

    def begin_insert(self, params: Any) -> Any:
        step = super().begin_insert(params)
        if self.ordering:
            try:
                n_tokens = len(params.key)
                self._insert_tokens = n_tokens - n_tokens % self._whole_pages
                self._saw_insert_step(step)
            except Exception as error:
                self._mismatch(error)
        return step

    def resume_insert(self) -> Any:
        step = super().resume_insert()
        self._follow(self._saw_insert_step, step)
        return step

    def end_insert(self) -> list[Any]:
        actions = super().end_insert()
        if self._inserting and self.ordering:
            self._inserting = False
            self._follow(self._saw_insert_abort, actions)
        return actions

    def insert_host(self, node_id: int, key: Any, host_value: Any, hash_value: list[str]) -> Any:
        result = super().insert_host(node_id, key, host_value, hash_value)
        self._follow(self._saw_insert_host, node_id, key, result)
        return result

    def _saw_insert_step(self, step: Any) -> None:
        result, nodes = step.result, self.shadow.nodes
        self._inserting = result is None
        if step.actions:
            self._take_splits(step.actions, None if result is None else result.prefix_len)
        if result is None:
            for action in step.actions:
                if isinstance(action, BackupKV):
                    self._reach(nodes[action.node_ids[-1]])
                    self.shadow.touch(nodes[action.node_ids[-1]])
            return
        if result.rotation_tail_declined:
            return
        target = nodes.get(result.last_device_node)
        if target is not None:
            self._reach(target)
            self.shadow.touch(target)
            return
        n_tokens = self._insert_tokens - result.prefix_len
        parent = self.shadow.root
        if result.prefix_len:
            state = self._binding.validate_buffer_backup(result.last_device_node, n_tokens)
            if state is None:
                raise Mismatch(f"new leaf {result.last_device_node} has not {n_tokens} tokens")
            parent = nodes[state.parent_node_id]
        if not parent.device:
            self._reach(parent)
        self.shadow.add_leaf(result.last_device_node, parent, n_tokens, host=False)

    def _saw_insert_abort(self, actions: list[Any]) -> None:
        self._take_splits(actions, None)
        raise Mismatch("an insert was given up half-way")

    def _saw_insert_host(self, anchor_id: int, key: Any, result: Any) -> None:
        anchor = self.shadow.nodes[anchor_id]
        uppers = self._take_splits(result.cache_actions, None, on_path=False)
        deepest = result.inserted_host_node
        if deepest is None and uppers:
            deepest = uppers[-1].id
        if deepest is None and result.total_len and not result.host_insert_dropped:
            deepest = end_of_host_insert(self, anchor, key)
            self.n_unseen_touches += deepest is None
        if deepest is None:
            self.shadow.touch_alone([anchor])
            return
        if deepest not in self.shadow.nodes:
            info = super().collect_path_info([deepest])[0][-1]
            parent = self.shadow.nodes[info.parent_id]
            leaf = self.shadow.add_leaf(deepest, parent, info.path_end - info.path_start, host=True)
            self._guard(leaf)
        chain = [self.shadow.nodes[deepest]]
        while chain[-1] is not anchor:
            chain.append(chain[-1].parent)
        if not self.is_write_back:
            self._refill(chain[:-1])
        self.shadow.touch_alone(reversed(chain))

    def _refill(self, nodes: Sequence[ShadowNode]) -> None:
        """What lay on device only has a host copy now."""
        for node in reversed(nodes):
            if not node.backuped:
                self.shadow.set_host(node, True)
                self._guard(node)
                self.shadow.update_duplicate(node)

    def _reach(self, node: ShadowNode) -> None:
        """An insert walked to the node: everything above is on device now."""
        evicted = []
        while not node.device:
            evicted.append(node)
            node = node.parent
        for node in reversed(evicted):
            self.shadow.gain_device(node)
            self.shadow.update_duplicate(node)

    def _take_splits(
        self, actions: list[Any], end: int | None, *, on_path: bool = True
    ) -> list[ShadowNode]:
        """Follow the splits; `end`: where the walk ended. Reports that only we asked for
        are taken out."""
        uppers, kept = [], []
        for action in actions:
            if type(action) is UpdatePendingBackupOnNodeSplit:
                uppers.append(self._split(action, end, on_path))
                if action.ack_id is None:
                    continue
            kept.append(action)
        if len(kept) != len(actions):
            actions[:] = kept
        return uppers

    def _split(self, action: Any, end: int | None, on_path: bool) -> ShadowNode:
        lower = self.shadow.nodes[action.new_child_node_id]
        if end is None:
            end = super().collect_path_info([action.new_node_id])[0][-1].path_end
        upper = self.shadow.split(action.new_node_id, lower, end, on_path=on_path)
        self.tags.on_split(upper, lower)
        self.shadow.users_changed(lower)
        if lower.guard is not None:
            former = lower.guard
            self._guard(upper)
            self._guard(lower)
            self._release_guard(lower.id, former)
        return upper

    # -- locks --------------------------------------------------------------------

    def inc_lock_ref(self, node_id: int, skip_lock_components: Sequence[Any] = ()) -> Any:
        result = super().inc_lock_ref(node_id, skip_lock_components)
        if self.ordering and BASE_COMPONENT_TYPE not in skip_lock_components:
            try:
                self.shadow.lock(self.shadow.nodes[node_id])
            except Exception as error:
                self._mismatch(error)
        return result

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        result = super().dec_lock_ref(node_id, params, skip_swa)
        if self.ordering and BASE_COMPONENT_TYPE not in params.skipped_lock_components:
            try:
                self.shadow.unlock(self.shadow.nodes[node_id])
            except Exception as error:
                self._mismatch(error)
        return result

    def inc_host_lock_ref(self, node_id: int) -> Any:
        result = super().inc_host_lock_ref(node_id)
        boundary = result.component_host_lock_uuids.get(BASE_COMPONENT_TYPE)
        if boundary is not None:
            self._follow(self._saw_host_lock, node_id, boundary)
        return result

    def dec_host_lock_ref(self, node_id: int, params: Any) -> Any:
        result = super().dec_host_lock_ref(node_id, params)
        boundary = params.component_host_lock_uuids.get(BASE_COMPONENT_TYPE)
        if boundary is not None:
            self._follow(self._saw_host_unlock, node_id, boundary)
        return result

    def _saw_host_lock(self, node_id: int, boundary: Any) -> None:
        self.shadow.lock_host(self.shadow.nodes[node_id], boundary)

    def _saw_host_unlock(self, node_id: int, boundary: Any) -> None:
        self.shadow.unlock_host(self.shadow.nodes[node_id], boundary)

    # -- transfers ----------------------------------------------------------------

    def commit_backup(self, node_id: int, host_indices: Any, comp_xfers: Any) -> None:
        super().commit_backup(node_id, host_indices, comp_xfers)
        if host_indices.numel():
            self._follow(self._saw_backup, node_id)

    def _saw_backup(self, node_id: int) -> None:
        node = self.shadow.nodes[node_id]
        if node.guard is None:
            self._guard(node)
        self.shadow.set_host(node, True)

    def mark_write_through_pending(self, node_ids: list[int], ack_id: int) -> list[int]:
        ordered = super().mark_write_through_pending(node_ids, ack_id)
        self._follow(self._saw_pending, node_ids, ack_id)
        return ordered

    def _saw_pending(self, node_ids: list[int], ack_id: int) -> None:
        for node_id in node_ids:
            self.shadow.nodes[node_id].write_through_pending_id = ack_id

    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None:
        super().finish_write_through(node_ids, ack_id)
        self._follow(self._saw_write_ack, node_ids, ack_id)

    def _saw_write_ack(self, node_ids: list[int], ack_id: int) -> None:
        for node_id in node_ids:
            node = self.shadow.nodes[node_id]
            if node.write_through_pending_id == ack_id:
                node.write_through_pending_id = None
                self.shadow.update_duplicate(node)

    def commit_load_back(
        self, node_id: int, device_indices: Any, kv_xfer: Any, comp_xfers: Any
    ) -> list[Any]:
        loaded = list(kv_xfer.nodes_to_load or ())
        actions = super().commit_load_back(node_id, device_indices, kv_xfer, comp_xfers)
        self._follow(self._saw_load, node_id, loaded)
        return actions

    def _saw_load(self, anchor_id: int, node_ids: list[int]) -> None:
        pinned = anchor_id if self.is_write_back else None
        for node_id in node_ids:
            node = self.shadow.nodes[node_id]
            node.load_back_pending_id = pinned
            self.shadow.gain_device(node)

    def finish_load_back(self, anchor_node_id: int) -> None:
        super().finish_load_back(anchor_node_id)
        self._follow(self._saw_load_ack, anchor_node_id)

    def _saw_load_ack(self, anchor_id: int) -> None:
        write_back, node = self.is_write_back, self.shadow.nodes[anchor_id]
        while node.parent is not None:
            if not write_back or node.load_back_pending_id == anchor_id:
                node.load_back_pending_id = None
                self.shadow.update_duplicate(node)
            node = node.parent
