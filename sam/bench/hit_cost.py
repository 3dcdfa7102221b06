"""What a cached prompt is worth on this machine: recompute, device hit, host hit.

Owns: the three timed requests per prompt, and the proof by cached-token counts that each was
what it is called. Must never report a time whose counts do not fit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

from sam.bench.swarm import MODEL, AgentPlan, lineage_hint, manage_body, words
from sam.bench.swarm_client import Answer, chat, manage

KINDS = ("recompute", "device_hit", "host_hit")
_FINAL = ("done", "clipped", "dropped", "missing", "rejected", "expired")


@dataclass
class HitCost:
    """TTFT samples by kind; a kind without samples was not seen and is left out."""

    prompt_tokens: int = 0
    ttft_s: dict[str, list[float]] = field(default_factory=dict)

    def medians(self) -> dict[str, float]:
        return {kind: median(self.ttft_s[kind]) for kind in KINDS if self.ttft_s.get(kind)}


def measure_hit_cost(
    url: str, *, seed: int, n_words: int, repeats: int, on_step: Callable[[], None]
) -> HitCost:
    """Time `repeats` prompts three times each on an idle server that runs with sam."""
    cost = HitCost()
    asyncio.run(_measure(url, cost, seed, n_words, repeats, on_step))
    return cost


async def _measure(
    url: str, cost: HitCost, seed: int, n_words: int, repeats: int, on_step: Callable[[], None]
) -> None:
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for index in range(repeats):
            name = f"hit-cost-{seed}-{index}"
            agent = AgentPlan(name, name, ())
            message = {"role": "user", "content": words(rng, n_words)}
            body = {"model": MODEL, "messages": [message], "max_tokens": 1, "temperature": 0.0}
            body["agent_hint"] = lineage_hint(agent)
            for _ in KINDS:
                if await _try(client, cost, body) == "device_hit":
                    await _finished(client, manage_body(agent, "offload", release="now"))
                on_step()
            await _finished(client, manage_body(agent, "evict"))


async def _try(client: httpx.AsyncClient, cost: HitCost, body: dict[str, Any]) -> str:
    answer = await chat(client, body)
    kind = kind_of(answer)
    cost.prompt_tokens = max(cost.prompt_tokens, answer.prompt_tokens)
    if kind:
        cost.ttft_s.setdefault(kind, []).append(answer.ttft_s)
    return kind


def kind_of(answer: Answer) -> str:
    """Which of `KINDS` an answer was, by its counts; "" if it was a mixture."""
    most = 0.95 * answer.prompt_tokens
    if answer.recomputed_tokens >= most:
        return "recompute"
    if answer.device_tokens >= most:
        return "device_hit"
    return "host_hit" if answer.host_tokens >= most else ""


async def _finished(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Send a management request and wait, a bounded time, until its actions are over."""
    message_id = (await manage(client, body))["message_id"]
    for _ in range(100):
        known = (await client.get(f"/kv_hints/{message_id}")).json()
        if all(action["status"] in _FINAL for action in known["actions"]):
            return
        await asyncio.sleep(0.05)
