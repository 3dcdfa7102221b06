"""SGLang's `--enable-session-radix-cache`: nodes without an open session go first."""

from __future__ import annotations

from sam.sim.policy import Policy, Setup

ABOUT = "fewest open sessions first, then LRU; SGLang's --enable-session-radix-cache"


def create(setup: Setup) -> Policy:
    return Policy(setup, "session-ref", tracked=True)
