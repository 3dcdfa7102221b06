"""A map of nodes ordered by an entry: a binary heap with lazy deletion.

Owns one heap and the entry that counts for each node. Must never know what the entries
mean. `put`, `discard` and `head` are O(log n) amortised; after a `put` the dead entries do
not outnumber the live ones by more than a constant.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

Entry = tuple[float, Any, int]
"""(key, last access, node id): smallest first."""

_MIN_DEAD = 64


class Shelf:
    """Nodes by entry. A node is on the shelf at most once: its newest entry counts.

    `entries` maps each node id on the shelf to its entry; read-only for others.
    """

    __slots__ = ("_heap", "entries")

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self.entries

    def put(self, entry: Entry) -> None:
        """Add the node that the entry names, or move it there."""
        self.entries[entry[2]] = entry
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > 2 * len(self.entries) + _MIN_DEAD:
            self._compact()

    def discard(self, node_id: int) -> None:
        """Take a node off, if it is there."""
        self.entries.pop(node_id, None)
        if not self.entries:
            self._heap.clear()

    def head(self) -> Entry | None:
        """The smallest entry, or None."""
        heap, entries = self._heap, self.entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry
            heappop(heap)
        return None

    def get(self, node_id: int) -> Entry | None:
        return self.entries.get(node_id)

    def _compact(self) -> None:
        self._heap = list(self.entries.values())
        heapify(self._heap)
