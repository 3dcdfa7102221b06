"""A user's own trace as prompts: any format that `sam.sim` reads.

Owns: turning a trace's paths through content into text, so that two prompts share exactly what
the trace says they share. Every prompt is one user message; recorded answers are part of later
prompts as the trace has them, the server's own answers are not.
"""

from __future__ import annotations

import random

from sam.bench.workloads.plan import Agent, Plan, Turn
from sam.bench.workloads.shapes import TurnShape
from sam.bench.workloads.spec import WorkloadSpec
from sam.bench.workloads.swarm import reply_tokens
from sam.bench.workloads.text import Vocabulary
from sam.core.gaps import LABEL_HUMAN
from sam.sim.trace import Session, Trace, TraceError
from sam.sim.traces import load


def plan_trace(spec: WorkloadSpec, words: Vocabulary) -> Plan:
    """The first `users` sessions drawn from the trace, at most `turns` x 2 turns of each."""
    if not spec.trace:
        raise TraceError("workload trace needs --trace FILE")
    trace = load(spec.trace, seed=spec.seed)
    rng = random.Random(f"trace {spec.seed}")
    drawn = rng.sample(trace.sessions, min(spec.users, len(trace.sessions)))
    agents, users = {}, []
    for number, session in enumerate(drawn):
        name = f"trace-{spec.seed}-{number}"
        agents[name] = Agent(name, name, _Writer(spec, words, trace, session, name).turns())
        users.append((round(rng.uniform(0.0, 1.0), 3), name))
    return Plan("trace", spec.about(), spec.trace, "", (), agents, tuple(users), 0)


class _Writer:
    """Text of one session's streams; shared streams have the same text in every session."""

    def __init__(
        self, spec: WorkloadSpec, words: Vocabulary, trace: Trace, session: Session, name: str
    ) -> None:
        self.spec, self.words, self.trace, self.session = spec, words, trace, session
        self.name = name
        self._streams: dict[int, list[str]] = {}

    def turns(self) -> tuple[Turn, ...]:
        turns, kept = [], 2 * self.spec.turns
        for index, turn in enumerate(self.session.turns[:kept]):
            shape = TurnShape(0, turn.output_tokens, turn.think_s, False, False)
            human = index and self.session.turns[index - 1].label == LABEL_HUMAN
            turns.append(
                Turn(
                    texts=(" ".join(self._piece(s, pages) for s, pages in turn.path),),
                    wait_s=self.spec.seconds(turn.think_s) if index else 0.0,
                    reply_tokens=reply_tokens(self.spec, shape),
                    paused=bool(human),
                    keep_messages=0 if index else None,
                )
            )
        return tuple(turns)

    def _piece(self, stream: int, pages: int) -> str:
        """The first so many pages of a stream: always the same text for the same stream."""
        owner = "shared" if stream < 0 else self.name
        made = self._streams.setdefault(stream, [])
        while len(made) < pages:
            rng = random.Random(f"{self.spec.seed} {owner} {stream} {len(made)}")
            made.append(self.words.text(rng, self.spec.tokens(self.trace.page_tokens)))
        return " ".join(made[:pages])
