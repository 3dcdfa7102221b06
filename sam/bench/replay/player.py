"""Plays a plan against one live server, closed loop, and keeps what was measured.

Owns: waits, calls of other agents, hints and their order, one record per request. Must never
treat the arms differently except for `agent_hint`, management requests and SGLang's own
`session_id`, and must never start or configure a server.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from sam.bench.replay.arms import Hints
from sam.bench.swarm_client import Answer, SwarmRun, chat, manage
from sam.bench.workloads.plan import (
    COMPRESSOR,
    Agent,
    Conversation,
    Plan,
    Turn,
    evict_messages,
    lineage,
    manage_session,
)
from sam.bench.workloads.timeline import Timeline, expected_idle_s


@dataclass
class Played:
    """`run` has answers by (session, turn); compressors have the turn that they come before.
    `user_of`: session to user. `task_s`: whole tasks, by user."""

    run: SwarmRun = field(default_factory=SwarmRun)
    user_of: dict[str, int] = field(default_factory=dict)
    task_s: dict[int, float] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per request, in sending order."""
        answers = self.run.answers
        return [self._row(key, answers[key]) for key in self.run.sent if key in answers]

    def _row(self, key: tuple[str, int], answer: Answer) -> dict[str, Any]:
        return {
            "user": self.user_of[key[0]],
            "session": key[0],
            "turn": key[1],
            "prompt": answer.prompt_tokens,
            "device": answer.device_tokens,
            "host": answer.host_tokens,
            "storage": answer.storage_tokens,
            "out": len(answer.output_ids),
            "ttft_s": round(answer.ttft_s, 5),
            "total_s": round(answer.total_s, 5),
            "digest": zlib.crc32(repr((answer.input_ids, answer.output_ids)).encode()),
        }


def play(
    url: str, plan: Plan, line: Timeline, hints: Hints, on_answer: Callable[[], None]
) -> Played:
    """Play all users to their end. Raises an ExceptionGroup with RequestFailed."""
    player = Player(plan, line, hints, on_answer)
    asyncio.run(player.play(url))
    return player.played


class Player:
    """One play of a plan. `sam.bench.predict` puts another server behind its steps."""

    def __init__(
        self, plan: Plan, line: Timeline, hints: Hints, on_answer: Callable[[], None]
    ) -> None:
        self.plan, self.line, self.hints, self.on_answer = plan, line, hints, on_answer
        self.played = Played()
        self.talks = {name: Conversation(plan, agent) for name, agent in plan.agents.items()}

    async def play(self, url: str) -> None:
        start = time.perf_counter()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=900, limits=limits) as client:
            self.client = client
            async with asyncio.TaskGroup() as tasks:
                for user, (start_s, root) in enumerate(self.plan.users):
                    tasks.create_task(self._user(user, start_s, root))
        self.played.run.wall_s = time.perf_counter() - start

    async def _user(self, user: int, start_s: float, root: str) -> None:
        for name in (root, *self.plan.children_of(root)):
            self.played.user_of[name] = user
            self.played.user_of[COMPRESSOR.format(session=name)] = user
        await asyncio.sleep(start_s)
        start = time.perf_counter()
        await self._agent(root, 0, len(self.plan.agents[root].turns))
        self.played.task_s[user] = round(time.perf_counter() - start, 4)

    async def _agent(self, name: str, first: int, last: int) -> None:
        """Turns `[first, last)` of an agent, and what its client sends around them."""
        agent = self.plan.agents[name]
        if agent.sticky and first:
            await self._manage(agent, "prefetch")
        for index in range(first, last):
            turn = agent.turns[index]
            await self._wait(agent, turn)
            await self._cut(agent, index)
            await self._infer(agent, index)
            for action, target in turn.odd:
                await self._send(agent, manage_session(action, target, target))
            async with asyncio.TaskGroup() as calls:
                for call in turn.calls:
                    calls.create_task(self._agent(call.session_id, call.first, call.last))
        await self._over(agent)

    async def _wait(self, agent: Agent, turn: Turn) -> None:
        """A tool runs: no hint. A pause that the client knows of: down at once, back before."""
        if not turn.paused:
            await asyncio.sleep(turn.wait_s)
            return
        resume_at = time.perf_counter() + turn.wait_s
        await self._manage(agent, "offload")
        await asyncio.sleep(max(resume_at - time.perf_counter(), 0.0))
        await self._manage(agent, "prefetch")

    async def _cut(self, agent: Agent, index: int) -> None:
        """Compression: a compressor session reads the dialogue, ends, and the window is cut."""
        talk, turn = self.talks[agent.session_id], agent.turns[index]
        if turn.summary:
            name = COMPRESSOR.format(session=agent.session_id)
            body = talk.compressor_body(index)
            await self._ask(name, agent.session_id, index, body, hinted=agent.hinted)
            await self._send(agent, manage_session("evict", name, agent.session_id))
            await self._close(agent, name)
        cut = talk.cut(index)
        if cut is not None and self.plan.system:
            request = {"tools": list(self.plan.tools), "max_tokens": turn.reply_tokens}
            await self._send(agent, evict_messages(agent, *cut, request))

    async def _infer(self, agent: Agent, index: int) -> None:
        talk = self.talks[agent.session_id]
        body, extra = talk.body(index), {}
        if self.hints is Hints.IDLE:
            idle = expected_idle_s(self.plan, self.line, agent.session_id, index)
            extra = {} if idle is None else {"expected_idle_s": idle}
        answer = await self._ask(
            agent.session_id, agent.parent_id, index, body, hinted=agent.hinted, **extra
        )
        talk.take_reply(index, answer.text)

    async def _ask(
        self,
        name: str,
        parent: str,
        index: int,
        body: dict[str, Any],
        *,
        hinted: bool,
        **extra: Any,
    ) -> Answer:
        if hinted and self.hints.has_lineage:
            body["agent_hint"] = {**lineage(name, parent), **extra}
        elif hinted and self.hints is Hints.SESSION:
            body["session_id"] = name
        self.played.run.sent.append((name, index))
        answer = await chat(self.client, body)
        self.played.run.answers[name, index] = answer
        self.on_answer()
        return answer

    async def _over(self, agent: Agent) -> None:
        """A run of the agent is over: the sticky one waits below, others end."""
        if agent.sticky:
            await self._manage(agent, "offload")
            return
        await self._manage(agent, "evict")
        names = [agent.session_id]
        if agent.is_root:
            children = self.plan.children_of(agent.session_id)
            names += [name for name in children if self.plan.agents[name].sticky]
        for name in names:
            await self._close(agent, name)

    async def _manage(self, agent: Agent, action: str) -> None:
        await self._send(agent, manage_session(action, agent.session_id, agent.parent_id))

    async def _send(self, agent: Agent, body: dict[str, Any]) -> None:
        if agent.hinted and self.hints.manages:
            start = time.perf_counter()
            await manage(self.client, body)
            self.played.run.manage_s.append(time.perf_counter() - start)

    async def _close(self, agent: Agent, name: str) -> None:
        """SGLang's own end of a session."""
        if agent.hinted and self.hints is Hints.SESSION:
            response = await self.client.post("/close_session", json={"session_id": name})
            response.raise_for_status()
