"""Sessions as lengths and times: `{sid, shared_prefix?, models?, turns: [{in, keep, out, …}]}`.

Owns the reading of this project's own trace format. Sessions with the same first model and
the same `shared_prefix` (tokens of tools and system prompt) are taken to share that prefix.
A turn has `think` and `api` seconds, or only a `gap`; `stop` gives the label of the idle
time after it; `tool` may name the tool that was called. A turn without prompt tokens is a
call that failed: it is left out, and its seconds and sub-agents go to the next turn.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sam.core.gaps import FINISH_STOP, FINISH_TOOL_CALLS, label_of
from sam.sim.trace import (
    PAGE_TOKENS,
    ContextBuilder,
    Session,
    SharedNames,
    Trace,
    TraceError,
    Turn,
    without_empty,
)

ABOUT = "one session a line: sid, shared_prefix, turns of {in, keep, out, think, api, stop}"
_FINISH = {"tool_use": FINISH_TOOL_CALLS, "end_turn": FINISH_STOP}


class _Turn(msgspec.Struct, rename={"input_tokens": "in"}):
    input_tokens: int
    keep: int = 0
    out: int = 0
    think: float | None = None
    gap: float | None = None
    api: float | None = None
    stop: str | None = None
    tool: str | None = None
    t: float = 0.0
    end: bool = False
    sub_before: list[_Session] = []


class _Session(msgspec.Struct):
    turns: list[_Turn]
    sid: str = ""
    agent: str = ""
    t: float = 0.0
    shared_prefix: int = 0
    models: list[str] = []


def matches(record: dict[str, Any]) -> bool:
    turns = record.get("turns")
    return isinstance(turns, list) and bool(turns) and "in" in turns[0]


def read(records: Any, where: str) -> Trace:
    shared = SharedNames()
    sessions = []
    for number, record in records:
        try:
            raw = msgspec.convert(record, _Session)
        except msgspec.ValidationError as error:
            raise TraceError(f"{where}: line {number}: {error}") from error
        sessions.append(session_of(raw, shared, raw.models[:1], f"{where}: line {number}"))
    return Trace(sessions=without_empty(sessions, where))


def session_of(raw: _Session, shared: SharedNames, model: list[str], where: str) -> Session:
    """A session with its sub-agents. Raises TraceError for impossible numbers."""
    name = shared[(*model, raw.shared_prefix)] if raw.shared_prefix >= PAGE_TOKENS else None
    context = ContextBuilder(name, raw.shared_prefix // PAGE_TOKENS)
    last = max((i for i, turn in enumerate(raw.turns) if turn.input_tokens), default=-1)
    turns: list[Turn] = []
    subs: tuple[tuple[float, Session], ...] = ()
    waited_s, answered_s = 0.0, 0.0
    for i, turn in enumerate(raw.turns):
        if turn.input_tokens < 0 or turn.keep < 0 or turn.out < 0:
            raise TraceError(f"{where}: turn {i}: impossible token counts")
        subs += _subs(turn, answered_s, shared, model, where)
        waited_s += _waited_s(turn)
        if not turn.input_tokens:
            waited_s += turn.api or 0.0
            continue
        turns.append(_turn(turn, context, waited_s, i == last, subs))
        subs, waited_s, answered_s = (), 0.0, turn.t + (turn.api or 0.0)
    return Session(
        name=raw.sid or raw.agent, turns=tuple(turns), start_s=raw.t, n_streams=context.n_streams
    )


def _subs(
    turn: _Turn, answered_s: float, shared: SharedNames, model: list[str], where: str
) -> tuple[tuple[float, Session], ...]:
    return tuple(
        (max(sub.t - answered_s, 0.0), session_of(sub, shared, model, where))
        for sub in turn.sub_before
    )


def _waited_s(raw: _Turn) -> float:
    """Seconds between the answer before a turn and the turn."""
    think_s = raw.think if raw.think is not None else raw.gap
    return max(think_s or 0.0, 0.0)


def _turn(
    raw: _Turn,
    context: ContextBuilder,
    waited_s: float,
    is_last: bool,
    subs: tuple[tuple[float, Session], ...],
) -> Turn:
    finish = FINISH_TOOL_CALLS if raw.tool else _FINISH.get(raw.stop or "", raw.stop)
    return Turn(
        path=context.turn(raw.keep // PAGE_TOKENS, raw.input_tokens // PAGE_TOKENS),
        input_tokens=raw.input_tokens,
        output_tokens=raw.out,
        think_s=waited_s,
        took_s=raw.api,
        label=label_of(finish, raw.tool),
        says_end=is_last or raw.end,
        subs=subs,
    )
