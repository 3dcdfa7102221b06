"""One question to the simulator, answered: a policy, a capacity, S sessions, one seed.

Owns the sequence: schedule, limits, LRU, policies, times. Must never mix two seeds, and
must compare only what ran over the same schedule.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from sam.sim import policies
from sam.sim.costs import Costs
from sam.sim.limits import ceiling_hits, futures, min_hits
from sam.sim.loop import (
    AT_ONCE,
    FCFS,
    INSTANT,
    AllFound,
    ClosedLoop,
    LoopParams,
    as_recorded,
)
from sam.sim.policy import Setup
from sam.sim.replay import (
    Found,
    Hints,
    PolicyFinder,
    Progress,
    RecordedFinder,
    replay,
)
from sam.sim.schedule import Schedule, mean_working_set
from sam.sim.trace import Trace

BASE = "lru"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate. `capacity` is a share of the working set, unless `capacity_pages`.

    `concurrent` 0: as recorded. `host_ratio`, `pool_ratio`: tiers in multiples of the
    device tier (0: none). `warmup`: share of the requests that is not counted. `order`:
    who is served next in the schedule; `service`: in the estimate of times.
    """

    capacity: float = 0.5
    concurrent: int = 16
    capacity_pages: int | None = None
    host_ratio: float = 0.0
    pool_ratio: float = 0.0
    hints: Hints | None = None
    costs: Costs = Costs()
    order: str = INSTANT
    service: str = FCFS
    total: int | None = None
    warmup: float = 0.0
    with_times: bool = True


class Outcome(msgspec.Struct, kw_only=True):
    """What one policy found, in tokens, and how long first tokens took, in seconds."""

    device_tokens: int
    host_tokens: int
    pool_tokens: int
    ttft_s: array
    notes: dict[str, float] = {}

    @property
    def hit_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.pool_tokens


class Answer(msgspec.Struct, kw_only=True):
    """One seed. Limits are for the largest tier; None until they are known."""

    seed: int
    n_requests: int
    n_sessions: int
    prompt_tokens: int
    working_set_tokens: int
    capacity_tokens: int
    ceiling_tokens: int | None = None
    min_tokens: int | None = None
    min_nb_tokens: int | None = None
    outcomes: dict[str, Outcome] = {}


