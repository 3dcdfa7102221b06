"""Hints that are wrong: what a confused, careless or hostile client sends.

Owns: the lies. Ends of sessions that go on, prefetches of what is not used, sessions that never
existed, idle times that are wrong by a factor of ten either way, and gaps that alternate between
short and long. Prompts are honest: every arm computes the same.
"""

from __future__ import annotations

import random
from dataclasses import replace

from sam.bench.workloads.plan import Agent, Plan, Turn
from sam.bench.workloads.spec import WorkloadSpec
from sam.bench.workloads.swarm import plan_swarm
from sam.bench.workloads.text import Vocabulary

_FALSE_ENDS, _UNUSED, _INVENTED = 0.3, 0.3, 0.2
_GAPS_S = (2.0, 200.0)  # of the trace, in turn
_IDLE_ERRORS = (0.1, 10.0)


def plan_adversarial(spec: WorkloadSpec, words: Vocabulary) -> Plan:
    """The swarm, with lies in its hints and odd gaps."""
    plan = plan_swarm(spec, words)
    rng = random.Random(f"adversarial {spec.seed}")
    names = list(plan.agents)
    agents = {
        name: _lying(spec, rng, names, agent, place)
        for place, (name, agent) in enumerate(plan.agents.items())
    }
    return replace(plan, workload="adversarial", agents=agents)


def _lying(
    spec: WorkloadSpec, rng: random.Random, names: list[str], agent: Agent, place: int
) -> Agent:
    turns = tuple(
        replace(turn, odd=_odd(rng, names, agent, index), wait_s=_gap(spec, turn, index, place))
        for index, turn in enumerate(agent.turns)
    )
    return replace(agent, turns=turns, idle_error=rng.choice(_IDLE_ERRORS))


def _odd(
    rng: random.Random, names: list[str], agent: Agent, index: int
) -> tuple[tuple[str, str], ...]:
    odd = []
    if index + 1 < len(agent.turns) and rng.random() < _FALSE_ENDS:
        odd.append(("evict", agent.session_id))
    if rng.random() < _UNUSED:
        odd.append(("prefetch", rng.choice(names)))
    if rng.random() < _INVENTED:
        odd.append((rng.choice(("offload", "prefetch", "evict")), f"invented-{rng.random():.9f}"))
    return tuple(odd)


def _gap(spec: WorkloadSpec, turn: Turn, index: int, place: int) -> float:
    if not turn.tool or not index:
        return turn.wait_s
    return spec.seconds(_GAPS_S[(index + place) % 2])
