"""A plan: agents, their turns, and the bodies that come out of them.

Owns: what a turn is, the messages of a conversation as they grow and are cut, and the hints that
belong to them, as the openJiuwen client sends them. Must never make a body depend on the arm:
with and without hints it differs by `agent_hint` only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sam.bench.workloads.text import SPAWN

MODEL = "default"
COMPRESSOR = "{session}:compressor:dialogue"
_COMPRESS = "Summarize the dialogue so far."
_CALL_TOKENS = 64  # at most, of an answer that is a call
_CALL_END = "</tool_call>"


@dataclass(frozen=True)
class Call:
    """Turns `[first, last)` of another agent, run while the caller waits."""

    session_id: str
    first: int
    last: int


@dataclass(frozen=True)
class Turn:
    """One request: what comes in, after how long, and how much is answered.

    `texts`: new messages, tool results if the turn before called a tool or other agents.
    `wait_s` passes before it. `paused`: the client knows that this wait is long and offloads.
    `keep_messages`: the window is cut to its first so many messages first; `summary` is what a
    compressor made of the rest. `calls` run after the answer. `odd` are management requests
    without sense, as (action, session id), sent after the answer.
    """

    texts: tuple[str, ...]
    wait_s: float
    reply_tokens: int
    tool: str = ""
    paused: bool = False
    keep_messages: int | None = None
    summary: str = ""
    calls: tuple[Call, ...] = ()
    odd: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Agent:
    """`sticky`: offloaded between its runs and ended with its root only. `idle_error`: factor
    on every expected idle time that is sent for it (1: the truth but for its noise)."""

    session_id: str
    parent_id: str
    turns: tuple[Turn, ...]
    hinted: bool = True
    sticky: bool = False
    idle_error: float = 1.0

    @property
    def is_root(self) -> bool:
        return self.session_id == self.parent_id


@dataclass(frozen=True)
class Plan:
    """`users`: roots with their start in seconds. Everything is sent to one server.

    `tool_calls`: answers before a tool wait are made calls, by a grammar, so that the server
    sees what it would see of a real model: `finish_reason: tool_calls` and the tool's name.
    """

    workload: str
    about: str
    source: str
    system: str
    tools: tuple[dict[str, Any], ...]
    agents: Mapping[str, Agent]
    users: tuple[tuple[float, str], ...]
    shared_tokens: int
    tool_calls: bool = False

    def children_of(self, session_id: str) -> list[str]:
        calls = (call for turn in self.agents[session_id].turns for call in turn.calls)
        return list(dict.fromkeys(call.session_id for call in calls))

    def n_requests(self) -> int:
        turns = [turn for agent in self.agents.values() for turn in agent.turns]
        return len(turns) + sum(bool(turn.summary) for turn in turns)


@dataclass
class Conversation:
    """The messages of one agent: planned input, real answers of the server."""

    plan: Plan
    agent: Agent
    messages: list[dict[str, Any]] = field(default_factory=list)

    def cut(self, index: int) -> tuple[int, list[dict[str, Any]]] | None:
        """Cut the window before turn `index` if the plan says so.

        Returns (first index that is gone, the whole window as it was), or None.
        """
        turn, before = self.agent.turns[index], list(self.messages)
        if turn.keep_messages is None or turn.keep_messages >= len(before):
            return None
        del self.messages[turn.keep_messages :]
        if turn.summary:
            self.messages.append({"role": "user", "content": turn.summary})
        return turn.keep_messages, before

    def body(self, index: int) -> dict[str, Any]:
        """Request body of turn `index`, without hint."""
        turn = self.agent.turns[index]
        if not self.messages and self.plan.system:
            self.messages.append({"role": "system", "content": self.plan.system})
        calls = self.messages[-1].get("tool_calls") if self.messages else None
        for place, text in enumerate(turn.texts):
            message = {"role": "user", "content": text}
            if calls:
                call = calls[min(place, len(calls) - 1)]
                message = {"role": "tool", "tool_call_id": call["id"], "content": text}
            self.messages.append(message)
        body = self._request(self.messages, turn.reply_tokens)
        forced = self.plan.tool_calls and called_tool(turn)
        return {**body, **_forced()} if forced else body

    def compressor_body(self, index: int) -> dict[str, Any]:
        """What the compressor asks before turn `index`: the dialogue, and a task."""
        ask = {"role": "user", "content": _COMPRESS}
        tokens = self.agent.turns[index].reply_tokens
        return self._request([*self.messages, ask], tokens)

    def take_reply(self, index: int, text: str) -> None:
        """Append the answer of turn `index`, with the tool calls that the plan puts there."""
        turn = self.agent.turns[index]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        name = called_tool(turn)
        if name:
            n_calls = max(len(turn.calls), 1)
            message["tool_calls"] = [_call(name, index, n) for n in range(n_calls)]
        self.messages.append(message)

    def _request(self, messages: Sequence[dict[str, Any]], tokens: int) -> dict[str, Any]:
        body = {"model": MODEL, "messages": list(messages), "max_tokens": tokens}
        body["temperature"] = 0.0
        return {**body, "tools": list(self.plan.tools)} if self.plan.tools else body


def called_tool(turn: Turn) -> str:
    """The tool that the answer of a turn calls; empty if it calls none."""
    return turn.tool or (SPAWN if turn.calls else "")


def _forced() -> dict[str, Any]:
    """The grammar makes the call; the stop string ends it, as a random model never would.

    Which tool it names is the model's choice: a named choice would leave the other tools out of
    the prompt, and nothing would be shared between agents that call different ones.
    """
    return {
        "tool_choice": "required",
        "max_tokens": _CALL_TOKENS,
        "stop": [_CALL_END],
        "no_stop_trim": True,
    }


def _call(name: str, index: int, n: int) -> dict[str, Any]:
    arguments = json.dumps({"turn": index, "n": n})
    function = {"name": name, "arguments": arguments}
    return {"id": f"call-{index}-{n}", "type": "function", "function": function}


def lineage(session_id: str, parent_id: str) -> dict[str, Any]:
    return {"session_id": session_id, "parent_session_id": parent_id}


def manage_session(action: str, session_id: str, parent_id: str) -> dict[str, Any]:
    """Body that generates nothing: offload, prefetch or evict a session."""
    return _manage({"type": action, "target": "session"}, session_id, parent_id, {"messages": []})


def evict_messages(
    agent: Agent, start: int, window: Sequence[dict[str, Any]], request: Mapping[str, Any]
) -> dict[str, Any]:
    """Body that drops `[start, end)` of the previous window, which it carries whole."""
    edit = {"type": "evict", "target": "messages", "start": start, "end": len(window)}
    carried = {key: request[key] for key in ("tools", "max_tokens") if key in request}
    carried["messages"] = list(window)
    return _manage(edit, agent.session_id, agent.parent_id, carried)


def _manage(
    edit: dict[str, Any], session_id: str, parent_id: str, carried: Mapping[str, Any]
) -> dict[str, Any]:
    management = {"manage_request": True, "edits": [edit]}
    hint = {**lineage(session_id, parent_id), "context_management": management}
    return {"model": MODEL, **carried, "agent_hint": hint}
