"""The recommended order with the client's `expected_idle_s` on every answer."""

from __future__ import annotations

from sam.sim.policy import Policy, Setup

ABOUT = "next-use with expected idle times from the client (log-error 0.5 unless given)"


def create(setup: Setup) -> Policy:
    policy = Policy(setup, "next-use", tracked=True)
    policy.hint_sigma = 0.5
    return policy