class Experiment:
    """One question for one seed. `steps()` fills `answer` bit by bit, so that what is
    known when it is stopped can be reported; it yields a word on what comes next.
    """

    def __init__(
        self,
        trace: Trace,
        question: Question,
        names: Sequence[str],
        *,
        seed: int,
        progress: Progress = lambda n: None,
    ) -> None:
        self.trace = trace
        self.question = question
        self.names = [BASE, *(name for name in names if name != BASE)]
        self.seed = seed
        self.progress = progress
        self.answer: Answer | None = None
        self.n_events = 0

    def steps(self) -> Iterator[str]:
        yield "schedule"
        schedule = self._schedule()
        weights = array("q", self._weights(schedule))
        self._begin(schedule, weights)
        self.n_events = len(schedule) * (len(self.names) + 2)
        yield "limits"
        self._find_limits(schedule, weights)
        for name in self.names:
            yield name
            found = self._replay(name, schedule)
            outcome = self._outcome(found, weights, schedule)
            if self.question.with_times and self.question.concurrent:
                yield f"{name}, times"
                outcome.ttft_s = self._times(schedule, found)
            self.answer.outcomes[name] = outcome

    # -- schedule -----------------------------------------------------------------

    def _schedule(self) -> Schedule:
        question = self.question
        if not question.concurrent:
            schedule = as_recorded(self.trace)
            self._set_capacity(schedule)
            return schedule
        unhindered = INSTANT if question.order == INSTANT else AT_ONCE
        loop = self._loop(None, unhindered, self._n_sessions_to_measure())
        self._set_capacity(loop.run(AllFound(loop)))
        loop = self._loop(self.tiers_pages[0], question.order, question.total)
        if question.order in (INSTANT, AT_ONCE):
            return loop.run(AllFound(loop))
        policy = policies.create(BASE, Setup(tiers_pages=self.tiers_pages))
        return loop.run(PolicyFinder(loop.schedule, policy, seed=self.seed))

    def _n_sessions_to_measure(self) -> int:
        """Sessions over which the working set is averaged: the trace once, if that is enough."""
        n_once = len(self.trace.sessions)
        total = n_once if self.question.total is None else self.question.total
        return min(total, max(n_once, 4 * self.question.concurrent))

    def _loop(self, capacity_pages: int | None, service: str, total: int | None) -> ClosedLoop:
        question = self.question
        params = LoopParams(question.concurrent, capacity_pages, question.costs, service)
        return ClosedLoop(self.trace, params, seed=self.seed, total=total)

    def _set_capacity(self, schedule: Schedule) -> None:
        question = self.question
        self.working_set_pages = mean_working_set(schedule)
        device = question.capacity_pages
        if device is None:
            device = max(int(question.capacity * self.working_set_pages), 1)
        ratios = [ratio for ratio in (question.host_ratio, question.pool_ratio) if ratio]
        self.tiers_pages = (device, *(max(int(device * ratio), 1) for ratio in ratios))

    def _weights(self, schedule: Schedule) -> Iterator[int]:
        """Prompt tokens of each request; 0 for those that do not count."""
        skip = int(schedule.n_requests * self.question.warmup)
        for n, (run, turn) in enumerate(schedule.requests()):
            yield schedule.sessions[run].turns[turn].input_tokens if n >= skip else 0

    def _begin(self, schedule: Schedule, weights: array) -> None:
        page_tokens = schedule.page_tokens
        self.answer = Answer(
            seed=self.seed,
            n_requests=schedule.n_requests,
            n_sessions=len(schedule.sessions),
            prompt_tokens=sum(weights),
            working_set_tokens=self.working_set_pages * page_tokens,
            capacity_tokens=self.tiers_pages[0] * page_tokens,
        )

    # -- hits ---------------------------------------------------------------------

    def _tokens(self, pages: Iterator[int], weights: array) -> int:
        size, total = self.trace.page_tokens, 0
        for n, weight in zip(pages, weights, strict=True):
            total += min(n * size, weight)
        return total

    def _find_limits(self, schedule: Schedule, weights: array) -> None:
        answer, capacity = self.answer, max(self.tiers_pages)
        answer.ceiling_tokens = self._tokens(ceiling_hits(schedule.paths()), weights)
        streams = futures(schedule.steps)
        for may_refuse in (True, False):
            hits = min_hits(schedule.steps, capacity, may_refuse=may_refuse, streams=streams)
            tokens = self._tokens(self._counted(hits), weights)
            if may_refuse:
                answer.min_tokens = tokens
            else:
                answer.min_nb_tokens = tokens

    def _counted(self, hits: Iterator[int]) -> Iterator[int]:
        for n, hit in enumerate(hits, 1):
            if n % 512 == 0:
                self.progress(512 * 3)
            yield hit

    def _replay(self, name: str, schedule: Schedule) -> Found:
        policy = policies.create(name, Setup(tiers_pages=self.tiers_pages))
        hints = self.question.hints
        if hints is None and policy.hint_sigma is not None:
            hints = Hints(sigma=policy.hint_sigma)
        return replay(
            schedule,
            policy,
            seed=self.seed,
            hints=hints,
            n_memory_tiers=2 if self.question.host_ratio else 1,
            progress=self.progress,
        )

    def _outcome(self, found: Found, weights: array, schedule: Schedule) -> Outcome:
        device = self._tokens(iter(found.device), weights)
        pairs = zip(found.device, found.host, strict=True)
        memory = self._tokens((d + h for d, h in pairs), weights)
        everything = self._tokens(iter(found.totals()), weights)
        return Outcome(
            device_tokens=device,
            host_tokens=memory - device,
            pool_tokens=everything - memory,
            ttft_s=array("d"),
            notes=found.notes,
        )

    def _times(self, schedule: Schedule, found: Found) -> array:
        """First-token times of a loop in which each request finds what it found here."""
        loop = self._loop(self.tiers_pages[0], self.question.service, self.question.total)
        loop.run(RecordedFinder(loop, schedule, found))
        return loop.schedule.ttft_s
