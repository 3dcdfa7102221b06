"""Drives one swarm plan against one live server and keeps what was measured.

Owns: sending in the planned order, tool waits, management requests, TTFT and cached tokens per
request. Must never treat the arms differently except for `agent_hint` and the management
requests, and must never start, stop or configure a server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from sam.bench.swarm import AgentPlan, Conversation, SwarmPlan, lineage_hint, manage_body

CHAT = "/v1/chat/completions"
_EXTRAS = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_cached_tokens_details": True,
    "return_input_ids_in_sglext": True,
    "return_output_ids_in_sglext": True,
}


class RequestFailed(RuntimeError):
    """The server refused a request or broke off its answer."""


@dataclass(frozen=True)
class Answer:
    """One streamed chat completion. Tokens by tier sum up to the cached prompt tokens."""

    text: str
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    ttft_s: float
    total_s: float

    @property
    def recomputed_tokens(self) -> int:
        cached = self.device_tokens + self.host_tokens + self.storage_tokens
        return self.prompt_tokens - cached


@dataclass
class SwarmRun:
    """What one arm did, complete or cut short, by (session, turn); `sent` is in sending order."""

    sent: list[tuple[str, int]] = field(default_factory=list)
    answers: dict[tuple[str, int], Answer] = field(default_factory=dict)
    manage_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0


async def chat(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Send one streaming chat completion. Raises RequestFailed."""
    start = time.perf_counter()
    first_s, texts, usage, extension = 0.0, [], None, {}
    async with client.stream("POST", CHAT, json={**body, **_EXTRAS}) as response:
        if response.status_code != 200:
            raise RequestFailed(f"{response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RequestFailed(str(chunk["error"]))
            for choice in chunk["choices"]:
                first_s = first_s or time.perf_counter() - start
                texts.append(choice["delta"].get("content") or "")
            usage = chunk.get("usage") or usage
            extension |= chunk.get("sglext") or {}
    if usage is None:
        raise RequestFailed("the stream ended without usage")
    details = extension.get("cached_tokens_details") or {}
    return Answer(
        text="".join(texts),
        input_ids=tuple(extension["input_ids"]),
        output_ids=tuple(extension["output_ids"][0]),
        prompt_tokens=usage["prompt_tokens"],
        device_tokens=details.get("device") or 0,
        host_tokens=details.get("host") or 0,
        storage_tokens=details.get("storage") or 0,
        ttft_s=first_s,
        total_s=time.perf_counter() - start,
    )


async def manage(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Send a management request; the `kv_hints` part of its answer. Raises RequestFailed."""
    response = await client.post(CHAT, json=body)
    if response.status_code != 200:
        raise RequestFailed(f"{response.status_code}: {response.text}")
    return response.json()["kv_hints"]


def run_swarm(
    url: str, plan: SwarmPlan, run: SwarmRun, *, hints: bool, on_answer: Callable[[Answer], None]
) -> None:
    """Play the plan; `run` fills while it goes, so that an interrupted one is not lost."""
    asyncio.run(_Swarm(plan, run, hints=hints, on_answer=on_answer).play(url))


class _Swarm:
    """One play of a plan: agents side by side, requests sent in the plan's order."""

    def __init__(
        self, plan: SwarmPlan, run: SwarmRun, *, hints: bool, on_answer: Callable[[Answer], None]
    ) -> None:
        self.plan, self.run, self.hints, self.on_answer = plan, run, hints, on_answer
        self.talks = {a.session_id: Conversation(plan, a) for a in plan.agents}
        self.ready = {key: asyncio.Event() for key in plan.order}
        self.left = [len(wave) for wave in plan.waves]
        self.wave_of = {a.session_id: w for w, wave in enumerate(plan.waves) for a in wave}

    async def play(self, url: str) -> None:
        start = time.perf_counter()
        limits = httpx.Limits(max_connections=64)
        try:
            async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
                self.client = client
                self.ready[self.plan.order[0]].set()
                async with asyncio.TaskGroup() as tasks:
                    self.tasks = tasks
                    for key in self.plan.order:
                        await self.ready[key].wait()
                        tasks.create_task(self._turn(*key))
        finally:
            self.run.wall_s = time.perf_counter() - start

    async def _turn(self, session_id: str, index: int) -> None:
        talk = self.talks[session_id]
        agent, turn = talk.agent, talk.agent.turns[index]
        body = talk.body(index, self._results(agent, index))
        if self.hints:
            body["agent_hint"] = lineage_hint(agent)
        self.run.sent.append((session_id, index))
        answer = await chat(self.client, body)
        talk.take_reply(index, answer.text)
        self.run.answers[session_id, index] = answer
        self.on_answer(answer)
        if turn.spawns is not None:
            await self._spawn(agent, turn.spawns)
        elif index + 1 < len(agent.turns):
            await self._tool_wait(agent, index + 1)
        else:
            await self._end(agent)

    def _results(self, agent: AgentPlan, index: int) -> tuple[str, ...]:
        """What the members of the wave before this turn of the leader answered at last."""
        spawned = agent.turns[index - 1].spawns if index else None
        if spawned is None:
            return ()
        wave = self.plan.waves[spawned]
        return tuple(self.talks[a.session_id].messages[-1]["content"] for a in wave)

    async def _spawn(self, agent: AgentPlan, wave: int) -> None:
        await self._manage(agent, "offload")
        for member in self.plan.waves[wave]:
            self.tasks.create_task(self._start(member))

    async def _start(self, member: AgentPlan) -> None:
        await asyncio.sleep(member.turns[0].wait_s)
        self.ready[member.session_id, 0].set()

    async def _tool_wait(self, agent: AgentPlan, index: int) -> None:
        """The tool runs: room for others meanwhile, and back just before it is needed."""
        resume_at = asyncio.get_running_loop().time() + agent.turns[index].wait_s
        await self._manage(agent, "offload")
        await _sleep_until(resume_at - self.plan.spec.lead_s)
        await self._manage(agent, "prefetch")
        await _sleep_until(resume_at)
        self.ready[agent.session_id, index].set()

    async def _end(self, agent: AgentPlan) -> None:
        await self._manage(agent, "evict")
        if agent.is_leader:
            return
        wave = self.wave_of[agent.session_id]
        self.left[wave] -= 1
        if self.left[wave] == 0:
            await self._resume_leader(wave)

    async def _resume_leader(self, wave: int) -> None:
        leader = self.plan.leader
        index = next(i for i, turn in enumerate(leader.turns) if turn.spawns == wave) + 1
        resume_at = asyncio.get_running_loop().time() + leader.turns[index].wait_s
        await self._manage(leader, "prefetch")
        await _sleep_until(resume_at)
        self.ready[leader.session_id, index].set()

    async def _manage(self, agent: AgentPlan, action: str) -> None:
        if self.hints:
            start = time.perf_counter()
            await manage(self.client, manage_body(agent, action))
            self.run.manage_s.append(time.perf_counter() - start)


async def _sleep_until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))
