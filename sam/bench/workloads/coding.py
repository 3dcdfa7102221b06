"""Coding agents: whole sessions of the Claude Code traces, many at once, no sub-agents called.

Owns: the choice of sessions and of the stretch that is replayed. Must never change an order of
turns. A person's pause is known to the client, a tool's is not.
"""

from __future__ import annotations

import random

from sam.bench.workloads.plan import Agent, Plan, Turn
from sam.bench.workloads.shapes import AgentShape, load_shapes
from sam.bench.workloads.spec import WorkloadSpec
from sam.bench.workloads.swarm import reply_tokens, text_tokens
from sam.bench.workloads.text import TOOL_NAMES, Vocabulary

USERS = 16
_START_SPREAD_S = 2.0
_PAUSED_FROM_S = 60.0  # of the trace


def plan_coding(spec: WorkloadSpec, words: Vocabulary) -> Plan:
    """`spec.users` sessions at once; 16 is what the published comparison would take."""
    rng = random.Random(f"coding {spec.seed}")
    shapes = load_shapes(spec.traces)
    tools = words.tools(rng)
    system, shared = words.system(rng, spec.tokens(shapes.shared_tokens), tools)
    agents: dict[str, Agent] = {}
    users = []
    for user in range(spec.users):
        name = f"coding-{spec.seed}-user{user}"
        agents[name] = Agent(name, name, _turns(spec, words, rng, shapes.leader(rng)))
        users.append((round(rng.uniform(0.0, _START_SPREAD_S), 3), name))
    return Plan(
        workload="coding",
        about=spec.about(),
        source=shapes.source,
        system=system,
        tools=tools,
        agents=agents,
        users=tuple(users),
        shared_tokens=shared,
        tool_calls=spec.tool_calls,
    )


def _turns(
    spec: WorkloadSpec, words: Vocabulary, rng: random.Random, shape: AgentShape
) -> tuple[Turn, ...]:
    turns, n_turns = [], min(len(shape.turns), 2 * spec.turns)
    for index, turn in enumerate(shape.turns[:n_turns]):
        following = shape.turns[index + 1] if index + 1 < n_turns else None
        calls_tool = following is not None and not following.after_human
        dropped = bool(index) and turn.dropped
        turns.append(
            Turn(
                texts=(words.text(rng, text_tokens(spec, turn)),),
                wait_s=spec.seconds(turn.wait_s) if index else 0.0,
                reply_tokens=reply_tokens(spec, turn),
                tool=rng.choice(TOOL_NAMES) if calls_tool else "",
                paused=bool(index) and turn.after_human and turn.wait_s >= _PAUSED_FROM_S,
                keep_messages=1 if dropped else None,
            )
        )
    return tuple(turns)
