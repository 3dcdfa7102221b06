"""A randomized swarm of sessions, driven over `/generate` with exact token ids.

Owns the plan (a pure function of its seed) and the driver. The same plan runs with hints,
without, and on a server without cache: outputs must be the same. Must never let timing
change a prompt: a session's next prompt depends on its own answers only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sam.testing.server import ServerProcess

N_ANSWER_TOKENS = 6
# Management requests after a turn, "+" in sequence; "!" asks for release at once.
_EDITS = (None, "offload", "offload!", "offload!+prefetch", "evict")


@dataclass(frozen=True)
class SessionPlan:
    """One agent: token ids it starts from, what each turn adds, hints between turns."""

    session_id: str
    parent_session_id: str
    prefix: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]
    edits: tuple[str | None, ...]


@dataclass(frozen=True)
class Answer:
    """Output ids of one turn and the prompt tokens that came from each tier."""

    output_ids: tuple[int, ...]
    prompt_tokens: int
    cached: Mapping[str, int]


def make_plan(seed: int, *, n_sessions: int = 6, n_turns: int = 5) -> list[SessionPlan]:
    """Leader `s0` and its sub-agents: a shared prefix, private turns, random hints."""
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(300, 1_500) for _ in range(rng.randint(low, high)))

    shared = tokens(300, 500)
    plans = []
    for i in range(n_sessions):
        turns = tuple(tokens(20, 180) for _ in range(n_turns))
        edits = tuple(rng.choice(_EDITS) for _ in turns)
        plans.append(SessionPlan(f"s{i}", "s0", shared + tokens(0, 60), turns, edits))
    return plans


def run_swarm(
    server: ServerProcess, plans: list[SessionPlan], *, hints: bool, concurrency: int = 1
) -> dict[tuple[str, int], Answer]:
    """Run all sessions, `concurrency` at a time; answers by (session id, turn)."""
    answers: dict[tuple[str, int], Answer] = {}
    with ThreadPoolExecutor(concurrency) as pool:
        for part in pool.map(lambda plan: _run_session(server, plan, hints), plans):
            answers.update(part)
    return answers


def _run_session(
    server: ServerProcess, plan: SessionPlan, hints: bool
) -> dict[tuple[str, int], Answer]:
    answers = {}
    context = list(plan.prefix)
    lineage = {
        "session_id": plan.session_id,
        "parent_session_id": plan.parent_session_id,
    }
    for turn, (added, edit) in enumerate(zip(plan.turns, plan.edits, strict=True)):
        context += added
        answer = _generate(server, context, lineage if hints else None)
        answers[plan.session_id, turn] = answer
        context += answer.output_ids
        for kind in edit.split("+") if hints and edit else ():
            release = {"release": "now"} if kind.endswith("!") else {}
            manage(server, lineage, kind.rstrip("!"), **release)
    return answers


def _generate(server: ServerProcess, input_ids: list[int], hint: dict[str, Any] | None) -> Answer:
    body: dict[str, Any] = {
        "input_ids": input_ids,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": N_ANSWER_TOKENS,
            "ignore_eos": True,
        },
    }
    if hint is not None:
        body["agent_hint"] = hint
    reply = server.request("/generate", body)
    details = reply["meta_info"].get("cached_tokens_details") or {}
    return Answer(
        tuple(reply["output_ids"]),
        reply["meta_info"]["prompt_tokens"],
        {tier: n for tier, n in details.items() if isinstance(n, int)},
    )


def manage(
    server: ServerProcess, lineage: Mapping[str, str], kind: str, **edit: Any
) -> dict[str, Any]:
    """Send one management request on the whole session; returns the `kv_hints` of the reply."""
    management = {
        "manage_request": True,
        "edits": [{"type": kind, "target": "session", **edit}],
    }
    reply = server.request(
        "/v1/chat/completions",
        {
            "model": "sam",
            "messages": [],
            "agent_hint": {**lineage, "context_management": management},
        },
    )
    return reply["kv_hints"]


def settled_summary(server: ServerProcess, timeout_s: float = 20.0) -> dict[str, Any]:
    """The summary of `/sessions` once no hint action is under way any more.

    Raises TimeoutError with the summary if that does not come about.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        summary = server.request("/sessions")["summary"]
        if not summary["pending_actions"]:
            return summary
        if time.monotonic() > deadline:
            raise TimeoutError(f"hint actions still pending: {summary}")
        time.sleep(0.02)
