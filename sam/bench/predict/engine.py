"""One SGLang scheduler as far as it decides what is in the cache: queue, batches, locks, two tiers.

Owns the order of service and the seconds that a step takes. Must never decide what is evicted:
that is a policy of `sam.sim`, the same orders as on the server.

What is modelled, since it moves hit rates: requests of one prefill batch do not find each other;
prompt and answer are held until the answer is complete; answers stay in the cache but for their
last token; prefills go before decoding; a request waits while what runs fills the device tier; a
prompt takes its room on the device when it starts and on the host when it is computed, when others
may have been queued again.
What a request costs beside its tokens passes before it is queued, and holds up nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sam.bench.replay.arms import SAM_SHORTEST
from sam.config import SamConfig
from sam.sim.costs import Costs
from sam.sim.policy import Policy
from sam.sim.traces.hashed import BlockTrie

FCFS, LPM, SPF = "fcfs", "lpm", "shortest-prefill-first"
ORDERS = (FCFS, LPM, SPF, SAM_SHORTEST)
_AGING = SamConfig().admission_aging


class EngineParams(NamedTuple):
    """Sizes in tokens, as in the server's flags. `order`: one of `ORDERS`."""

    device_tokens: int
    page_tokens: int
    max_running: int
    chunk_tokens: int
    order: str
    costs: Costs


class Served(NamedTuple):
    """What a request found, in tokens, and its times in seconds from its arrival."""

    device_tokens: int
    host_tokens: int
    ttft_s: float
    total_s: float


@dataclass(eq=False)
class Request:
    """`session` None: nobody's. `label`, `hint_s`: of the idle time that follows."""

    session: Hashable | None
    prompt: Sequence[int]
    answer: Sequence[int]
    label: str
    hint_s: float | None
    arrived_s: float
    done: asyncio.Future[Served]
    holder: Hashable = None
    ttft_s: float = 0.0
    left: int = 0
    found: tuple[int, int] = (0, 0)
    arrived_tokens: int = 0
    path: list[tuple[int, int]] = field(default_factory=list)


