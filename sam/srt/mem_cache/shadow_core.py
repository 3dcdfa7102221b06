"""The session tree core over the unmodified Rust TreeCore: order of victims, chosen nodes.

Owns which leaf goes next on either tier, the dropping of a chosen node, and the proof before
each such command: a wrong one would poison the core's mutex and end the scheduler. Must
never decide *what* to drop or move (the tier manager does), nor touch a locked node. With
no tags the order is the core's own.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    BaseEvictionResult,
    DemoteResult,
    DriveHostEvictionResult,
    EvictDeviceNextNodeResult,
    TreePathNodeInfo,
)

from sam.srt.mem_cache.shadow_follow import FollowedTreeCore, Mismatch
from sam.srt.mem_cache.shadow_sync import compare, is_unlocked
from sam.srt.mem_cache.shadow_tree import ShadowNode, is_device_leaf
from sam.srt.mem_cache.tree_core import DropResult, SessionTreeCore

_DEEP = 4
_NO_STEP = EvictDeviceNextNodeResult()
"""The end of a walk; nothing is ever added to it."""

_N_CHILDREN = TreePathNodeInfo.__struct_fields__.index("num_children")


class _Walk:
    """One device eviction in our order. `given`: victims that the controller has to write back
    first; `n_children`: by id, what the core said in this step of nodes above its victims,
    less what went since."""

    __slots__ = ("given", "is_write_back", "n_children", "request")

    def __init__(self, request: int, is_write_back: bool) -> None:
        self.request = request
        self.is_write_back = is_write_back
        self.given: list[ShadowNode] = []
        self.n_children: dict[int, int] = {}


def absorb(into: BaseEvictionResult, part: BaseEvictionResult) -> None:
    """Move what one step freed into the result of several; one component is all there is."""
    into.tracker[BASE_COMPONENT_TYPE] += part.tracker.get(BASE_COMPONENT_TYPE, 0)
    for ours, theirs in (
        (into.device_frees, part.device_frees),
        (into.host_frees, part.host_frees),
    ):
        tensors = theirs.pop(BASE_COMPONENT_TYPE, None)
        if tensors:
            ours[BASE_COMPONENT_TYPE] += tensors
    if part.cache_actions:
        into.cache_actions.extend(part.cache_actions)
        part.cache_actions.clear()


class ShadowTreeCore(FollowedTreeCore):
    """Offers what `SessionTreeCore` offers; its nodes are `ShadowNode`s."""

    free_at_once = 0
    """Device tokens that one step of a walk may free before the controller looks at its
    target again; it sets this to what no target can be reached without."""

    _walk: _Walk | None = None

    # -- device eviction ----------------------------------------------------------

    def evict_device_start(self, component_type: Any, request_cnt: int) -> None:
        if self.ordering:
            self._walk = _Walk(request_cnt, self.is_write_back)
        else:
            super().evict_device_start(component_type, request_cnt)

    def evict_device_next_node(self, component_type: Any, tracker: Any) -> Any:
        walk = self._walk
        if walk is None:
            return super().evict_device_next_node(component_type, tracker)
        before_tokens = tracker.get(component_type, 0)
        if before_tokens >= walk.request and self.ordering:
            return _NO_STEP
        step, evicted_tokens, attempts = EvictDeviceNextNodeResult(), 0, 0
        walk.n_children.clear()
        while self.ordering and attempts < 3:
            try:
                node = self._next_victim(walk, before_tokens + evicted_tokens)
            except Exception as error:
                attempts += 1
                self._mismatch(error)
                continue
            if node is None or self._give(node, step, walk):
                return step
            evicted_tokens = step.tracker[component_type]
            if before_tokens + evicted_tokens >= self.free_at_once:
                return step
        if step.made_progress:
            return step
        self._walk = None
        super().evict_device_start(component_type, walk.request)
        return super().evict_device_next_node(component_type, tracker)

    def _give(self, node: ShadowNode, step: EvictDeviceNextNodeResult, walk: _Walk) -> bool:
        """Evict the victim, as the core may; True if the controller has to, because it
        must be written back first."""
        step.made_progress, backuped = True, node.backuped
        if walk.is_write_back and not backuped:
            step.node_id = node.id
            walk.given.append(node)
            return True
        self._add_evicted(self._binding.evict_device_leaf(node.id), step)
        try:
            if backuped:
                self.shadow.lose_device(node)
            else:
                if walk.n_children and node.parent.id in walk.n_children:
                    walk.n_children[node.parent.id] -= 1
                self.tags.on_delete(node)
                self.shadow.delete(node)
        except Exception as error:
            walk.n_children.clear()
            self._mismatch(error)
        return False

    def evict_device_end(self, component_type: Any) -> None:
        walk, self._walk = self._walk, None
        if walk is None:
            super().evict_device_end(component_type)
            return
        if walk.given:
            self._follow(self._put_back, walk)

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        result = super().evict_device_leaf(node_id, is_write_back)
        if result.backup_kv is None:
            self._follow(self._saw_device_leaf_go, node_id)
        return result

    def demote(self, node_id: int) -> Any:
        if self.ordering:
            node = self.shadow.nodes.get(node_id)
            if node is None or not node.backuped or not self._may_leave_device(node):
                self._mismatch(Mismatch(f"node {node_id} cannot be demoted"))
                if self.ordering:
                    return DemoteResult()
        result = super().demote(node_id)
        self._follow(self._saw_device_leaf_go, node_id)
        return result

    def drop_subtree_no_host(self, node_id: int) -> Any:
        below: list[ShadowNode] = []
        self._follow(self._unguard_below, node_id, below)
        result = super().drop_subtree_no_host(node_id)
        self._follow(self._saw_subtree, node_id, below, result.is_dropped)
        return result

    def _next_victim(self, walk: _Walk, evicted_tokens: int) -> ShadowNode | None:
        if evicted_tokens >= walk.request:
            return None
        node = self.shadow.device_leaves.pop(self.orders.now_s)
        if node is None:
            if self.full_evictable_size() and not any(n.device for n in walk.given):
                raise Mismatch("the core has evictable tokens, the shadow no leaf")
            return None
        if not self._may_leave_device(node, walk.n_children):
            raise Mismatch(f"node {node.id} is no evictable device leaf")
        return node

    def _put_back(self, walk: _Walk) -> None:
        """Victims that stayed, because their backup failed, are leaves as before."""
        for node in walk.given:
            if self.shadow.nodes.get(node.id) is node:
                self.shadow.offer(node)

    def _saw_device_leaf_go(self, node_id: int) -> None:
        node = self.shadow.nodes[node_id]
        if node.backuped:
            self.shadow.lose_device(node)
        else:
            self._delete(node)

    def _unguard_below(self, node_id: int, below: list[ShadowNode]) -> None:
        stack = list(self.shadow.nodes[node_id].children.values())
        while stack:
            node = stack.pop()
            below.append(node)
            stack.extend(node.children.values())
            self._unguard(node)

    def _saw_subtree(self, node_id: int, below: list[ShadowNode], is_dropped: bool) -> None:
        if not is_dropped:
            for node in below:
                self._guard(node)
            return
        for node in reversed(below):
            self._delete(node)
        self._delete(self.shadow.nodes[node_id])

    # -- host eviction ------------------------------------------------------------

    def drive_host_eviction(self, component_type: Any, num_tokens: int) -> Any:
        if not self.ordering or component_type != BASE_COMPONENT_TYPE:
            return super().drive_host_eviction(component_type, num_tokens)
        result = DriveHostEvictionResult()
        self._follow(self._free_host_tokens, result, num_tokens)
        missing = num_tokens - result.tracker.get(component_type, 0)
        if not self.ordering and missing > 0:
            absorb(result, super().drive_host_eviction(component_type, missing))
        return result

    def _free_host_tokens(self, result: Any, num_tokens: int) -> None:
        freed = 0
        if self.is_write_back and not envs.SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM.get():
            freed = self._reclaim_duplicates(result, num_tokens)
        while freed < num_tokens:
            victims = self._host_victims(num_tokens - freed)
            if not victims:
                return
            freed += self._free_host_leaves(victims, result)

    def _host_victims(self, num_tokens: int) -> list[ShadowNode]:
        """Host leaves in our order, those that they uncover included, out of the shadow and
        without their guards."""
        victims = []
        while num_tokens > 0:
            node = self.shadow.host_leaves.pop(self.orders.now_s)
            if node is None:
                break
            victims.append(node)
            num_tokens -= node.n_tokens
            self._unguard(node)
            self._delete(node)
        return victims

    def _free_host_leaves(self, victims: list[ShadowNode], result: Any) -> int:
        """Have the core free them: nothing else on host is without a guard."""
        n_tokens = sum(node.n_tokens for node in victims)
        part = super().drive_host_eviction(BASE_COMPONENT_TYPE, n_tokens)
        freed = part.tracker.get(BASE_COMPONENT_TYPE, 0)
        absorb(result, part)
        if freed != n_tokens:
            self.shadow.nodes.update((node.id, node) for node in victims)
            raise Mismatch(f"freed {freed} of {n_tokens} tokens on host")
        return freed

    def _reclaim_duplicates(self, result: Any, num_tokens: int) -> int:
        """Host copies of what is on device too, oldest first; leaves, which are about to
        be demoted for free, only if nothing else is left."""
        shadow, freed, swept = self.shadow, 0, []
        for spare_leaves in (True, False):
            for node_id in shadow.duplicates:
                if freed >= num_tokens:
                    break
                node = shadow.nodes[node_id]
                if not (node.device and node.backuped):
                    swept.append(node_id)
                elif not (spare_leaves and is_device_leaf(node)) and _is_settled(node):
                    freed += self._free_host(node, result)
                    swept.append(node_id)
        for node_id in swept:
            shadow.duplicates.pop(node_id, None)
        return freed

    def _free_host(self, node: ShadowNode, result: Any) -> int:
        """Free the host copy of one node, which is a host leaf or a settled duplicate: with
        its guard gone it is the only one that the core can take."""
        self._unguard(node)
        part = super().drive_host_eviction(BASE_COMPONENT_TYPE, 1)
        freed = part.tracker.get(BASE_COMPONENT_TYPE, 0)
        absorb(result, part)
        if freed != node.n_tokens:
            raise Mismatch(f"host copy of node {node.id}: freed {freed} of {node.n_tokens}")
        if node.device:
            self.shadow.set_host(node, False)
        else:
            self._delete(node)
        return freed

    def _delete(self, node: ShadowNode) -> None:
        self.tags.on_delete(node)
        self.shadow.delete(node)

    # -- proof --------------------------------------------------------------------

    def _may_leave_device(self, node: ShadowNode, known: dict[int, int] | None = None) -> bool:
        """Whether the core, too, takes the node for an unlocked leaf on device. `known`: see
        `_Walk.n_children`; a path is asked for once in a step, deep ones cost."""
        parent = node.parent
        if parent is None:
            return False
        core, node_id, children = self._binding, node.id, node.children
        n_tokens = node.end - parent.end
        if known and node_id in known:
            state = core.validate_buffer_backup(node_id, n_tokens)
            if state is None or state.parent_node_id != parent.id:
                return False
            n_children = known[node_id]
        else:
            path = core.collect_path_info([node_id])[0]
            _, parent_id, start, end, value_len, n_children = path[-1]
            if (parent_id, start, end, value_len) != (parent.id, parent.end, node.end, n_tokens):
                return False
            if known is not None and len(path) > _DEEP:
                known.update((info[0], info[_N_CHILDREN]) for info in path)
        return (
            n_children == len(children)
            and core.node_backuped(node_id) == node.backuped
            and is_unlocked(core, node_id, n_tokens)
            and (not children or all(map(core.is_full_device_evicted, children)))
        )

    # -- commands on a chosen node ------------------------------------------------

    def find_node(self, node_id: int) -> ShadowNode | None:
        """The live node, or None if it was deleted."""
        return self.shadow.nodes.get(node_id) if self.ordering else None

    def root(self) -> ShadowNode:
        return self.shadow.root

    def path_end(self, node: ShadowNode) -> int:
        """Tokens from the root to the node's end."""
        return node.end

    def live_nodes(self) -> list[ShadowNode]:
        """All nodes but the root, in order of creation."""
        return [node for node in self.shadow.nodes.values() if node.parent is not None]

    def tokens_of(self, node: ShadowNode) -> tuple[int, int]:
        """(device, host) tokens that the node holds; both, where it sits on both tiers."""
        n_tokens = node.n_tokens
        return n_tokens if node.device else 0, n_tokens if node.backuped else 0

    def is_locked(self, node: ShadowNode) -> bool:
        """In use by a request or a transfer, on any tier."""
        if node.below or node.host_locks:
            return True
        if not node.n_device or node.parent is None:
            return False
        return not is_unlocked(self, node.id, node.n_tokens)

    def drop_leaf(self, node: ShadowNode) -> DropResult:
        """Free one childless node on both tiers; `dropped` is False if it is in use."""
        result = DropResult()
        if self.find_node(node.id) is not node or node.children or self.is_locked(node):
            return result
        device, host = self.tokens_of(node)
        if device and not self._may_leave_device(node):
            self._mismatch(Mismatch(f"node {node.id} cannot be dropped"))
            return result
        if device:
            absorb(result, self._drop_device(node))
        if host and self.ordering:
            self._follow(self._free_host, node, result)
        result.dropped, result.device_tokens, result.host_tokens = True, device, host
        return result

    def _drop_device(self, node: ShadowNode) -> BaseEvictionResult:
        if self.is_write_back and not node.backuped:
            return self.drop_subtree_no_host(node.id)
        return self.evict_device_leaf(node.id, self.is_write_back)

    unbacked_chain = SessionTreeCore.unbacked_chain

    def check_tags(self) -> None:
        """Raise AssertionError if the tags, the shadow and the core disagree."""
        if self.ordering:
            self.tags.check(self.shadow.nodes)
            errors = compare(self, self.shadow)
            assert not errors, "; ".join(errors[:10])


def _is_settled(node: ShadowNode) -> bool:
    """No transfer reads or writes the node's host copy."""
    return (
        node.write_through_pending_id is None
        and node.load_back_pending_id is None
        and not node.host_locks
    )
