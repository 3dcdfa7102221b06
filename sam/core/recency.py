"""Nodes by last access, and when an access was.

Owns one list of nodes, oldest access first, and the way from access counts to message
times. Must never know what a node is, nor read a clock: both are told.

Accesses mostly come in order, so almost every move is an append; a node that enters with
an old access waits in a heap. No call looks at all nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Any

_SLACK = 64
MAX_MARKS = 65_536


class RecencyList:
    """Node ids by `when`, any comparable: the smallest is at the head. O(log n) at most.

    `at` maps each id on the list to its `when`; read-only for others.
    """

    __slots__ = ("_heap", "_newest", "_run", "at")

    def __init__(self) -> None:
        self.at: dict[int, Any] = {}
        self._run: OrderedDict[int, Any] = OrderedDict()
        self._newest: Any = None
        self._heap: list[tuple[Any, int]] = []

    def __len__(self) -> int:
        return len(self.at)

    def put(self, node_id: int, when: Any) -> None:
        """Add a node, or move it to where it belongs by now."""
        was = self.at.get(node_id)
        if was is not None:
            if was == when:
                return
            self._run.pop(node_id, None)
        self.at[node_id], run = when, self._run
        if not run or when > self._newest:
            run[node_id] = when
            self._newest = when
        else:
            heappush(self._heap, (when, node_id))
            if len(self._heap) > _SLACK and len(self._heap) > 2 * len(self.at):
                self._trim()

    def discard(self, node_id: int) -> None:
        """Take a node off, if it is there."""
        if self.at.pop(node_id, None) is not None:
            self._run.pop(node_id, None)

    def head(self) -> tuple[Any, int] | None:
        """(when, id) of the node with the oldest access, or None."""
        run, heap = self._run, self._heap
        while heap:
            when, node_id = heap[0]
            if self.at.get(node_id) != when or node_id in run:
                heappop(heap)
                continue
            if not run:
                return heap[0]
            first = next(iter(run))
            return min(heap[0], (run[first], first))
        for node_id in run:
            return run[node_id], node_id
        return None

    def _trim(self) -> None:
        """Drop what nodes that moved on left in the heap."""
        at, run = self.at, self._run
        self._heap = list({e for e in self._heap if at.get(e[1]) == e[0] and e[1] not in run})
        heapify(self._heap)


class AccessClock:
    """Message time of an access, from the engine's access counter at each new time.

    Remembers the newest `MAX_MARKS` times; of older ones every second is forgotten, so that
    what is old gets less exact, not lost.
    """

    __slots__ = ("_ticks", "_times_s")

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._times_s: list[float] = []

    def mark(self, tick: int, time_s: float) -> None:
        """Accesses after `tick` happen at `time_s` or later. Neither runs backwards."""
        ticks, times_s = self._ticks, self._times_s
        if times_s and time_s <= times_s[-1]:
            return
        if ticks and tick <= ticks[-1]:
            times_s[-1] = time_s
            return
        ticks.append(tick)
        times_s.append(time_s)
        if len(ticks) > MAX_MARKS:
            half = MAX_MARKS // 2
            ticks[:half] = ticks[:half:2]
            times_s[:half] = times_s[:half:2]

    def time_of(self, tick: int) -> float:
        """Message time in seconds of the access with this count; the first mark's before it."""
        i = bisect_right(self._ticks, tick - 1) - 1
        if i < 0:
            return self._times_s[0] if self._times_s else 0.0
        return self._times_s[i]
