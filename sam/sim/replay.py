"""One policy in front of a loop or over a schedule: what each request found.

Owns the client's hints and the record of finds. Must draw the same hints for every policy
of a seed, and must never change a schedule.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Hashable

import msgspec

from sam.sim.loop import AllFound, ClosedLoop, Pages
from sam.sim.policy import Policy
from sam.sim.schedule import Kind, Schedule

MAX_HINT_S = 86_400.0
REPORT_EVERY = 512
Progress = Callable[[int], None]


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """Clients' `expected_idle_s`: log-error `sigma`, from a `share` of the sessions."""

    sigma: float
    share: float = 1.0

    def for_answer(self, seed: int, run: int, turn: int, idle_s: float | None) -> float | None:
        """The hint for an idle time of `idle_s` (None: none follows), always the same."""
        if idle_s is None:
            return None
        if self.share < 1.0 and random.Random(f"{seed} {run}").random() >= self.share:
            return None
        rng = random.Random((seed << 52) ^ (run << 20) ^ turn)
        return min(idle_s * math.exp(self.sigma * rng.gauss(0.0, 1.0)), MAX_HINT_S)


class Found(msgspec.Struct):
    """Pages that each request found, in order of start, and the policy's own notes."""

    device: array
    host: array
    pool: array
    notes: dict[str, float] = {}

    def totals(self) -> list[int]:
        return [d + h + p for d, h, p in zip(self.device, self.host, self.pool, strict=True)]


class PolicyFinder:
    """A `Finder` of the loop that asks a policy, tells it what clients say, and records.

    `n_memory_tiers`: tiers before the pool.
    """

    def __init__(
        self,
        schedule: Schedule,
        policy: Policy,
        *,
        seed: int,
        hints: Hints | None = None,
        n_memory_tiers: int = 1,
    ) -> None:
        self.found = Found(array("l"), array("l"), array("l"))
        self._schedule = schedule
        self._policy = policy
        self._seed = seed
        self._hints = hints
        self._n_memory_tiers = n_memory_tiers

    def arrived(self, run: int, turn: int, time_s: float) -> None:
        self._policy.arrive(run, time_s)

    def would_find(self, run: int, turn: int) -> int:
        return self._policy.would_find(self._schedule.path(run, turn))

    def started(self, run: int, turn: int, time_s: float) -> Pages:
        by_tier = self._policy.ask(run, self._schedule.path(run, turn), time_s)
        in_memory = max(by_tier[: self._n_memory_tiers])
        device = by_tier[0]
        pages = Pages(device, in_memory - device, max(max(by_tier) - in_memory, 0))
        self.found.device.append(pages.device)
        self.found.host.append(pages.host)
        self.found.pool.append(pages.pool)
        return pages

    def answered(self, run: int, turn: int, time_s: float) -> None:
        idle_s = self._schedule.idle_s(run, turn)
        request = self._schedule.sessions[run].turns[turn]
        hint_s = request.says_idle_s
        if hint_s is None and self._hints is not None:
            hint_s = self._hints.for_answer(self._seed, run, turn, idle_s)
        self._policy.answer(run, time_s, request.label, hint_s, request.says_end)
        if idle_s is None:
            self._policy.over(run)


def replay(
    schedule: Schedule,
    policy: Policy,
    *,
    seed: int,
    hints: Hints | None = None,
    n_memory_tiers: int = 1,
    progress: Progress = lambda n: None,
) -> Found:
    """Every event of the schedule, in order. `progress` gets the events done since."""
    finder = PolicyFinder(schedule, policy, seed=seed, hints=hints, n_memory_tiers=n_memory_tiers)
    handlers = {
        Kind.ARRIVED: finder.arrived,
        Kind.STARTED: finder.started,
        Kind.ANSWERED: finder.answered,
    }
    for n, (kind, run, turn, time_s) in enumerate(schedule.events(), 1):
        handlers[kind](run, turn, time_s)
        if n % REPORT_EVERY == 0:
            progress(REPORT_EVERY)
    progress(len(schedule) % REPORT_EVERY)
    finder.found.notes = policy.notes()
    return finder.found


class RecordedFinder(AllFound):
    """A `Finder` that repeats what each request found in a replay: for times alone.

    The few requests that the replay did not reach find what their session had.
    """

    def __init__(self, loop: ClosedLoop, schedule: Schedule, found: Found) -> None:
        super().__init__(loop)
        self._found = found
        self._first: dict[Hashable, int] = {}  # identity of a run -> index into _places
        self._places = array("l")
        for run, session in enumerate(schedule.sessions):
            self._first[schedule.identities[run]] = len(self._places)
            self._places.extend([-1] * len(session.turns))
        for place, (run, turn) in enumerate(schedule.requests()):
            self._places[self._first[schedule.identities[run]] + turn] = place

    def started(self, run: int, turn: int, time_s: float) -> Pages:
        first = self._first.get(self._loop.schedule.identities[run])
        place = -1 if first is None else self._places[first + turn]
        if place < 0:
            return super().started(run, turn, time_s)
        found = self._found
        return Pages(found.device[place], found.host[place], found.pool[place])
