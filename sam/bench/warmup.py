"""Brings a fresh server to its working speed before anything is timed.

Owns: a few requests of its own, the same for every arm. Must never carry a hint, and must never
share text with what is measured later.
"""

from __future__ import annotations

import asyncio
import random

import httpx

from sam.bench.swarm import MODEL, words
from sam.bench.swarm_client import chat

_ROUNDS, _AT_ONCE = 2, 3


def warm_up(url: str, *, seed: int) -> None:
    """Prefill and decode, alone and in batches, with lengths of every size."""
    asyncio.run(_warm_up(url, random.Random(f"warm-up-{seed}")))


async def _warm_up(url: str, rng: random.Random) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for _ in range(_ROUNDS):
            bodies = [_body(rng, 150 * (i + 1)) for i in range(_AT_ONCE)]
            await asyncio.gather(*(chat(client, body) for body in bodies))
            await chat(client, bodies[0])


def _body(rng: random.Random, n_words: int) -> dict[str, object]:
    message = {"role": "user", "content": "warm up " + words(rng, n_words)}
    return {"model": MODEL, "messages": [message], "max_tokens": 8, "temperature": 0.0}
