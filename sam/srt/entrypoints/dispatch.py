"""How hints leave the server process: now, behind a range of their session, or after a request.

Owns admission, the order of what goes to the scheduler, and what is known of it before the
scheduler answers. Must never render on the event loop, nor hold an inference back.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from functools import partial
from typing import Any

from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

from sam.config import SamConfig
from sam.core.actions import ActionKind
from sam.core.validation import HintError
from sam.srt.entrypoints.admission import Admission, HintRate
from sam.srt.entrypoints.after import RequestEnds
from sam.srt.entrypoints.envelopes import (
    envelope_of,
    is_parallel,
    outcomes,
    refusal,
    sessions_of,
    surplus,
)
from sam.srt.entrypoints.range_queue import RangeQueue
from sam.srt.entrypoints.results import HintResults, wire_id
from sam.srt.entrypoints.spans import ChatBody, is_range, refuse, resolve
from sam.srt.entrypoints.tenant import client_of
from sam.srt.observability.metrics import IngressMetrics

logger = logging.getLogger(__name__)

OVERLOADED = "overloaded"
PARALLEL_SAMPLES = "parallel_samples"
RATE_LIMITED = "rate_limited"
OPERATOR = "operator"
"""Who acts on the page; no tenant is called so."""


class HintDispatch:
    """All methods are called on the event loop. Envelopes are plain dicts, as lowered or
    stamped; their `message_id` is the one on the wire."""

    def __init__(
        self,
        tokenizer_manager: Any,
        config: SamConfig,
        results: HintResults,
        metrics: IngressMetrics,
    ) -> None:
        self._manager = tokenizer_manager
        self._results = results
        self._metrics = metrics
        self._in_flight = Admission(
            total=config.max_in_flight_actions, per_client=config.in_flight_per_tenant()
        )
        self._rendering = Admission(
            total=config.max_pending_ranges, per_client=max(1, config.max_pending_ranges // 2)
        )
        self._rate = HintRate(per_s=config.hint_rate_per_s, burst=config.burst())
        self._ranges = RangeQueue()
        self._ends = RequestEnds(tokenizer_manager)
        self._sent: dict[str, deque[object]] = {}
        self._waiting: set[asyncio.Task[None]] = set()

    # -- without a request --------------------------------------------------------

    def submit(
        self,
        message_id: str,
        envelope: dict[str, Any],
        tenant: str,
        body: ChatBody | None,
        *,
        by_operator: bool = False,
    ) -> dict[str, Any]:
        """Send actions, or queue them behind ranges; returns what is known of them now.

        `body` is the request whose lists the ranges index. What is sent `by_operator` has a
        rate of its own and counts in no bound on what is under way: it must get through
        beside a flood of the tenant's.
        """
        refused = surplus(envelope["actions"]) | refuse(envelope["actions"], body)
        client = OPERATOR if by_operator else client_of(tenant)
        actions = self._open(message_id, envelope["actions"], tenant, client, refused)
        wire = envelope["message_id"]
        if actions:
            self._send_in_order(wire, actions, tenant, client, body)
        return self._results.get(message_id, tenant, time.time()) or {}

    def tell(self, tenant: str, action: dict[str, Any]) -> None:
        """Send one action that no client asked for or hears of; dropped and counted where too
        many are under way."""
        wire = wire_id(tenant, f"told-{uuid.uuid4().hex}")
        ticket = self._take(client_of(tenant), [action])
        if ticket is not None:
            self._send(wire, [action], ticket)

    def answered(self, wire: str) -> None:
        """The scheduler has looked at a message: the oldest that went out under this id,
        which clients may use again."""
        tickets = self._sent.get(wire)
        if tickets is None:
            return
        self._in_flight.give_back(tickets.popleft())
        if not tickets:
            del self._sent[wire]

    # -- with an inference --------------------------------------------------------

    def open_inference(
        self,
        message_id: str,
        envelope: dict[str, Any],
        tenant: str,
        body: ChatBody | None,
        n_held: int = 0,
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Actions that ride on the request, and those that follow: the first `n_held`, and all
        from the first range on. What binds the request to its session always rides on it."""
        refused = surplus(envelope["actions"]) | refuse(envelope["actions"], body)
        held = {action["action_id"] for action in envelope["actions"][:n_held]}
        client = client_of(tenant)
        actions = self._open(message_id, envelope["actions"], tenant, client, refused, rides=True)
        ride, follow = [], []
        for action in actions:
            waits = action["action_id"] in held or is_range(action) or any(map(is_range, follow))
            binds = action["action_type"] == ActionKind.BIND
            (follow if waits and not binds else ride).append(action)
        return ride, follow

    def edit_after(
        self, obj: Any, envelope: dict[str, Any], tenant: str, body: ChatBody | None
    ) -> None:
        """Send actions when the request of `obj` is over; ranges are resolved while it runs."""
        wire, actions = envelope["message_id"], envelope["actions"]
        if is_parallel(obj.sampling_params):
            self._settle(wire, outcomes(actions, "dropped", PARALLEL_SAMPLES))
            return
        resolved: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not any(map(is_range, actions)):
            resolved.set_result(None)
        elif not self._render(
            (), tenant, partial(resolve, actions, body, _tokens_of(obj)), resolved.set_result
        ):
            self._settle(wire, outcomes(actions, "dropped", OVERLOADED))
            return
        task = asyncio.get_running_loop().create_task(
            self._follow(obj, wire, actions, tenant, resolved)
        )
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def request_over(self, rid: str) -> None:
        """An inference that carried hints has finished."""
        self._ends.announce(rid)

    async def join(self) -> None:
        """Wait until nothing is resolved or waits for the end of a request."""
        await self._ranges.join()
        while self._waiting:
            await asyncio.wait(self._waiting)

    # -- inside -------------------------------------------------------------------

    def _open(
        self,
        message_id: str,
        actions: list[dict[str, Any]],
        tenant: str,
        client: str,
        refused: dict[str, HintError],
        *,
        rides: bool = False,
    ) -> list[dict[str, Any]]:
        """Remember actions: taken, refused at once, or too many for the rate of `client`, of
        which the one that binds an inference that it `rides` on is none; returns those taken."""
        ready = [action for action in actions if action["action_id"] not in refused]
        free = [a for a in ready if rides and a["action_type"] == ActionKind.BIND][:1]
        n_counted = len(ready) - len(free)
        if not self._rate.take(client, n_counted, time.monotonic()):
            self._metrics.rejected(RATE_LIMITED)
            ready = free
        taken = {action["action_id"] for action in ready}
        known = []
        for action in actions:
            error = refused.get(action["action_id"])
            if error:
                known.append(refusal(action, error))
            elif action["action_id"] in taken:
                known += outcomes([action], "accepted")
            else:
                known += outcomes([action], "dropped", RATE_LIMITED)
        for error in refused.values():
            self._metrics.rejected(error.reason.value)
        self._results.open(message_id, tenant, known, time.time())
        self._metrics.accepted(len(ready))
        return ready

    def _take(self, client: str, actions: list[dict[str, Any]]) -> object | None:
        """A place on the way to the scheduler; None if there is none. Each submission has its
        own: a client that uses one message id twice holds two."""
        ticket = object()
        if client == OPERATOR or self._in_flight.take(ticket, client, len(actions)):
            return ticket
        self._metrics.rejected(OVERLOADED)
        return None

    def _send_in_order(
        self,
        wire: str,
        actions: list[dict[str, Any]],
        tenant: str,
        client: str,
        body: ChatBody | None,
    ) -> None:
        """Send now, or behind what waits of the same sessions; ranges are resolved first."""
        ticket = self._take(client, actions)
        if ticket is None:
            self._settle(wire, outcomes(actions, "dropped", OVERLOADED))
            return
        sessions = sessions_of(actions, tenant)
        renders = body is not None and any(map(is_range, actions))
        if not renders and not self._ranges.is_busy(sessions):
            self._send(wire, actions, ticket)
            return
        then = partial(self._send_resolved, wire, actions, ticket)
        if not renders:
            self._ranges.submit(sessions, None, then)
        elif not self._render(sessions, tenant, partial(resolve, actions, body), then):
            self._in_flight.give_back(ticket)
            self._settle(wire, outcomes(actions, "dropped", OVERLOADED))

    def _render(self, sessions: Any, tenant: str, work: Any, then: Any) -> bool:
        """Queue work for the thread; False if too much of it waits."""
        ticket = object()
        if not self._rendering.take(ticket, client_of(tenant), 1):
            self._metrics.rejected(OVERLOADED)
            return False

        def done(result: Any) -> None:
            self._rendering.give_back(ticket)
            then(result)

        self._ranges.submit(sessions, work, done)
        return True

    def _send_resolved(
        self,
        wire: str,
        actions: list[dict[str, Any]],
        ticket: object,
        resolved: list[Any] | None,
    ) -> None:
        """Send what resolving left of `actions`; None: there was nothing to resolve."""
        results = actions if resolved is None else resolved
        refused = [
            refusal(action, result)
            for action, result in zip(actions, results, strict=True)
            if isinstance(result, HintError)
        ]
        for outcome in refused:
            self._metrics.rejected(outcome["reason"])
        self._settle(wire, refused)
        ready = [result for result in results if not isinstance(result, HintError)]
        if ready:
            self._send(wire, ready, ticket)
        else:
            self._in_flight.give_back(ticket)

    def _send(self, wire: str, actions: list[dict[str, Any]], ticket: object) -> None:
        try:
            self._manager.send_kv_hints(decode_kv_hints_envelope(envelope_of(wire, actions)))
            self._sent.setdefault(wire, deque()).append(ticket)
        except Exception:
            self._in_flight.give_back(ticket)
            self._settle(wire, outcomes(actions, "dropped", "internal_error"))
            raise

    async def _follow(
        self,
        obj: Any,
        wire: str,
        actions: list[dict[str, Any]],
        tenant: str,
        resolved: asyncio.Future[Any],
    ) -> None:
        over = self._ends.expect(obj)
        result = await resolved
        await over.wait()
        ticket = self._take(client_of(tenant), actions)
        if ticket is None:
            self._settle(wire, outcomes(actions, "dropped", OVERLOADED))
            return
        try:
            self._send_resolved(wire, actions, ticket, result)
        except Exception:
            logger.exception("sam: edits after an inference could not be sent")

    def _settle(self, wire: str, known: list[dict[str, Any]]) -> None:
        if known:
            self._results.update(wire, known, time.time())


def _tokens_of(obj: Any) -> list[int] | None:
    """The prompt's token ids, where upstream's conversion has made them."""
    tokens = obj.input_ids
    return tokens if isinstance(tokens, list) and tokens and isinstance(tokens[0], int) else None
