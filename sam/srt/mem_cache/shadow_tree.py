"""A shadow of the tree core's tree: shape, tiers, locks and recency of every node.

Owns pure bookkeeping, no tokens and no tensors, and the order of leaves on both tiers. Must
never call the core: `shadow_core.py` tells it what the core did.

Recency. The core touches every node of a path that a match or an insert walks. Here only
the deepest one and the device-evicted ones above it are touched; `thru` is the last such
walk, and a node that leaves the device hands it to its parent, the only one that can become
a leaf by that. `lat` is what orders a leaf: a split or a host insert raises it alone.

Locks. The core locks a node and all above. Here `below` counts the locks at a node and at
device-evicted nodes right below it: what a device leaf or a host leaf has to know.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import msgspec

from sam.srt.mem_cache.ownership import OwnershipTags
from sam.srt.mem_cache.tier_orders import TierOrders

_NO_CHILDREN: Any = MappingProxyType({})


class ShadowNode(msgspec.Struct, eq=False, gc=False):
    """One node. `end`: tokens from the root to its end; `guard`: of the core's receipt for
    our host lock what differs from node to node.

    Not seen by the garbage collector, which would take half a second for 100,000: nodes
    refer to each other, so `ShadowTree.dismantle` has to let them go.
    """

    id: int
    parent: ShadowNode | None
    end: int
    children: dict[int, ShadowNode] = _NO_CHILDREN
    device: bool = False
    backuped: bool = False
    n_device: int = 0
    below: int = 0
    host_locks: int = 0
    lat: int = 0
    thru: int = 0
    guard: int | None = None
    write_through_pending_id: int | None = None
    load_back_pending_id: int | None = None

    @property
    def n_tokens(self) -> int:
        return self.end - self.parent.end if self.parent is not None else 0

    @property
    def key(self) -> range:
        """Stands in for the key where only its length counts."""
        return range(self.n_tokens)

    @property
    def evicted(self) -> bool:
        return not self.device


def is_device_leaf(node: ShadowNode) -> bool:
    """On device, nothing below it on device, unlocked, not the root."""
    return node.device and not node.n_device and not node.below and node.parent is not None


def is_host_leaf(node: ShadowNode) -> bool:
    """On host only, childless, unlocked on both tiers."""
    return (
        not node.device
        and node.backuped
        and not node.children
        and not node.below
        and not node.host_locks
    )


def create_orders(tags: OwnershipTags) -> TierOrders:
    """Empty orders for the leaves of a shadow tree."""
    return TierOrders(tags, is_device_leaf, is_host_leaf, when="lat")


class ShadowTree:
    """See the module. The leaves of `orders` are those of this tree from now on."""

    def __init__(self, root_id: int, orders: TierOrders) -> None:
        self.root = ShadowNode(root_id, None, 0)
        self.root.device = True
        self.nodes: dict[int, ShadowNode] = {root_id: self.root}
        self.clock = 0
        orders.bind(self.nodes)
        self.device_leaves, self.host_leaves = orders.device, orders.host
        self.duplicates: dict[int, None] = {}
        self.segments: dict[tuple[int, Any], list[Any]] = {}

    def dismantle(self) -> None:
        """The tree is not used any more. O(nodes)."""
        for node in self.nodes.values():
            node.parent, node.children = None, _NO_CHILDREN

    # -- shape --------------------------------------------------------------------

    def add_leaf(
        self, node_id: int, parent: ShadowNode, n_tokens: int, *, host: bool
    ) -> ShadowNode:
        """A new leaf, on host if `host`, else on device."""
        assert node_id not in self.nodes and n_tokens > 0
        node = self.nodes[node_id] = ShadowNode(node_id, parent, parent.end + n_tokens)
        if parent.children is _NO_CHILDREN:
            parent.children = {}
        parent.children[node_id] = node
        self.clock = node.lat = self.clock + 1
        if host:
            node.backuped = True
            self.host_leaves.offer_new(node_id, node.lat)
        else:
            node.device = True
            node.thru = node.lat
            parent.n_device += 1
            self.device_leaves.offer_new(node_id, node.lat)
        return node

    def split(self, upper_id: int, lower: ShadowNode, end: int, *, on_path: bool) -> ShadowNode:
        """`lower` lost its head, up to `end`, to the new node; `on_path`: by a walk from
        the root."""
        parent = lower.parent
        assert upper_id not in self.nodes and parent.end < end < lower.end
        upper = self.nodes[upper_id] = ShadowNode(upper_id, parent, end)
        del parent.children[lower.id]
        self.adopt(parent, upper)
        self.adopt(upper, lower)
        lower.parent = upper
        upper.device, upper.backuped = lower.device, lower.backuped
        upper.n_device, upper.below = (1, 0) if lower.device else (0, lower.below)
        upper.host_locks = lower.host_locks
        upper.write_through_pending_id = lower.write_through_pending_id
        upper.load_back_pending_id = lower.load_back_pending_id
        upper.lat = self.tick()
        upper.thru = upper.lat if on_path else lower.thru
        for segment in self.segments.values() if lower.host_locks else ():
            if segment[1] == lower.id:
                segment[1] = upper_id
        lower.lat = self.tick()
        self.offer(lower)
        self.update_duplicate(upper)
        return upper

    def delete(self, node: ShadowNode) -> None:
        """A childless node is gone from all tiers."""
        parent, node_id = node.parent, node.id
        assert parent is not None and not node.children and not node.below
        if node.device:
            node.device = False
            parent.n_device -= 1
            self._hand_up(node)
            self.device_leaves.discard(node_id)
        else:
            self.host_leaves.discard(node_id)
        if self.duplicates:
            self.duplicates.pop(node_id, None)
        del parent.children[node_id]
        del self.nodes[node_id]
        if not parent.n_device:
            self.offer(parent)

    # -- tiers --------------------------------------------------------------------

    def gain_device(self, node: ShadowNode) -> None:
        """Device values are there, by a load or by an insert that brought its own."""
        if node.device:
            return
        node.device = True
        node.parent.n_device += 1
        node.parent.below -= node.below
        self.host_leaves.discard(node.id)
        self.device_leaves.offer(node)

    def lose_device(self, node: ShadowNode) -> None:
        parent = node.parent
        assert node.device and not node.n_device
        node.device = False
        parent.n_device -= 1
        parent.below += node.below
        self._hand_up(node)
        self.device_leaves.discard(node.id)
        self.offer(parent)
        self.offer(node)

    def set_host(self, node: ShadowNode, backuped: bool) -> None:
        node.backuped = backuped
        self.offer(node)

    def update_duplicate(self, node: ShadowNode) -> None:
        """As the core does where a host copy becomes, or stops being, redundant."""
        if (
            node.device
            and node.backuped
            and node.parent is not None
            and node.write_through_pending_id is None
            and node.load_back_pending_id is None
        ):
            self.duplicates.setdefault(node.id)
        else:
            self.duplicates.pop(node.id, None)

    # -- recency ------------------------------------------------------------------

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def touch(self, node: ShadowNode) -> None:
        """A walk from the root ended here."""
        self.clock = now = self.clock + 1
        node.lat = node.thru = now
        while not node.device:
            node = node.parent
            node.lat = node.thru = now

    @staticmethod
    def _hand_up(node: ShadowNode) -> None:
        """The node leaves the device: its parent saw all walks that came by here."""
        parent, thru = node.parent, node.thru
        if thru > parent.lat:
            parent.lat = thru
        if thru > parent.thru:
            parent.thru = thru

    def touch_alone(self, nodes: Iterable[ShadowNode]) -> None:
        """A walk that began below the root passed these."""
        for node in nodes:
            node.lat = self.tick()
            self.offer(node)

    def offer(self, node: ShadowNode) -> None:
        """Queue the node where it is a leaf."""
        if node.device:
            if not node.n_device and not node.below:
                self.device_leaves.offer(node)
        elif not node.children:
            self.host_leaves.offer(node)

    def users_changed(self, node: ShadowNode) -> None:
        """The users of the node and of what is above it may have changed."""
        if self.nodes.get(node.id) is not node:
            return
        if not node.device:
            self.host_leaves.offer(node)
            while not node.device:
                node = node.parent
        if not node.n_device and not node.below:
            self.device_leaves.offer(node)

    # -- locks --------------------------------------------------------------------

    def lock(self, node: ShadowNode) -> None:
        node.below += 1
        while not node.device:
            node = node.parent
            node.below += 1

    def unlock(self, node: ShadowNode) -> None:
        assert node.below > 0, f"node {node.id} is not locked"
        first = node
        node.below -= 1
        while not node.device:
            node = node.parent
            node.below -= 1
        if not node.below and not node.n_device:
            self.device_leaves.offer(node)
        if not first.device and not first.below:
            self.host_leaves.offer(first)

    def lock_host(self, node: ShadowNode, boundary: Any) -> None:
        """A host lock anchored here; it grows over heads that are split off later."""
        node.host_locks += 1
        segment = self.segments.setdefault((node.id, boundary), [node.id, node.id, 0])
        segment[2] += 1

    def unlock_host(self, node: ShadowNode, boundary: Any) -> None:
        segment = self.segments[(node.id, boundary)]
        segment[2] -= 1
        if not segment[2]:
            del self.segments[(node.id, boundary)]
        while True:
            node.host_locks -= 1
            if not node.host_locks:
                self.offer(node)
            if node.id == segment[1]:
                return
            node = node.parent

    @staticmethod
    def adopt(parent: ShadowNode, node: ShadowNode) -> None:
        if parent.children is _NO_CHILDREN:
            parent.children = {}
        parent.children[node.id] = node
