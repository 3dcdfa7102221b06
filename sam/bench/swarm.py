"""The agent swarm of the quickstart, as a plan: who says what to the server, when, and why.

Owns: sizes, texts, lineage, tool waits and the order of all requests, drawn from one seed, and
the bodies built from them. Must never talk to a server or read a clock, and must never make a
body depend on the arm: with and without hints it differs by the field `agent_hint` only.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

MODEL = "default"
LEADER = "swarm-{seed}:leader"
MEMBER = "swarm-{seed}:wave{wave}:member{index}"
_ONSETS = ["b", "c", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "st", "tr"]
_NUCLEI = ["a", "e", "i", "o", "u", "ai", "ou"]
_CODAS = ["", "n", "r", "s", "t", "l", "ck", "nd"]
_TOOLS = {
    "read_file": ("Read a file of the repository.", ("path", "start", "end")),
    "search": ("Search the repository for a pattern.", ("pattern", "path", "limit")),
    "run_tests": ("Run a part of the test suite and wait for it.", ("selection", "timeout")),
    "edit_file": ("Replace a span of a file.", ("path", "old", "new")),
    "spawn_member": ("Hand a task to a new member of the swarm.", ("role", "task", "context")),
}
# What a turn takes in an idle server; only the planned order of requests depends on it.
_NOMINAL_TURN_S = 1.0


@dataclass(frozen=True)
class SwarmSpec:
    """Sizes of a swarm. `(low, high)` are inclusive bounds that the seed draws from."""

    seed: int = 0
    waves: int = 3
    members: int = 6
    system_words: int = 250
    leader_turns: int = 2
    leader_words: tuple[int, int] = (260, 340)
    task_words: tuple[int, int] = (60, 120)
    result_words: tuple[int, int] = (120, 320)
    member_turns: tuple[int, int] = (2, 5)
    reply_tokens: tuple[int, int] = (8, 16)
    wait_s: tuple[float, float] = (0.4, 2.0)
    slow_wait_s: float = 5.0
    lead_s: float = 0.3


@dataclass(frozen=True)
class Turn:
    """One request: what comes in, after how long, and how much is answered.

    `text` is the task in turn 0, later the result of the tool that the turn before called.
    After a turn with `spawns`, the next one gets the results of that wave's members.
    """

    text: str
    wait_s: float
    reply_tokens: int
    calls: str = ""
    spawns: int | None = None


@dataclass(frozen=True)
class AgentPlan:
    session_id: str
    parent_id: str
    turns: tuple[Turn, ...]

    @property
    def is_leader(self) -> bool:
        return self.session_id == self.parent_id


@dataclass(frozen=True)
class SwarmPlan:
    """All agents, and `order`: (session, turn) of every request as it is to be sent."""

    spec: SwarmSpec
    system: str
    tools: tuple[dict[str, Any], ...]
    leader: AgentPlan
    waves: tuple[tuple[AgentPlan, ...], ...]
    order: tuple[tuple[str, int], ...]

    @property
    def agents(self) -> tuple[AgentPlan, ...]:
        return (self.leader, *(agent for wave in self.waves for agent in wave))


def plan_swarm(spec: SwarmSpec) -> SwarmPlan:
    """The swarm of a spec; equal specs give equal plans."""
    rng = random.Random(spec.seed)
    system = "You are one member of a team of coding agents. " + words(rng, spec.system_words)
    tools = tuple(_tool(rng, name) for name in _TOOLS)
    leader = _plan_leader(rng, spec)
    waves = tuple(
        tuple(_plan_member(rng, spec, leader, wave, index) for index in range(spec.members))
        for wave in range(spec.waves)
    )
    return SwarmPlan(spec, system, tools, leader, waves, _order(leader, waves))


def words(rng: random.Random, count: int) -> str:
    """Made-up prose of `count` words."""
    picked = []
    for _ in range(count):
        syllables = range(rng.randint(1, 2))
        parts = ((_ONSETS, _NUCLEI, _CODAS) for _ in syllables)
        picked.append("".join(rng.choice(part) for group in parts for part in group))
    return " ".join(picked)


def _tool(rng: random.Random, name: str) -> dict[str, Any]:
    about, parameters = _TOOLS[name]
    properties = {
        key: {"type": "string", "description": words(rng, 8).capitalize() + "."}
        for key in parameters
    }
    schema = {"type": "object", "properties": properties, "required": [parameters[0]]}
    function = {"name": name, "description": f"{about} {words(rng, 12)}.", "parameters": schema}
    return {"type": "function", "function": function}


def _plan_leader(rng: random.Random, spec: SwarmSpec) -> AgentPlan:
    """Looks around with tools, spawns one wave after another, ends with a summary."""
    name = LEADER.format(seed=spec.seed)
    turns = []
    for index in range(spec.leader_turns + spec.waves):
        wave = index - (spec.leader_turns - 1)
        spawns = wave if 0 <= wave < spec.waves else None
        collects = wave > 0
        turns.append(
            Turn(
                text="" if collects else words(rng, rng.randint(*spec.leader_words)),
                wait_s=spec.lead_s if collects else _wait(rng, spec, index),
                reply_tokens=rng.randint(*spec.reply_tokens),
                calls="" if index == spec.leader_turns + spec.waves - 1 else
                "read_file" if spawns is None else "spawn_member",
                spawns=spawns,
            )
        )  # fmt: skip
    return AgentPlan(name, name, tuple(turns))


def _plan_member(
    rng: random.Random, spec: SwarmSpec, leader: AgentPlan, wave: int, index: int
) -> AgentPlan:
    """A few tool calls, then an answer; the last member of a wave waits for a slow tool."""
    n_turns = rng.randint(*spec.member_turns)
    slow = index == spec.members - 1
    if slow:
        n_turns = max(n_turns, 3)
    turns = []
    for turn in range(n_turns):
        bounds = spec.task_words if turn == 0 else spec.result_words
        wait_s = round(0.2 * index, 3) if turn == 0 else _wait(rng, spec, turn)
        waits_long = slow and turn == n_turns - 1
        turns.append(
            Turn(
                text=words(rng, rng.randint(*bounds)),
                wait_s=spec.slow_wait_s if waits_long else wait_s,
                reply_tokens=rng.randint(*spec.reply_tokens),
                calls="" if turn == n_turns - 1 else rng.choice(["read_file", "search"]),
            )
        )
    name = MEMBER.format(seed=spec.seed, wave=wave, index=index)
    return AgentPlan(name, leader.session_id, tuple(turns))


def _wait(rng: random.Random, spec: SwarmSpec, turn: int) -> float:
    return round(rng.uniform(*spec.wait_s), 2) if turn else 0.0


def _order(
    leader: AgentPlan, waves: tuple[tuple[AgentPlan, ...], ...]
) -> tuple[tuple[str, int], ...]:
    """Requests by planned time, if every turn took the same; ties by position in the plan."""
    planned: list[tuple[float, int, tuple[str, int]]] = []
    now = 0.0

    def run(agent: AgentPlan, start: float) -> float:
        for index, turn in enumerate(agent.turns):
            start += turn.wait_s
            planned.append((start, len(planned), (agent.session_id, index)))
            start += _NOMINAL_TURN_S
        return start

    for index, turn in enumerate(leader.turns):
        now += turn.wait_s
        planned.append((now, len(planned), (leader.session_id, index)))
        now += _NOMINAL_TURN_S
        if turn.spawns is not None:
            now = max(run(agent, now) for agent in waves[turn.spawns])
    return tuple(key for _, _, key in sorted(planned))


@dataclass
class Conversation:
    """The messages of one agent as they grow: planned input, real answers of the server."""

    plan: SwarmPlan
    agent: AgentPlan
    messages: list[dict[str, Any]] = field(default_factory=list)

    def body(self, index: int, results: tuple[str, ...] = ()) -> dict[str, Any]:
        """Request body of turn `index`, without hint; `results` are those of a wave."""
        turn = self.agent.turns[index]
        if index == 0:
            self.messages.append({"role": "system", "content": self.plan.system})
            self.messages.append({"role": "user", "content": turn.text})
        else:
            for call, text in enumerate(results or (turn.text,)):
                answer = {"role": "tool", "tool_call_id": f"call-{index - 1}-{call}"}
                self.messages.append({**answer, "content": text})
        return {
            "model": MODEL,
            "messages": list(self.messages),
            "tools": list(self.plan.tools),
            "max_tokens": turn.reply_tokens,
            "temperature": 0.0,
        }

    def take_reply(self, index: int, text: str) -> None:
        """Append the answer of turn `index`, with the tool calls that the plan puts there."""
        turn = self.agent.turns[index]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        n_calls = 1 if turn.spawns is None else len(self.plan.waves[turn.spawns])
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": f"call-{index}-{call}",
                    "type": "function",
                    "function": {
                        "name": turn.calls,
                        "arguments": json.dumps({"n": call, "turn": index}),
                    },
                }
                for call in range(n_calls)
            ]
        self.messages.append(message)


def lineage_hint(agent: AgentPlan) -> dict[str, Any]:
    """What rides on an inference: whose it is, and whose child that is."""
    return {"session_id": agent.session_id, "parent_session_id": agent.parent_id}


def manage_body(agent: AgentPlan, action: str, **edit: Any) -> dict[str, Any]:
    """A request that generates nothing: offload, prefetch or evict the agent's session."""
    management = {
        "manage_request": True,
        "edits": [{"type": action, "target": "session", **edit}],
    }
    hint = {**lineage_hint(agent), "context_management": management}
    return {"model": MODEL, "messages": [], "agent_hint": hint}
