"""The mission's swarm: users at once, each a leader with sub-agents, pauses, compression, an end.

Owns: who calls whom and when; lengths and waits come from `shapes`. `mixed` and `nohints` are
the same plan with half or none of the users sending hints.
"""

from __future__ import annotations

import random
from dataclasses import replace

from sam.bench.workloads.plan import Agent, Call, Plan, Turn
from sam.bench.workloads.shapes import AgentShape, Shapes, TurnShape, load_shapes
from sam.bench.workloads.spec import WorkloadSpec
from sam.bench.workloads.text import TOOL_NAMES, Vocabulary

_WAVE = (2, 3)
_MEMBER_TURNS = (3, 5)
_STICKY_TURNS = 2
_MIN_TEXT, _REPLY = 6, (4, 24)
_START_SPREAD_S = 1.0
_PAUSE_S = (60.0, 240.0)  # of the trace: somebody looks at it, or does something else
_COMPRESSES = 0.6  # of the leaders, once
_SUMMARY_SHARE = 0.15


def plan_swarm(spec: WorkloadSpec, words: Vocabulary) -> Plan:
    rng = random.Random(f"swarm {spec.seed}")
    shapes = load_shapes(spec.traces)
    tools = words.tools(rng)
    system, shared = words.system(rng, spec.tokens(shapes.shared_tokens), tools)
    agents: dict[str, Agent] = {}
    users = []
    for user in range(spec.users):
        maker = _User(spec, words, shapes, random.Random(f"swarm {spec.seed} {user}"), user)
        agents |= maker.agents()
        users.append((round(rng.uniform(0.0, _START_SPREAD_S), 3), maker.root))
    return Plan(
        workload="swarm",
        about=spec.about(),
        source=shapes.source,
        system=system,
        tools=tools,
        agents=agents,
        users=tuple(users),
        shared_tokens=shared,
        tool_calls=spec.tool_calls,
    )


def plan_mixed(spec: WorkloadSpec, words: Vocabulary) -> Plan:
    return _without_hints(plan_swarm(spec, words), "mixed", keep=lambda user: user % 2 == 0)


def plan_nohints(spec: WorkloadSpec, words: Vocabulary) -> Plan:
    return _without_hints(plan_swarm(spec, words), "nohints", keep=lambda user: False)


def _without_hints(plan: Plan, workload: str, keep) -> Plan:
    silent = set()
    for user, (_, root) in enumerate(plan.users):
        if not keep(user):
            silent |= {root, *plan.children_of(root)}
    agents = {
        name: replace(agent, hinted=name not in silent) for name, agent in plan.agents.items()
    }
    return replace(plan, workload=workload, agents=agents)


def text_tokens(spec: WorkloadSpec, shape: TurnShape) -> int:
    return max(spec.tokens(shape.new_tokens), _MIN_TEXT)


def reply_tokens(spec: WorkloadSpec, shape: TurnShape) -> int:
    low, high = _REPLY
    return min(max(spec.tokens(shape.reply_tokens), low), high)


class _User:
    """One user's leader, its one-shot members and the one it calls twice."""

    def __init__(
        self, spec: WorkloadSpec, words: Vocabulary, shapes: Shapes, rng: random.Random, user: int
    ) -> None:
        self.spec, self.words, self.shapes, self.rng = spec, words, shapes, rng
        self.root = f"swarm-{spec.seed}-user{user}"
        self.sticky = f"{self.root}_sub_verification_agent"
        self.made: dict[str, Agent] = {}
        self.n_waves = 0

    def agents(self) -> dict[str, Agent]:
        shape = self.shapes.leader(self.rng)
        n_turns = min(max(self.spec.turns, 5), len(shape.turns))
        self.n_waves = min(self.spec.waves, n_turns - 1)
        waves = sorted(self.rng.sample(range(n_turns - 1), self.n_waves))
        pause = self.rng.randrange(1, n_turns)
        cut = self.rng.randrange(n_turns // 2, n_turns) if self.rng.random() < _COMPRESSES else 0
        calls = [self._wave(waves.index(i), i) if i in waves else () for i in range(n_turns)]
        turns = tuple(
            self._leader_turn(shape, i, calls, paused=i == pause, cut=i == cut)
            for i in range(n_turns)
        )
        self.made[self.root] = Agent(self.root, self.root, turns)
        self._make_sticky()
        return self.made

    def _leader_turn(
        self, shape: AgentShape, index: int, calls: list, *, paused: bool, cut: bool
    ) -> Turn:
        spec, rng, turn = self.spec, self.rng, shape.turns[index]
        tokens = text_tokens(spec, turn)
        before = calls[index - 1] if index else ()
        n_texts = max(len(before), 1)
        wait_s = spec.seconds(rng.uniform(*_PAUSE_S) if paused else turn.wait_s)
        last = index == len(calls) - 1
        compressed = index and (cut or turn.dropped)
        return Turn(
            texts=tuple(self.words.text(rng, max(tokens // n_texts, 2)) for _ in range(n_texts)),
            wait_s=0.05 if before and not paused else wait_s if index else 0.0,
            reply_tokens=reply_tokens(spec, turn),
            tool="" if last or calls[index] else rng.choice(TOOL_NAMES),
            paused=paused,
            keep_messages=1 if compressed else None,
            summary=self.words.text(rng, self._summary_tokens(shape, index)) if compressed else "",
            calls=calls[index],
        )

    def _summary_tokens(self, shape: AgentShape, index: int) -> int:
        window = sum(t.new_tokens + t.reply_tokens for t in shape.turns[:index])
        return max(round(_SUMMARY_SHARE * self.spec.tokens(window)), _MIN_TEXT)

    def _wave(self, wave: int, turn: int) -> tuple[Call, ...]:
        """One-shot members side by side, and the sticky one's next run."""
        calls = []
        for index in range(self.rng.randint(*_WAVE) - 1):
            name = f"{self.root}:call_{turn}_{index}_explore"
            agent = self._member(name, self.rng.randint(*_MEMBER_TURNS))
            self.made[name] = agent
            calls.append(Call(name, 0, len(agent.turns)))
        first = wave * _STICKY_TURNS
        return (*calls, Call(self.sticky, first, first + _STICKY_TURNS))

    def _make_sticky(self) -> None:
        agent = self._member(self.sticky, self.n_waves * _STICKY_TURNS)
        turns = [
            replace(turn, tool="") if (index + 1) % _STICKY_TURNS == 0 else turn
            for index, turn in enumerate(agent.turns)
        ]
        starts = [
            replace(turn, wait_s=0.0) if index % _STICKY_TURNS == 0 else turn
            for index, turn in enumerate(turns)
        ]
        self.made[self.sticky] = replace(agent, turns=tuple(starts), sticky=True)

    def _member(self, name: str, n_turns: int) -> Agent:
        spec, rng = self.spec, self.rng
        shape = self.shapes.member(rng)
        while len(shape.turns) < n_turns:
            shape = AgentShape(shape.shared_tokens, shape.turns + shape.turns[1:])
        turns = tuple(
            Turn(
                texts=(self.words.text(rng, text_tokens(spec, turn)),),
                wait_s=spec.seconds(turn.wait_s) if index else round(rng.uniform(0.0, 0.3), 3),
                reply_tokens=reply_tokens(spec, turn),
                tool="" if index == n_turns - 1 else rng.choice(TOOL_NAMES),
            )
            for index, turn in enumerate(shape.turns[:n_turns])
        )
        return Agent(name, self.root, turns)
