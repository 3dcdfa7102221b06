"""What happens when: the requests of one replay, in an order that all policies share.

Owns the record of a schedule and the size of a working set. Must never depend on which
policy is replayed over it: the limits are those of exactly this order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import IntEnum

from sam.sim.trace import Path, Session, Turn


class Kind(IntEnum):
    """What an event is: a request arrives, is started, or its answer is complete."""

    ARRIVED = 0
    STARTED = 1
    ANSWERED = 2


_TURN_BITS = 31
_TURN_MASK = (1 << _TURN_BITS) - 1


class Schedule:
    """Events in order of time. A *run* is one session (or sub-agent) being replayed,
    numbered from 0; the same session replayed twice shares no private content.

    `identities[run]` is the same for the same run of another schedule of the same sessions.
    `ttft_s`: seconds from arrival to the first token, per request in order of start, in the
    loop that made the schedule. `took_s(turn)`: seconds that pass after an answer before the
    idle time proper, where answers are given at once.
    """

    def __init__(
        self, page_tokens: int, took_s: Callable[[Turn], float] = lambda turn: 0.0
    ) -> None:
        self.page_tokens = page_tokens
        self.took_s = took_s
        self.sessions: list[Session] = []
        self.identities: list[Hashable] = []
        self.ttft_s = array("d")
        self._streams_from = array("q")
        self._n_streams = 0
        self._codes = array("q")
        self._times = array("d")

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def n_requests(self) -> int:
        return len(self.ttft_s)

    @property
    def duration_s(self) -> float:
        return self._times[-1] - self._times[0] if self._times else 0.0

    def events(self) -> Iterator[tuple[int, int, int, float]]:
        """(kind, run, turn index, time in seconds)."""
        for code, time_s in zip(self._codes, self._times, strict=True):
            yield code & 3, code >> (_TURN_BITS + 2), (code >> 2) & _TURN_MASK, time_s

    def requests(self) -> Iterator[tuple[int, int]]:
        """(run, turn index) of every request, in order of start."""
        for kind, run, turn, _ in self.events():
            if kind == Kind.STARTED:
                yield run, turn

    def paths(self) -> Iterator[list[tuple[int, int]]]:
        """The prompts' paths, in order of start."""
        for run, turn in self.requests():
            yield self.path(run, turn)

    def steps(self) -> Iterator[tuple[int, list[tuple[int, int]] | None]]:
        """(run, path) of every start, (run, None) of every complete answer."""
        for kind, run, turn, _ in self.events():
            if kind == Kind.STARTED:
                yield run, self.path(run, turn)
            elif kind == Kind.ANSWERED:
                yield run, None

    def path(self, run: int, turn: int) -> list[tuple[int, int]]:
        """The prompt's path, with numbers of its own for private streams."""
        first = self._streams_from[run]
        path = self.sessions[run].turns[turn].path
        return [(first + s if s >= 0 else s, n) for s, n in path]

    def idle_s(self, run: int, turn: int) -> float | None:
        """Seconds from the answer of a request to the next one of its run; None after the last."""
        turns = self.sessions[run].turns
        if turn + 1 == len(turns):
            return None
        return self.took_s(turns[turn]) + turns[turn + 1].think_s

    def add_run(self, session: Session, identity: Hashable) -> int:
        self.sessions.append(session)
        self.identities.append(identity)
        self._streams_from.append(self._n_streams)
        self._n_streams += session.n_streams
        return len(self.sessions) - 1

    def record(self, kind: Kind, run: int, turn: int, time_s: float) -> None:
        self._codes.append((run << _TURN_BITS | turn) << 2 | kind)
        self._times.append(time_s)


class PageSet:
    """Pages of several paths; content that is shared counts once."""

    def __init__(self) -> None:
        self.pages = 0
        self._shared: dict[int, list[int]] = {}  # stream -> [users, pages]

    def add(self, path: Path | Iterable[tuple[int, int]]) -> None:
        for stream, pages in path:
            if stream >= 0:
                self.pages += pages
                continue
            entry = self._shared.setdefault(stream, [0, 0])
            entry[0] += 1
            self.pages += max(pages - entry[1], 0)
            entry[1] = max(entry[1], pages)

    def drop(self, path: Path | Iterable[tuple[int, int]]) -> None:
        """Take out a path that was added."""
        for stream, pages in path:
            if stream >= 0:
                self.pages -= pages
                continue
            entry = self._shared[stream]
            entry[0] -= 1
            if not entry[0]:
                self.pages -= entry[1]
                del self._shared[stream]


def mean_working_set(schedule: Schedule) -> int:
    """Pages of the current prompts of all live sessions, averaged over the requests."""
    live, total, n = PageSet(), 0, 0
    for kind, run, i, _ in schedule.events():
        turns = schedule.sessions[run].turns
        if kind == Kind.STARTED:
            if i:
                live.drop(turns[i - 1].path)
            live.add(turns[i].path)
            total += live.pages
            n += 1
        elif kind == Kind.ANSWERED and i + 1 == len(turns):
            live.drop(turns[i].path)
    return total // max(n, 1)
