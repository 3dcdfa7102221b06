"""The recommended order with gaps taken twice as long: a session's age counts for less."""

from __future__ import annotations

from collections.abc import Hashable

from sam.core.gaps import GapEstimator
from sam.sim.policy import Policy, Setup

ABOUT = "next-use by age + 2 g: an experiment, see docs/simulator.md"


class DoubledGaps(GapEstimator):
    """Gaps are log-normal: who is late is likely to stay away for longer than g more."""

    def gap_s(self, session: Hashable | None, label: str) -> float:
        return min(2.0 * super().gap_s(session, label), self.params.max_gap_s)


class PatientPolicy(Policy):
    def make_gaps(self) -> GapEstimator:
        return DoubledGaps()


def create(setup: Setup) -> Policy:
    return PatientPolicy(setup, "next-use", tracked=True)
