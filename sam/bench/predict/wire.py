"""The replay's own player in front of the simulated engine, instead of a server.

Owns what a server would do with bodies: rendering them to tokens, and what their hints mean for
sessions. Must never send anything, nor change what the player asks and when.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from sam.bench.predict.engine import Engine
from sam.bench.replay.arms import Arm
from sam.bench.replay.player import Player
from sam.bench.swarm_client import Answer
from sam.bench.workloads.plan import Agent, Plan, Turn, called_tool
from sam.bench.workloads.text import Vocabulary
from sam.bench.workloads.timeline import CALL_TOKENS, Timeline
from sam.core.gaps import FINISH_TOOL_CALLS, label_of


class Renderer:
    """Bodies to token ids, by the model's own chat template."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(model))

    def prompt(self, body: dict[str, Any]) -> list[int]:
        return self._tokenizer.apply_chat_template(
            [_with_arguments(message) for message in body["messages"]],
            tools=[_tool(tool) for tool in body["tools"]] if body.get("tools") else None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )

    def answer(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """As the server hands tools to the template: with one field more."""
    return {**tool, "defer_loading": None}


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """As the server hands messages to the template: arguments of calls as objects."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**f, "arguments": json.loads(f["arguments"])}}
        for call in message["tool_calls"]
        for f in (call["function"],)
    ]
    return {**message, "tool_calls": calls}


class SimulatedPlayer(Player):
    """Plays a plan as the live player does; answers come from `engine`."""

    def __init__(
        self,
        plan: Plan,
        line: Timeline,
        arm: Arm,
        engine: Engine,
        renderer: Renderer,
        words: Vocabulary,
    ) -> None:
        super().__init__(plan, line, arm.hints, lambda: None)
        self.engine, self.renderer, self.words = engine, renderer, words
        self._children: dict[str, dict[str, None]] = {}

    async def play(self, url: str = "") -> None:
        loop = asyncio.get_running_loop()
        start_s, engine = loop.time(), asyncio.create_task(self.engine.run())
        async with asyncio.TaskGroup() as tasks:
            for user, (wait_s, root) in enumerate(self.plan.users):
                tasks.create_task(self._user(user, wait_s, root))
        self.played.run.wall_s = loop.time() - start_s
        engine.cancel()

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
        owned = hinted and self.engine.policy.tracker is not None
        self._children.setdefault(parent, {})[name] = None
        prompt = self.renderer.prompt(body)
        text, label = self._answer_of(name, index, body)
        ids = self.renderer.answer(text)[: body["max_tokens"]]
        self.played.run.sent.append((name, index))
        served = await self.engine.ask(
            name if owned else None, prompt, ids, label=label, hint_s=extra.get("expected_idle_s")
        )
        answer = Answer(
            text, tuple(prompt), tuple(ids), len(prompt), served.device_tokens,
            served.host_tokens, 0, served.ttft_s, served.total_s,
        )  # fmt: skip
        self.played.run.answers[name, index] = answer
        return answer

    async def _wait(self, agent: Agent, turn: Turn) -> None:
        """As the player does, by the simulated clock alone."""
        if turn.paused:
            await self._manage(agent, "offload")
        await asyncio.sleep(turn.wait_s)
        if turn.paused:
            await self._manage(agent, "prefetch")

    def _answer_of(self, name: str, index: int, body: dict[str, Any]) -> tuple[str, str]:
        """Text of the planned length, and the label of the idle time after it."""
        agent = self.plan.agents.get(name)
        tool = called_tool(agent.turns[index]) if agent is not None else ""
        rng = random.Random(f"answer {name} {index}")
        if self.plan.tool_calls and tool:
            return self.words.text(rng, CALL_TOKENS), label_of(FINISH_TOOL_CALLS, tool)
        return self.words.text(rng, body["max_tokens"]), label_of("length")

    async def _send(self, agent: Agent, body: dict[str, Any]) -> None:
        """A management request: done at once, as on the server."""
        tracker = self.engine.policy.tracker
        if not (agent.hinted and self.hints.manages) or tracker is None:
            return
        hint = body["agent_hint"]
        edit = hint["context_management"]["edits"][0]
        name, now_s = hint["session_id"], asyncio.get_running_loop().time()
        if edit["target"] != "session" or name not in tracker:
            return  # a range is a branch that the session leaves with its next request
        if edit["type"] == "evict":
            self._end(name, now_s)
        elif edit["type"] == "offload":
            tracker.offloaded(name)
        else:
            tracker.resuming(name)

    def _end(self, name: str, now_s: float) -> None:
        """A session and, as it is the root of them, its children."""
        tracker = self.engine.policy.tracker
        for child in (name, *self._children.get(name, ())):
            if child in tracker:
                tracker.ended(child, now_s)

    async def _close(self, agent: Agent, name: str) -> None:
        """SGLang's own end of a session."""
        tracker = self.engine.policy.tracker
        if agent.hinted and self.hints.value == "session" and tracker is not None:
            tracker.ended(name, asyncio.get_running_loop().time())
