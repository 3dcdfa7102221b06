"""The load of the soak: agents, their turns, and hints of every kind at any time.

Owns: what is sent, drawn from one seed, and what came back. Must never let a hint into a body
whose answer is kept for comparison without keeping the body too, and must never look into the
server: that is `soak.py`'s part.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from sam.bench.swarm import MODEL, words

CHAT, GENERATE, ENVELOPE = "/v1/chat/completions", "/generate", "/kv_hints"
N_OUT = 8
_TOKENS = range(300, 1_500)
_LONGEST, _SAMPLES = 900, 48
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a part of the repository, with care",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "search", "test")
]
_MALFORMED: tuple[Any, ...] = (
    "garbage", 17, [], {}, {"session_id": 5}, {"session_id": "x" * 600},
    {"session_id": "x", "context_management": {"edits": [{"type": "evict"}]}},
    {"session_id": "x", "expected_idle_s": -1},
    {"session_id": "x", "context_management": {"edits": [
        {"type": "evict", "target": "messages", "start": 3, "end": 1}]}},
)  # fmt: skip


@dataclass
class Agent:
    """One session: exact token ids for `/generate`, messages for chat."""

    session_id: str
    parent_id: str
    prefix: list[int]
    context: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def lineage(self) -> dict[str, Any]:
        return {"session_id": self.session_id, "parent_session_id": self.parent_id}


@dataclass(frozen=True)
class Sample:
    """A served inference: where it went, the body without its hint, and the answer."""

    path: str
    body: dict[str, Any]
    answer: Any


class Load:
    """`clients` workers over one team of agents. `failures` are findings, in words."""

    def __init__(self, url: str, *, seed: int, clients: int, agents: int) -> None:
        self.url, self.clients = url, clients
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []
        self.samples: list[Sample] = []
        self.n_answers = 0
        self.gate = asyncio.Event()
        self.in_flight = 0
        self._ended = False
        shared = self._fresh(300, 400)
        system = "You are one of many careful agents. " + words(self.rng, 60)
        self.agents: list[Agent] = []
        for i in range(agents):
            parent = self.rng.choice(self.agents).session_id if self.agents else f"soak-{seed}"
            agent = Agent(f"soak-{seed}:{i}", parent, shared + self._fresh(0, 60))
            agent.messages = [{"role": "system", "content": system}]
            self.agents.append(agent)

    async def run(self, until: Callable[[], bool]) -> None:
        """Work while the gate is open, until `until()`; raises nothing for a failed request."""
        # httpcore may close an idle connection that it has just given to another request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=180, limits=limits
        ) as self.client:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self.clients):
                    tasks.create_task(self._worker(until))

    async def quiet(self, timeout_s: float) -> bool:
        """Close the gate and wait until nothing is in flight; False if something stays."""
        self.gate.clear()
        for _ in range(int(timeout_s / 0.05)):
            if not self.in_flight:
                return True
            await asyncio.sleep(0.05)
        return False

    async def _worker(self, until: Callable[[], bool]) -> None:
        steps = {
            self._generate: 8, self._chat: 4, self._hang_up: 2, self._manage: 8,
            self._manage_range: 3, self._unknown: 1, self._envelope: 2, self._malformed: 1,
        }  # fmt: skip
        while not until():
            await self.gate.wait()
            if until():
                return
            (step,) = self.rng.choices(list(steps), weights=list(steps.values()))
            self.in_flight += 1
            try:
                await step(self.rng.choice(self.agents))
            except httpx.HTTPError as error:
                self._fail(f"{step.__name__}: {error!r}")
            finally:
                self.in_flight -= 1
            if self.rng.random() < 0.2:
                await asyncio.sleep(self.rng.uniform(0, 0.05))

    async def _generate(self, agent: Agent) -> None:
        if len(agent.context) > _LONGEST or not agent.context:
            keep = self.rng.choice([0, len(agent.context) // 3])
            agent.context = (agent.context or agent.prefix)[: keep or len(agent.prefix)]
        prompt = agent.context + self._fresh(5, 120)
        body = {"input_ids": prompt, "sampling_params": _greedy()}
        hint = self._hint(agent, "tokens", len(prompt))
        reply = await self._post("generate", GENERATE, body | {"agent_hint": hint})
        if reply is None:
            return
        ids = reply["output_ids"]
        agent.context = prompt + ids
        self._keep(Sample(GENERATE, body, ids))

    async def _chat(self, agent: Agent) -> None:
        if len(agent.messages) > 12:
            agent.messages = agent.messages[: self.rng.choice([1, 3])]
        text = words(self.rng, self.rng.randint(5, 60))
        messages = [*agent.messages, {"role": "user", "content": text}]
        body: dict[str, Any] = {
            "model": MODEL, "messages": messages, "max_tokens": N_OUT, "temperature": 0.0,
            "ignore_eos": True,
        }  # fmt: skip
        if self.rng.random() < 0.5:
            body |= {"tools": _TOOLS, "tool_choice": "none"}
        hint = self._hint(agent, "messages", len(messages))
        reply = await self._post("chat", CHAT, body | {"agent_hint": hint})
        if reply is None:
            return
        answer = reply["choices"][0]["message"]["content"]
        agent.messages = [*messages, {"role": "assistant", "content": answer}]
        self._keep(Sample(CHAT, body, answer))

    async def _hang_up(self, agent: Agent) -> None:
        """A stream that the client leaves: before the first token, or after a few."""
        prompt = (agent.context or agent.prefix) + self._fresh(5, 80)
        params = _greedy() | {"max_new_tokens": 200}
        body = {"input_ids": prompt, "sampling_params": params, "stream": True}
        body["agent_hint"] = self._hint(agent, "tokens", len(prompt))
        n_chunks = self.rng.choice([0, 1, 3])
        self.counts["hang up"] += 1
        try:
            async with asyncio.timeout(self.rng.uniform(0.01, 0.5) if not n_chunks else 60):
                async with self.client.stream("POST", GENERATE, json=body) as response:
                    async for _ in response.aiter_lines():
                        n_chunks -= 1
                        if n_chunks <= 0:
                            return
        except TimeoutError:
            pass

    async def _manage(self, agent: Agent) -> None:
        edit: dict[str, Any] = {"target": "session"}
        edit["type"] = self.rng.choice(["offload", "prefetch", "offload", "prefetch", "evict"])
        if edit["type"] == "offload" and self.rng.random() < 0.4:
            edit["release"] = "now"
        hint = agent.lineage
        if self.rng.random() < 0.1:
            hint["parent_session_id"] = agent.session_id
        if self.rng.random() < 0.2:
            hint["expected_idle_s"] = self.rng.choice([0, 1, 30, 4_000])
        if self.rng.random() < 0.1:
            hint["cache_control"] = {"type": "ephemeral", "ttl": self.rng.choice([1, 60])}
        await self._send_hint(edit["type"], hint, [edit], [])

    async def _manage_range(self, agent: Agent) -> None:
        kind = self.rng.choice(["evict", "offload", "prefetch"])
        target = self.rng.choice(["messages", "messages", "tools"])
        size = len(agent.messages) if target == "messages" else len(_TOOLS)
        start = self.rng.randrange(size)
        end = self.rng.choice([size, size, start + 1, size + 50])
        edit = {"type": kind, "target": target, "start": start, "end": end}
        tools = {"tools": _TOOLS, "tool_choice": "none"} if target == "tools" else {}
        messages = agent.messages
        await self._send_hint(f"{kind} {target}", agent.lineage, [edit], messages, **tools)

    async def _unknown(self, _: Agent) -> None:
        kind = self.rng.choice(["evict", "offload", "prefetch"])
        hint = {"session_id": f"nobody-{self.rng.randrange(10**6)}"}
        await self._send_hint("unknown", hint, [{"type": kind, "target": "session"}], [])

    async def _envelope(self, agent: Agent) -> None:
        kind = self.rng.choice(["demote", "prefetch", "evict", "expect", "retain"])
        payload: dict[str, Any] = {"session_id": agent.session_id, "expected_idle_s": 3.0}
        action = {
            "action_id": "a", "action_type": f"session.{kind}", "action_version": "0.1",
            "payload": payload,
        }  # fmt: skip
        number = self.rng.randrange(2_000)  # some ids come twice: idempotency
        body = {"protocol_version": "0.1", "message_id": f"m{number}", "actions": [action]}
        await self._post("envelope", ENVELOPE, body)

    async def _malformed(self, agent: Agent) -> None:
        body = {"input_ids": agent.prefix, "sampling_params": _greedy()}
        hint = self.rng.choice(_MALFORMED)
        reply = await self._post("malformed", GENERATE, body | {"agent_hint": hint})
        if reply is not None:
            self._keep(Sample(GENERATE, body, reply["output_ids"]))

    async def _send_hint(
        self, what: str, hint: dict[str, Any], edits: list[Any], messages: list[Any], **body: Any
    ) -> None:
        hint["context_management"] = {"manage_request": True, "edits": edits}
        body |= {"model": MODEL, "messages": messages, "agent_hint": hint}
        reply = await self._post(f"manage: {what}", CHAT, body)
        if reply is not None and reply["usage"]["total_tokens"]:
            self._fail(f"management request generated: {what}")

    async def _post(self, what: str, path: str, body: dict[str, Any]) -> Any:
        """The answer, or None for a failure that is noted."""
        self.counts[what] += 1
        response = await self.client.post(path, json=body)
        if response.status_code != 200:
            self._fail(f"{what}: {response.status_code} {response.text[:200]}")
            return None
        reply = response.json()
        told = reply.get("kv_hints") or reply.get("meta_info", {}).get("kv_hints") or reply
        self.statuses.update(a["status"] for a in told.get("actions", ()))
        return reply

    def _hint(self, agent: Agent, target: str, size: int) -> dict[str, Any]:
        """Lineage; sometimes edits that follow the answer, or an expectation."""
        hint = agent.lineage
        draw = self.rng.random()
        if draw < 0.15:
            edit: dict[str, Any] = {"type": self.rng.choice(["evict", "offload"])}
            edit["target"] = self.rng.choice(["session", target])
            if edit["target"] != "session":
                edit |= {"start": self.rng.randrange(size), "end": size}
            hint["context_management"] = {"manage_request": False, "edits": [edit]}
        elif draw < 0.35:
            hint["expected_idle_s"] = round(self.rng.uniform(0, 20), 2)
        return hint

    def _keep(self, sample: Sample) -> None:
        """Reservoir: every answer of the run is as likely to be compared."""
        self.n_answers += 1
        if len(self.samples) < _SAMPLES:
            self.samples.append(sample)
        elif (place := self.rng.randrange(self.n_answers)) < _SAMPLES:
            self.samples[place] = sample

    def _fail(self, text: str) -> None:
        if len(self.failures) < 100:
            self.failures.append(text)

    def _fresh(self, low: int, high: int) -> list[int]:
        return self.rng.choices(_TOKENS, k=self.rng.randint(low, high))


def _greedy() -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": N_OUT, "ignore_eos": True}


def ask_again(request: Callable[..., Any], sample: Sample) -> Any:
    """The answer of another server to a sample; `request(path, body)` returns its JSON."""
    reply = request(sample.path, json.loads(json.dumps(sample.body)))
    if sample.path == GENERATE:
        return reply["output_ids"]
    return reply["choices"][0]["message"]["content"]
