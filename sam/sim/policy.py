"""What a simulated policy is: tiers under one order, told what happens to sessions.

Owns the wiring of `sam.core` parts that all policies share. Must never hold a rule of its
own about what goes: a policy is a choice of core parts, in a file of `sam.sim.policies`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from sam.core.gaps import GapEstimator
from sam.core.order import EvictionOrder
from sam.core.tracker import LeftBranches, RetentionTracker
from sam.sim.cache import TierCache

_SWEEP_EVERY = 1_024


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy is built for: pages of each tier, the device first."""

    tiers_pages: tuple[int, ...]


class Policy:
    """Tiers that all hold what was computed last, each as much as it can (inclusive, as
    with write-through). `hint_sigma`: log-error of the hints that it is to be given where
    the user names none; None: it is given none.
    """

    hint_sigma: float | None = None

    def __init__(self, setup: Setup, order: str, *, tracked: bool) -> None:
        orders = [EvictionOrder(order) for _ in setup.tiers_pages]
        self.orders = orders
        self.tracker = RetentionTracker(orders, self.make_gaps()) if tracked else None
        self.tiers = [
            TierCache(pages, order, self.tracker)
            for pages, order in zip(setup.tiers_pages, orders, strict=True)
        ]
        self._over: dict[Hashable, None] = {}
        self._n_requests = 0

    def make_gaps(self) -> GapEstimator:
        return GapEstimator()

    def arrive(self, session: Hashable, time_s: float) -> None:
        """A request of the session is queued."""
        if self.tracker is not None:
            self.tracker.queued(session, time_s)

    def would_find(self, path: Sequence[tuple[int, int]]) -> int:
        """Pages that a request would find in any tier; changes nothing."""
        return max(tier.peek(path) for tier in self.tiers)

    def ask(self, session: Hashable, path: Sequence[tuple[int, int]], time_s: float) -> list[int]:
        """A request starts. Returns the pages found in each tier, from the first page on."""
        self.start(session, time_s)
        return [tier.access(path, time_s, session) for tier in self.tiers]

    def start(self, session: Hashable, time_s: float) -> None:
        """`ask` without the tiers: for callers that use each at a time of its own."""
        if self.tracker is not None:
            self.tracker.running(session, time_s)
            self._n_requests += 1
            if self._n_requests % _SWEEP_EVERY == 0:
                self._sweep()

    def answer(
        self, session: Hashable, time_s: float, label: str, hint_s: float | None, ends: bool
    ) -> None:
        """The answer is complete; `ends`: the client says that the session is over."""
        if self.tracker is not None:
            self.tracker.idle(session, time_s, label)
            if ends:
                self.tracker.ended(session, time_s)
            elif hint_s is not None:
                self.tracker.expect(session, time_s, hint_s)
        for tier in self.tiers:
            tier.finish(session, time_s)

    def over(self, session: Hashable) -> None:
        """The trace has no more of this session. No information: it only frees memory."""
        if self.tracker is not None:
            self._over[session] = None

    def _sweep(self) -> None:
        for session in list(self._over):
            users = (session, LeftBranches(session))
            if not any(tier.has_nodes(user) for tier in self.tiers for user in users):
                del self._over[session]
                self.tracker.forget(session)

    def notes(self) -> dict[str, float]:
        """Counters of its own for the report."""
        return {}
