"""Leaves of one tier in the order in which they go: retention class, then recency.

Owns positions only. Must never decide what a leaf is or which class it has: it is given
both, asks again before it hands out a victim, and is told of every change.

Recency only grows, so almost every move is an append to the class's list; a node that
becomes a leaf with an old recency waits in the class's heap. No call looks at all leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

_SLACK = 64


class LeafQueue:
    """See the module. `nodes` maps ids to live nodes; a node has `id` and `lat`, its recency."""

    def __init__(
        self,
        nodes: dict[int, Any],
        n_classes: int,
        is_leaf: Callable[[Any], bool],
        class_of: Callable[[Any], int],
    ) -> None:
        self._nodes = nodes
        self._is_leaf = is_leaf
        self._class_of = class_of
        self._place: dict[int, tuple[int, int]] = {}
        self._lists: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(n_classes)]
        self._newest = [0] * n_classes
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in range(n_classes)]

    def __len__(self) -> int:
        return len(self._place)

    def holds(self, node: Any) -> bool:
        return node.id in self._place

    def offer(self, node: Any) -> None:
        """Queue the node, or move it to where it belongs by now, if it is a leaf."""
        if not self._is_leaf(node):
            return
        node_id, place = node.id, (self._class_of(node), node.lat)
        was = self._place.get(node_id)
        if was == place:
            return
        if was is not None:
            self._lists[was[0]].pop(node_id, None)
        self._place[node_id] = place
        cls, lat = place
        in_order = self._lists[cls]
        if not in_order or lat >= self._newest[cls]:
            in_order[node_id] = lat
            self._newest[cls] = lat
        else:
            heappush(self._heaps[cls], (lat, node_id))
            self._trim(cls)

    def touched(self, node: Any) -> None:
        """The node has the newest recency of all; its class did not change."""
        was = self._place.get(node.id)
        if was is None:
            self.offer(node)
            return
        cls, lat = was[0], node.lat
        self._place[node.id] = (cls, lat)
        in_order = self._lists[cls]
        in_order[node.id] = lat
        in_order.move_to_end(node.id)
        self._newest[cls] = lat

    def forget(self, node: Any) -> None:
        """The node is gone from this tier."""
        was = self._place.pop(node.id, None)
        if was is not None:
            self._lists[was[0]].pop(node.id, None)

    def pop(self) -> Any | None:
        """Take out the leaf that goes next; None if there is none. Locked leaves fall out:
        they are offered again when they are unlocked."""
        for cls in range(len(self._lists)):
            while (found := self._first(cls)) is not None:
                node_id, lat = found
                del self._place[node_id]
                node = self._nodes.get(node_id)
                if node is None or not self._is_leaf(node):
                    continue
                if node.lat == lat and self._class_of(node) == cls:
                    return node
                self.offer(node)
                return self.pop()
        return None

    def _first(self, cls: int) -> tuple[int, int] | None:
        in_order, heap = self._lists[cls], self._heaps[cls]
        while heap:
            lat, node_id = heap[0]
            if self._place.get(node_id) != (cls, lat) or node_id in in_order:
                heappop(heap)
            elif in_order and next(iter(in_order.values())) < lat:
                break
            else:
                heappop(heap)
                return node_id, lat
        return in_order.popitem(last=False) if in_order else None

    def _trim(self, cls: int) -> None:
        """Drop what nodes that moved on left in the heap, before it outweighs the rest."""
        heap = self._heaps[cls]
        if len(heap) > _SLACK and len(heap) > 2 * len(self._place):
            in_order = self._lists[cls]
            live = {
                (lat, node_id)
                for lat, node_id in heap
                if self._place.get(node_id) == (cls, lat) and node_id not in in_order
            }
            heap[:] = live
            heapify(heap)
