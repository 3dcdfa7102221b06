"""Traces made up to be hard: inputs on which guessing the next use is worse than LRU.

Owns the generators and their fixed shapes. Must never be used as evidence of a gain.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from sam.core.gaps import LABEL_HUMAN, LABEL_TOOL
from sam.sim.trace import PAGE_TOKENS, ContextBuilder, Session, Trace, TraceError, Turn

ABOUT = {
    "alternating": "idle times alternate between 2 s and 200 s",
    "false-ends": "clients end sessions that then go on",
    "swapped-labels": "tool calls take minutes, humans answer at once",
    "lying-hints": "clients announce short waits as hours, and long ones as nothing",
    "steady": "growing contexts, log-normal idle times, no tricks",
}
DEFAULT_SESSIONS = 300
_FIRST_PAGES = (100, 400)
_NEW_PAGES = (2, 40)
_TURNS = (20, 60)

_LIE_S = (0.0, 3_600.0)
_LONG_S = 30.0

_Draw = Callable[[random.Random, int], tuple[float, str, bool]]
"""(idle seconds before turn i, label of that idle time, falsely ended before)."""


def _alternating(rng: random.Random, i: int) -> tuple[float, str, bool]:
    return (2.0 if i % 2 else 200.0) * rng.uniform(0.9, 1.1), LABEL_TOOL, False


def _false_ends(rng: random.Random, i: int) -> tuple[float, str, bool]:
    return rng.lognormvariate(2.5, 1.0), LABEL_TOOL, rng.random() < 0.5


def _swapped(rng: random.Random, i: int) -> tuple[float, str, bool]:
    if rng.random() < 0.5:
        return rng.lognormvariate(5.0, 0.7), LABEL_TOOL, False
    return rng.lognormvariate(1.0, 0.7), LABEL_HUMAN, False


def _steady(rng: random.Random, i: int) -> tuple[float, str, bool]:
    if rng.random() < 0.1:
        return rng.lognormvariate(4.5, 1.0), LABEL_HUMAN, False
    return rng.lognormvariate(2.3, 1.0), LABEL_TOOL, False


_DRAWS: dict[str, _Draw] = {
    "alternating": _alternating,
    "false-ends": _false_ends,
    "swapped-labels": _swapped,
    "lying-hints": _steady,
    "steady": _steady,
}


def make(spec: str, seed: int) -> Trace:
    """`NAME` or `NAME:SESSIONS`. Raises TraceError for anything else."""
    name, _, count = spec.partition(":")
    if name not in _DRAWS or (count and not count.isdecimal()) or count == "0":
        raise TraceError(f"synthetic:{spec}: choose from {', '.join(_DRAWS)}, then :SESSIONS")
    rng = random.Random(f"{name} {seed}")
    n = int(count) if count else DEFAULT_SESSIONS
    return Trace(sessions=[_session(f"{name}-{i}", rng, _DRAWS[name]) for i in range(n)])


def _session(name: str, rng: random.Random, draw: _Draw) -> Session:
    context = ContextBuilder()
    n_turns = rng.randint(*_TURNS)
    gaps = [draw(rng, i) for i in range(n_turns)] + [(0.0, LABEL_HUMAN, True)]
    lies = name.startswith("lying")
    turns, pages = [], rng.randint(*_FIRST_PAGES)
    for i in range(n_turns):
        turns.append(
            Turn(
                path=context.turn(context.pages, pages),
                input_tokens=pages * PAGE_TOKENS,
                output_tokens=rng.randint(20, 400),
                think_s=gaps[i][0] if i else 0.0,
                label=gaps[i + 1][1],
                says_end=gaps[i + 1][2],
                says_idle_s=_LIE_S[gaps[i + 1][0] < _LONG_S] if lies else None,
            )
        )
        pages += rng.randint(*_NEW_PAGES)
    return Session(name=name, turns=tuple(turns), n_streams=context.n_streams)
