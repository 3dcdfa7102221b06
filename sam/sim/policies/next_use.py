"""The recommended order without the guard: farthest expected next use first."""

from __future__ import annotations

from sam.sim.policy import Policy, Setup

ABOUT = "farthest expected next use first (age + g, ends, superseded; hints if given)"


def create(setup: Setup) -> Policy:
    return Policy(setup, "next-use", tracked=True)
