"""A closed loop of S sessions in front of one engine: who is served when.

Owns arrivals, the queue, admission and the engine's time. Must never evict anything: what a
request finds comes from a `Finder`, a cache or a record of one.

The engine computes one prompt at a time, decodes all admitted requests side by side, and
admits a request only if the prompts of all that run fit into the device tier together. With
`INSTANT` there is no engine: a request is a point in time, and what it took in the recording
passes before the session's next one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from sam.sim.costs import Costs
from sam.sim.schedule import Kind, PageSet, Schedule
from sam.sim.trace import Session, Trace, Turn

STAGGER_S = 60.0
FCFS, LPM, AT_ONCE, INSTANT = "fcfs", "lpm", "at-once", "instant"
ORDERS = (INSTANT, AT_ONCE, FCFS, LPM)
_COMPUTED = 3  # the prompt is computed; beside the kinds of `Kind`


class Pages(NamedTuple):
    """Pages of one prompt that need not be computed, by where they come from."""

    device: int
    host: int = 0
    pool: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.pool


def took_s(request: Turn, costs: Costs) -> float:
    """Seconds from arrival to answer: as recorded, else what the output takes to decode."""
    return costs.decode_s(request) if request.took_s is None else request.took_s


class Finder(Protocol):
    """Tells what a request finds; hears what happens."""

    def arrived(self, run: int, turn: int, time_s: float) -> None: ...

    def would_find(self, run: int, turn: int) -> int:
        """Pages, for the order of service; changes nothing."""
        ...

    def started(self, run: int, turn: int, time_s: float) -> Pages: ...

    def answered(self, run: int, turn: int, time_s: float) -> None: ...


class LoopParams(NamedTuple):
    """`capacity_pages` None: everything fits. `service`: which queued request is next."""

    concurrent: int
    capacity_pages: int | None
    costs: Costs
    service: str = FCFS


def _queue_of_sessions(sessions: list[Session], total: int, seed: int) -> Iterator[Session]:
    """`total` sessions: all in a random order, then all again in another."""
    rng, left = random.Random(seed), total
    while left > 0:
        order = list(sessions)
        rng.shuffle(order)
        yield from order[:left]
        left -= len(order)


class ClosedLoop:
    """Builds the schedule of `total` sessions (default: all of the trace, once).

    Ends when a slot finds no further session, so that there are always as many as asked
    for; with no more sessions than slots, when all are over. Sub-agents run beside.
    """

    def __init__(
        self, trace: Trace, params: LoopParams, *, seed: int, total: int | None = None
    ) -> None:
        self.params = params
        self.schedule = Schedule(trace.page_tokens)
        if params.service == INSTANT:
            self.schedule.took_s = partial(took_s, costs=params.costs)
        self.total = len(trace.sessions) if total is None else total
        self._sessions = _queue_of_sessions(trace.sessions, self.total, seed)
        self._stagger = random.Random(f"stagger {seed}")
        self._slots: set[int] = set()
        self._events: list[tuple[float, int, int, int, int]] = []
        self._n_pushed = 0
        self._n_opened = 0
        self._queue: list[tuple[int, int, float]] = []
        self._running = PageSet()
        self._n_running = 0
        self._computing = False
        self._exhausted = False

    def run(self, finder: Finder) -> Schedule:
        for _ in range(min(self.params.concurrent, self.total)):
            self._open(self._stagger.uniform(0.0, STAGGER_S))
        to_the_end = self.total <= self.params.concurrent
        while self._events and (to_the_end or not self._exhausted):
            time_s, _, kind, run, turn = heappop(self._events)
            if kind == Kind.ARRIVED:
                self.schedule.record(Kind.ARRIVED, run, turn, time_s)
                finder.arrived(run, turn, time_s)
                if self.params.service == INSTANT:
                    self._serve(run, turn, time_s, finder)
                    continue
                self._queue.append((run, turn, time_s))
            elif kind == _COMPUTED:
                self._computing = False
            else:
                self._answer(run, turn, time_s, finder)
            while self._queue and not self._computing and self._start(time_s, finder):
                pass
        return self.schedule

    def _push(self, time_s: float, kind: int, run: int, turn: int) -> None:
        self._n_pushed += 1
        heappush(self._events, (time_s, self._n_pushed, kind, run, turn))

    def _open(self, time_s: float) -> None:
        session = next(self._sessions, None)
        if session is None:
            self._exhausted = True
            return
        run = self.schedule.add_run(session, self._n_opened)
        self._n_opened += 1
        self._slots.add(run)
        self._push(time_s, Kind.ARRIVED, run, 0)

    def _start(self, time_s: float, finder: Finder) -> bool:
        """Start the request whose turn it is; returns whether it was admitted."""
        place = 0
        if self.params.service == LPM:
            found = [finder.would_find(run, turn) for run, turn, _ in self._queue]
            place = found.index(max(found))
        run, turn, arrived_s = self._queue[place]
        path, capacity = self.schedule.path(run, turn), self.params.capacity_pages
        self._running.add(path)
        if self._n_running and capacity is not None and self._running.pages > capacity:
            self._running.drop(path)
            return False
        del self._queue[place]
        self._n_running += 1
        self._computing = self.params.service != AT_ONCE
        self.schedule.record(Kind.STARTED, run, turn, time_s)
        request = self.schedule.sessions[run].turns[turn]
        pages, costs = finder.started(run, turn, time_s), self.params.costs
        page_tokens = self.schedule.page_tokens
        compute_s = costs.prefill_s(
            request.input_tokens - pages.total * page_tokens,
            pages.host * page_tokens,
            pages.pool * page_tokens,
        )
        self.schedule.ttft_s.append(time_s + compute_s - arrived_s)
        self._push(time_s + compute_s, _COMPUTED, run, turn)
        self._push(time_s + compute_s + costs.decode_s(request), Kind.ANSWERED, run, turn)
        return True

    def _serve(self, run: int, turn: int, time_s: float, finder: Finder) -> None:
        """A request that holds memory at one moment only."""
        self.schedule.record(Kind.STARTED, run, turn, time_s)
        self.schedule.ttft_s.append(0.0)
        finder.started(run, turn, time_s)
        self.schedule.record(Kind.ANSWERED, run, turn, time_s)
        finder.answered(run, turn, time_s)
        request = self.schedule.sessions[run].turns[turn]
        self._go_on(run, turn, time_s + self.schedule.took_s(request))

    def _answer(self, run: int, turn: int, time_s: float, finder: Finder) -> None:
        self.schedule.record(Kind.ANSWERED, run, turn, time_s)
        finder.answered(run, turn, time_s)
        self._running.drop(self.schedule.path(run, turn))
        self._n_running -= 1
        self._go_on(run, turn, time_s)

    def _go_on(self, run: int, turn: int, time_s: float) -> None:
        """What follows an answer at `time_s`: the next turn, sub-agents, or another session."""
        turns = self.schedule.sessions[run].turns
        if turn + 1 < len(turns):
            for place, (after_s, sub) in enumerate(turns[turn + 1].subs):
                identity = (self.schedule.identities[run], turn, place)
                child = self.schedule.add_run(sub, identity)
                self._push(time_s + after_s, Kind.ARRIVED, child, 0)
            self._push(time_s + turns[turn + 1].think_s, Kind.ARRIVED, run, turn + 1)
        elif run in self._slots:
            self._slots.discard(run)
            self._open(time_s)


class AllFound:
    """A finder for which nothing is ever computed twice: the unhindered loop."""

    def __init__(self, loop: ClosedLoop) -> None:
        self._loop = loop

    def arrived(self, run: int, turn: int, time_s: float) -> None:
        pass

    def would_find(self, run: int, turn: int) -> int:
        return self.started(run, turn, 0.0).total

    def started(self, run: int, turn: int, time_s: float) -> Pages:
        turns = self._loop.schedule.sessions[run].turns
        if not turn:
            return Pages(0)
        former, kept = turns[turn - 1].path, 0
        for (stream, pages), (was, had) in zip(turns[turn].path, former, strict=False):
            if stream != was:
                break
            kept += min(pages, had)
        return Pages(kept)

    def answered(self, run: int, turn: int, time_s: float) -> None:
        pass


def as_recorded(trace: Trace) -> Schedule:
    """Every request at its recorded time, answered at once; nobody waits."""
    schedule = Schedule(trace.page_tokens, lambda turn: turn.took_s or 0.0)
    events = []
    for session in trace.sessions:
        run, time_s = schedule.add_run(session, len(schedule.sessions)), session.start_s
        for turn, request in enumerate(session.turns):
            time_s += request.think_s if turn else 0.0
            events.append((time_s, request.order, run, turn))
            time_s += schedule.took_s(request)
    for time_s, _, run, turn in sorted(events):
        for kind in (Kind.ARRIVED, Kind.STARTED, Kind.ANSWERED):
            schedule.record(kind, run, turn, time_s)
        schedule.ttft_s.append(0.0)
    return schedule
