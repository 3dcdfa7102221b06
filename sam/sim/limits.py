"""What no order can exceed: the infinite cache, MIN, and MIN that must hold the request.

Owns clairvoyant replays of a fixed order of requests. Must never be used to decide
anything: they know the future.

The next use of a page is never before that of the pages above it, so the resident part of
a stream is always a head of it, and the farthest next use is always at a leaf: Belady's
choice is one that a prefix tree can make. Pages count one each; a tail of tokens that
fills no page is nobody's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

Path = Sequence[tuple[int, int]]
Steps = Callable[[], Iterator[tuple[int, Path | None]]]
"""Starts (run, path) and ends (run, None) of requests, from the beginning at each call."""
NEVER = 1 << 60


def ceiling_hits(paths: Iterator[Path]) -> Iterator[int]:
    """Hit pages of each request where everything that was ever computed is kept."""
    seen: dict[int, int] = {}
    for path in paths:
        hit, whole = 0, True
        for stream, pages in path:
            known = seen.get(stream, 0)
            if whole:
                hit += min(known, pages)
                whole = known >= pages
            if known < pages:
                seen[stream] = pages
        yield hit


class Future:
    """When which pages of a stream are used: requests and lengths, and a cursor."""

    __slots__ = ("at", "lengths", "longer", "requests")

    def __init__(self) -> None:
        self.requests = array("q")
        self.lengths = array("q")
        self.longer = array("q")
        self.at = 0

    def index(self) -> None:
        """For each use, the next one that is longer (or the number of uses)."""
        n = len(self.lengths)
        self.longer = longer = array("q", [n]) * n
        open_uses: list[int] = []
        for i, length in enumerate(self.lengths):
            while open_uses and self.lengths[open_uses[-1]] < length:
                longer[open_uses.pop()] = i
            open_uses.append(i)

    def runs(self, pages: int) -> list[list[int]]:
        """[end page, next use] of the first `pages` after the use at the cursor, in order."""
        runs: list[list[int]] = []
        use, n = self.at + 1, len(self.requests)
        while use < n:
            length = self.lengths[use]
            runs.append([min(length, pages), self.requests[use]])
            if length >= pages:
                return runs
            use = self.longer[use]
        runs.append([pages, NEVER])
        return runs


def futures(steps: Steps) -> dict[int, Future]:
    """Uses of every stream."""
    streams: dict[int, Future] = {}
    for i, path in enumerate(path for _, path in steps() if path is not None):
        for stream, pages in path:
            future = streams.get(stream)
            if future is None:
                future = streams[stream] = Future()
            future.requests.append(i)
            future.lengths.append(pages)
    for future in streams.values():
        future.index()
    return streams


class Floors:
    """How much of each stream is in use by running requests."""

    def __init__(self) -> None:
        self._paths: dict[int, Path] = {}
        self._lengths: dict[int, dict[int, int]] = {}  # stream -> run -> pages

    def __len__(self) -> int:
        return len(self._paths)

    def hold(self, run: int, path: Path) -> None:
        self._paths[run] = path
        for stream, pages in path:
            self._lengths.setdefault(stream, {})[run] = pages

    def release(self, run: int) -> None:
        for stream, _ in self._paths.pop(run, ()):
            lengths = self._lengths[stream]
            del lengths[run]
            if not lengths:
                del self._lengths[stream]

    def release_oldest(self) -> None:
        self.release(next(iter(self._paths)))

    def of(self, stream: int) -> int:
        lengths = self._lengths.get(stream)
        return max(lengths.values()) if lengths else 0


class _Belady:
    """Resident runs of streams, the farthest next use first."""

    def __init__(self, capacity_pages: int, streams: dict[int, Future]) -> None:
        self.capacity_pages = capacity_pages
        self.streams = streams
        self.used_pages = 0
        self._runs: dict[int, list[list[int]]] = {}  # stream -> [end page, next use], in order
        self._heap: list[tuple[int, int, int]] = []  # (- next use, - place in path, stream)

    def hit(self, path: Path) -> int:
        hit = 0
        for stream, pages in path:
            runs = self._runs.get(stream)
            here = min(runs[-1][0], pages) if runs else 0
            hit += here
            if here < pages:
                break
        return hit

    def hold(self, path: Path) -> None:
        """Make the whole path resident, for its next uses. May exceed the capacity."""
        for place, (stream, pages) in enumerate(path):
            old = self._runs.get(stream, [])
            future = self.streams[stream]
            runs = future.runs(pages)
            future.at += 1
            was = old[-1][0] if old else 0
            runs += [run for run in old if run[0] > pages]
            self.used_pages += max(pages - was, 0)
            self._runs[stream] = runs
            heappush(self._heap, (-runs[-1][1], -place, stream))

    def shrink(self, floors: Floors | None) -> bool:
        """Evict down to the capacity, nothing below `floors`; returns whether it fits."""
        held = []
        while self.used_pages > self.capacity_pages and self._heap:
            key, place, stream = heappop(self._heap)
            runs = self._runs.get(stream)
            if not runs or -runs[-1][1] != key:
                continue
            start = runs[-2][0] if len(runs) > 1 else 0
            floor = floors.of(stream) if floors is not None else 0
            if runs[-1][0] <= floor:
                held.append((key, place, stream))
                continue
            self._trim(stream, runs, max(start, floor))
            if runs:
                heappush(self._heap, (-runs[-1][1], place, stream))
        for entry in held:
            heappush(self._heap, entry)
        return self.used_pages <= self.capacity_pages

    def _trim(self, stream: int, runs: list[list[int]], down_to: int) -> None:
        end = runs[-1][0]
        pages = min(end - down_to, self.used_pages - self.capacity_pages)
        self.used_pages -= pages
        start = runs[-2][0] if len(runs) > 1 else 0
        if end - pages <= start:
            runs.pop()
        else:
            runs[-1][0] = end - pages
        if not runs:
            del self._runs[stream]


def min_hits(
    steps: Steps,
    capacity_pages: int,
    *,
    may_refuse: bool,
    streams: dict[int, Future] | None = None,
) -> Iterator[int]:
    """Hit pages of each request under Belady's MIN.

    `may_refuse`: whatever is used last may go, be it in use or not even stored (the bound).
    Else every running request is held until its answer is complete, as an engine must: the
    attainable MIN-NB. Where the running ones do not fit, the oldest is let go first.
    `streams`: `futures` of these steps, where they are at hand.
    """
    if streams is None:
        streams = futures(steps)
    for future in streams.values():
        future.at = 0
    cache, floors = _Belady(capacity_pages, streams), Floors()
    for run, path in steps():
        floors.release(run)
        if path is None:
            continue
        yield cache.hit(path)
        cache.hold(path)
        if may_refuse:
            cache.shrink(None)
            continue
        floors.hold(run, path)
        while not cache.shrink(floors) and floors:
            floors.release_oldest()
