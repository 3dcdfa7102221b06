"""Plain LRU, SGLang's default. Knows no sessions."""

from __future__ import annotations

from sam.sim.policy import Policy, Setup

ABOUT = "least recently used first; SGLang's default and the base of all comparisons"


def create(setup: Setup) -> Policy:
    return Policy(setup, "lru", tracked=False)
