"""Traces of `kv-cache-tester`: one JSON file a session, or one session a line.

Owns the reading of `{id, models, block_size, requests: [{t, in, out, hash_ids, stop,
think_time?, api_time?}]}`. Entries of type `subagent` are sessions of their own. Hash ids
mean the same across sessions only where `hash_id_scope` is `global`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sam.core.gaps import FINISH_STOP, FINISH_TOOL_CALLS, label_of
from sam.sim.trace import Session, Trace, TraceError, Turn, without_empty
from sam.sim.traces.hashed import BlockTrie

ABOUT = "kv-cache-tester: id, block_size, requests of {t, in, out, hash_ids, stop, …}"
DEFAULT_BLOCK_TOKENS = 64
_FINISH = {"tool_use": FINISH_TOOL_CALLS, "end_turn": FINISH_STOP}


class _Request(msgspec.Struct, rename={"input_tokens": "in"}):
    type: str = "s"
    t: float = 0.0
    input_tokens: int = 0
    out: int = 0
    hash_ids: list[int | str] = []
    stop: str | None = None
    think_time: float | None = None
    api_time: float | None = None
    agent_id: str = ""
    requests: list[_Request] = []


class _Session(msgspec.Struct):
    requests: list[_Request]
    id: str = ""
    block_size: int = DEFAULT_BLOCK_TOKENS
    hash_id_scope: str = "local"


def matches(record: dict[str, Any]) -> bool:
    return isinstance(record.get("requests"), list)


def read(records: Any, where: str) -> Trace:
    trie, sizes, sessions = BlockTrie(), set(), []
    for number, record in records:
        try:
            raw = msgspec.convert(record, _Session)
        except msgspec.ValidationError as error:
            raise TraceError(f"{where}: line {number}: {error}") from error
        sizes.add(raw.block_size)
        scope = "" if raw.hash_id_scope == "global" else f"{number}"
        sessions.append(_session(raw.id, raw.requests, scope, trie))
    if len(sizes) > 1 or min(sizes, default=1) < 1:
        raise TraceError(f"{where}: block sizes must be one positive number: {sorted(sizes)}")
    return Trace(sessions=without_empty(sessions, where), page_tokens=sizes.pop())


def _session(name: str, requests: list[_Request], scope: str, trie: BlockTrie) -> Session:
    turns: list[Turn] = []
    subs: list[tuple[float, Session]] = []
    answered_s, waited_s, has_asked = 0.0, 0.0, False
    for n, request in enumerate(requests):
        if request.type == "subagent":
            child = f"{name}/{request.agent_id or n}"
            own_scope = f"{scope}/{n}" if scope else ""
            sub = _session(child, request.requests, own_scope, trie)
            if sub.turns:
                subs.append((max(request.t - answered_s, 0.0), sub))
            continue
        think_s = request.think_time
        if think_s is None:
            think_s = request.t - answered_s if has_asked else 0.0
        waited_s += max(think_s, 0.0)
        if request.input_tokens < 1:  # a call that failed
            waited_s += request.api_time or 0.0
            answered_s = request.t + (request.api_time or 0.0)
            continue
        turns.append(_turn(request, waited_s, tuple(subs), scope, trie))
        subs, has_asked, waited_s = [], True, 0.0
        answered_s = request.t + (request.api_time or 0.0)
    if turns:
        turns[-1] = msgspec.structs.replace(turns[-1], says_end=True)
    return Session(name=name, turns=tuple(turns))


def _turn(
    request: _Request,
    think_s: float,
    subs: tuple[tuple[float, Session], ...],
    scope: str,
    trie: BlockTrie,
) -> Turn:
    blocks = [(scope, block) for block in request.hash_ids] if scope else request.hash_ids
    return Turn(
        path=trie.path(trie.walk(blocks)),
        input_tokens=request.input_tokens,
        output_tokens=request.out,
        think_s=think_s,
        took_s=request.api_time,
        label=label_of(_FINISH.get(request.stop or "", request.stop)),
        subs=subs,
    )
