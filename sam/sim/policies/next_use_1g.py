"""The recommended order with gaps taken as long as their median, not their mean."""

from __future__ import annotations

from sam.core.gaps import GapEstimator, GapParams
from sam.sim.policy import Policy, Setup

ABOUT = "next-use by age + median gap, half of what next-use expects: see docs/simulator.md"


class HastyPolicy(Policy):
    def make_gaps(self) -> GapEstimator:
        return GapEstimator(GapParams(mean_over_median=1.0))


def create(setup: Setup) -> Policy:
    return HastyPolicy(setup, "next-use", tracked=True)