class Engine:
    """`ask` from any task; `run` as a task of its own. `policy.tracker` None: plain LRU."""

    def __init__(self, params: EngineParams, policy: Policy) -> None:
        self.params, self.policy = params, policy
        self._trie = BlockTrie()
        self._queue: list[Request] = []
        self._running: list[Request] = []
        self._wake = asyncio.Event()
        self._n_requests = 0
        self._computed_tokens = 0

    async def ask(
        self,
        session: Hashable | None,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        label: str,
        hint_s: float | None = None,
    ) -> Served:
        """One request to its end. `answer`: the tokens that will come."""
        loop = asyncio.get_running_loop()
        arrived_s = loop.time()
        await asyncio.sleep(self.params.costs.request_s)
        request = Request(session, prompt, answer, label, hint_s, arrived_s, loop.create_future())
        self._n_requests += 1
        request.holder = ("request", self._n_requests) if session is None else session
        request.path = self._path(prompt)
        if session is not None:
            self.policy.arrive(session, loop.time())
        request.arrived_tokens = self._computed_tokens
        self._queue.append(request)
        self._wake.set()
        return await request.done

    async def run(self) -> None:
        """The scheduler's loop, for ever."""
        while True:
            batch = self._admit()
            if batch:
                await asyncio.sleep(self._prefill_s(batch))
                self._emit_first(batch)
            elif self._running:
                await asyncio.sleep(1.0 / self.params.costs.decode_tokens_per_s)
                self._emit(self._running)
            else:
                self._wake.clear()
                await self._wake.wait()

    # -- steps --------------------------------------------------------------------

    def _admit(self) -> list[Request]:
        """The next prefill batch; what its requests find is what was there before it."""
        if self.params.order == LPM:
            self._queue.sort(key=lambda request: -max(self._peek(request)))
        elif self.params.order == SPF:
            self._queue.sort(key=self._missing)
        elif self.params.order == SAM_SHORTEST:
            self._queue.sort(key=lambda request: self._missing(request) - self._credit(request))
        batch: list[Request] = []
        new_tokens = 0
        for request in list(self._queue):
            if len(self._running) + len(batch) >= self.params.max_running:
                break
            if new_tokens >= self.params.chunk_tokens or not self._fits(request, batch):
                break
            device, both = self._peek(request)
            request.found = (device, max(both - device, 0))
            new_tokens += len(request.prompt) - both
            batch.append(request)
            self._queue.remove(request)
        self._computed_tokens += new_tokens
        now_s = asyncio.get_running_loop().time()
        for request in batch:
            self._start(request, now_s)
        return batch

    def _start(self, request: Request, now_s: float) -> None:
        """The prompt gets its room on the device, and holds what the host has of it."""
        if request.session is not None:
            self.policy.start(request.session, now_s)
        self._access(0, request, request.path, now_s)
        for place, tier in enumerate(self.policy.tiers[1:], 1):
            self._access(place, request, _head(request.path, tier.peek(request.path)), now_s)

    def _missing(self, request: Request) -> int:
        return len(request.prompt) - max(self._peek(request))

    def _credit(self, request: Request) -> float:
        """Tokens that the wait so far is worth, as with `--sam-admission shortest`."""
        return _AGING * (self._computed_tokens - request.arrived_tokens)

    def _fits(self, request: Request, batch: list[Request]) -> bool:
        """Whether what runs can be held together with it, shared parts counted once."""
        longest: dict[int, int] = {}
        answers = 0
        for other in (*self._running, *batch, request):
            answers += len(other.answer)
            for stream, pages in other.path:
                longest[stream] = max(longest.get(stream, 0), pages)
        held = sum(longest.values()) * self.params.page_tokens + answers
        alone = not self._running and not batch
        return alone or held <= self.params.device_tokens

    def _prefill_s(self, batch: list[Request]) -> float:
        new = sum(len(r.prompt) - sum(r.found) for r in batch)
        return self.params.costs.prefill_s(new, sum(r.found[1] for r in batch), 0)

    def _emit_first(self, batch: list[Request]) -> None:
        now_s = asyncio.get_running_loop().time()
        for request in batch:
            for place in range(1, len(self.policy.tiers)):
                self._access(place, request, request.path, now_s)
            request.ttft_s, request.left = now_s - request.arrived_s, len(request.answer)
        self._running += batch
        self._emit(batch)

    def _emit(self, requests: list[Request]) -> None:
        now_s = asyncio.get_running_loop().time()
        for request in list(requests):
            request.left -= 1
            if request.left <= 0:
                self._running.remove(request)
                self._finish(request, now_s)

    def _finish(self, request: Request, now_s: float) -> None:
        whole = self._path([*request.prompt, *request.answer[:-1]])
        for place in range(len(self.policy.tiers)):
            self._access(place, request, whole, now_s)
        if request.session is None:
            for tier in self.policy.tiers:
                tier.finish(request.holder, now_s)
        else:
            self.policy.answer(request.session, now_s, request.label, request.hint_s, False)
        served = Served(*request.found, request.ttft_s, now_s - request.arrived_s)
        request.done.set_result(served)

    # -- cache --------------------------------------------------------------------

    def _path(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        size = self.params.page_tokens
        whole = len(tokens) - len(tokens) % size
        blocks = (tuple(tokens[i : i + size]) for i in range(0, whole, size))
        return list(self._trie.path(self._trie.walk(blocks)))

    def _peek(self, request: Request) -> tuple[int, int]:
        """Prompt tokens on the device and on either tier; the last one is always computed."""
        size, most = self.params.page_tokens, len(request.prompt) - 1
        tiers = [tier.peek(request.path) * size for tier in self.policy.tiers]
        most -= most % size
        return min(tiers[0], most), min(max(tiers), most)

    def _access(
        self, place: int, request: Request, path: list[tuple[int, int]], now_s: float
    ) -> None:
        tier, owned = self.policy.tiers[place], request.session is not None
        tier.access(path, now_s, request.holder, owned=owned)


def _head(path: list[tuple[int, int]], pages: int) -> list[tuple[int, int]]:
    """The path's first pages."""
    head = []
    for stream, length in path:
        if pages > 0:
            head.append((stream, min(length, pages)))
        pages -= length
    return head
