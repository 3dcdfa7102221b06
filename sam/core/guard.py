"""Three brakes on the order: trust in ends, trust in hints, and regret against plain LRU.

Owns the counts behind them and when they switch (source: the project's policy notes and
its golden cases; trust in hints is our own). Must never see a node: the caller counts missed
pages, with `sam.core.ghost` or otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

END_TRUST_PERCENT = 3
END_TRUST_PRIOR_ENDS = 30
REGRET_HALF_LIFE_REQUESTS = 300
_NO_TIME_S = 1e-9


class EndTrust:
    """Whether "ended" may be believed: not while too many come back after an end.

    Distrust starts when returns exceed 3 % of (ends + 30) and stops when they fall below.
    """

    __slots__ = ("n_ends", "n_returns", "trusted")

    def __init__(self) -> None:
        self.n_ends = 0
        self.n_returns = 0
        self.trusted = True

    def ended(self) -> bool:
        """A session ended; returns `trusted`."""
        self.n_ends += 1
        return self._judge()

    def returned(self) -> bool:
        """A session came back after its end (counted once per end); returns `trusted`."""
        self.n_returns += 1
        return self._judge()

    def _judge(self) -> bool:
        returns = 100 * self.n_returns
        bound = END_TRUST_PERCENT * (self.n_ends + END_TRUST_PRIOR_ENDS)
        if returns != bound:
            self.trusted = returns < bound
        return self.trusted


class HintTrust:
    """Whether one session's expected idle times may be believed: not while they are further
    from what came than the estimate made without them.

    Regret is the sum of differences of squared log-errors, each at most `_MAX_STEP`, faded by
    `_KEEP` a return. Every hint of an idle time counts for the share of it that the hint was in
    force, so a right one at the end does not make up for a wrong one that lasted. Honest hints
    with a log-error of 1 stay far below the bound; a hint that is wrong by a factor of a hundred
    passes it at once, one by a factor of ten at the third time.
    """

    __slots__ = ("regret",)

    _KEEP = 0.8
    _BOUND = 6.0
    _MAX_STEP = 8.0

    def __init__(self) -> None:
        self.regret = 0.0

    @property
    def trusted(self) -> bool:
        return self.regret <= self._BOUND

    def returned(
        self, gap_s: float, said: Sequence[tuple[float, float]], estimate_s: float
    ) -> None:
        """The session came back after `gap_s`, of which hints and the estimate spoke.

        `said`: (at what age of the idle time, how much longer from then on) of each hint, in
        seconds and by age; each in force until the next one.
        """
        gap_s = max(gap_s, _NO_TIME_S)
        ages = [min(at_s, gap_s) for at_s, _ in said]
        step = 0.0
        for (at_s, expected_s), age_s, until_s in zip(said, ages, [*ages[1:], gap_s], strict=True):
            hint_s = max(expected_s, at_s / 2.0)
            share = (until_s - age_s) / gap_s
            step += share * self._lost(age_s, gap_s - age_s, hint_s, estimate_s)
        self.regret = max(self.regret * self._KEEP + step, 0.0)

    def _lost(self, age_s: float, left_s: float, hint_s: float, estimate_s: float) -> float:
        """By how much the hint was worse than `age + estimate`, of what was left at `age_s`."""
        came = math.log1p(left_s)
        of_hint = (math.log1p(hint_s) - came) ** 2
        of_estimate = (math.log1p(max(age_s + estimate_s, 0.0)) - came) ** 2
        return max(min(of_hint - of_estimate, self._MAX_STEP), -self._MAX_STEP)


class RegretGuard:
    """Says when to use LRU: while our order misses more, by more than one capacity.

    Both ways of missing go on being counted whichever is in use, and fade with a half-life
    of 300 requests. The way in use is left when it is behind the other by more than
    `capacity_pages`, in both directions: between the two bounds nothing changes.
    """

    __slots__ = ("_keep", "behind_pages", "capacity_pages", "n_switches", "use_lru")

    def __init__(
        self, capacity_pages: int, half_life_requests: float = REGRET_HALF_LIFE_REQUESTS
    ) -> None:
        self.capacity_pages = capacity_pages
        self.behind_pages = 0.0
        self.use_lru = False
        self.n_switches = 0
        self._keep = 0.5 ** (1.0 / half_life_requests)

    def observe(self, missed_ours_pages: int, missed_lru_pages: int) -> bool:
        """Count one request's missed pages both ways; returns `use_lru` from now on."""
        lost_pages = missed_ours_pages - missed_lru_pages
        self.behind_pages = self.behind_pages * self._keep + lost_pages
        if self.use_lru:
            switch = self.behind_pages < -self.capacity_pages
        else:
            switch = self.behind_pages > self.capacity_pages
        if switch:
            self.use_lru = not self.use_lru
            self.n_switches += 1
        return self.use_lru
