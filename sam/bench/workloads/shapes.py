"""Lengths and waits of agents, taken from traces.

Owns: which sessions of a trace serve as leaders and sub-agents, and their turns as new, dropped
and generated tokens. Must never invent a length where a trace gives one; without trace files a
made-up one of `sam.sim` stands in, and the report names it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

from sam.core.gaps import LABEL_HUMAN
from sam.sim.trace import Path as Pieces
from sam.sim.trace import Session, Trace
from sam.sim.traces import load

CODING = "claude_code_sessions.jsonl.gz"
STAND_IN = "synthetic:steady"
_DROP = 0.8  # a prompt that keeps less of the one before was compressed or rolled back
_LEADER_STARTS_AT_MOST = 50_000
_MIN_TURNS = 4


@dataclass(frozen=True)
class TurnShape:
    """In tokens and seconds of the trace. `dropped`: most of the window before is gone."""

    new_tokens: int
    reply_tokens: int
    wait_s: float
    after_human: bool
    dropped: bool


@dataclass(frozen=True)
class AgentShape:
    shared_tokens: int
    turns: tuple[TurnShape, ...]


@dataclass(frozen=True)
class Shapes:
    source: str
    shared_tokens: int
    leaders: tuple[AgentShape, ...]
    members: tuple[AgentShape, ...]

    def leader(self, rng: random.Random) -> AgentShape:
        return rng.choice(self.leaders)

    def member(self, rng: random.Random) -> AgentShape:
        return rng.choice(self.members)


@lru_cache(maxsize=4)
def load_shapes(traces: Path | None, seed: int = 0) -> Shapes:
    """Leaders and sub-agents of the coding sessions in `traces`, else of the stand-in."""
    path = traces / CODING if traces else None
    found = path is not None and path.is_file()
    trace = load(str(path)) if found else load(STAND_IN, seed=seed)
    leaders = [_shape(s, trace) for s in trace.sessions if len(s.turns) >= _MIN_TURNS]
    leaders = [s for s in leaders if s.turns[0].new_tokens <= _LEADER_STARTS_AT_MOST]
    subs = [_shape(s, trace) for s in _subs(trace) if len(s.turns) >= _MIN_TURNS]
    shared = int(median(s.shared_tokens for s in leaders))
    return Shapes(CODING if found else STAND_IN, shared, tuple(leaders), tuple(subs or leaders))


def _subs(trace: Trace) -> Iterator[Session]:
    for session in trace.sessions:
        for turn in session.turns:
            yield from (sub for _, sub in turn.subs)


def _shape(session: Session, trace: Trace) -> AgentShape:
    page = trace.page_tokens
    shared = session.turns[0].path[0] if session.turns[0].path else (0, 0)
    shared_pages = shared[1] if shared[0] < 0 else 0
    turns, before, label, replied = [], ((shared[0], shared_pages),), "", 0
    for turn in session.turns:
        kept = common_pages(before, turn.path)
        before_pages = sum(pages for _, pages in before)
        turns.append(
            TurnShape(
                new_tokens=max((turn.pages - kept) * page - replied, 1),
                reply_tokens=turn.output_tokens,
                wait_s=turn.think_s,
                after_human=label == LABEL_HUMAN,
                dropped=bool(turns) and kept < _DROP * before_pages,
            )
        )
        before, label, replied = turn.path, turn.label, turn.output_tokens
    return AgentShape(shared_pages * page, tuple(turns))


def common_pages(one: Pieces, other: Pieces) -> int:
    """Pages that two paths have in common from their start."""
    common = 0
    for (a, a_pages), (b, b_pages) in zip(one, other, strict=False):
        if a != b:
            break
        common += min(a_pages, b_pages)
        if a_pages != b_pages:
            break
    return common
