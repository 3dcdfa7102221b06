"""Which session a scheduler request belongs to, and what to do after it.

Owns the reading of a request's hints. Must never change the request or the table.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from sam.core.actions import (
    ActionKind,
    ActionResult,
    ActionStatus,
    SessionAction,
    parse_envelope,
)
from sam.core.sessions import SessionKey
from sam.core.validation import HintError

INTERNAL_PREFIX = "sam."
"""Of action types between ingress and scheduler; the ingress strips them from what clients
send."""
PARALLEL_ACTION = f"{INTERNAL_PREFIX}parallel"
"""The envelope comes with n > 1 requests and a warm-up before them."""
ANSWERED_ACTION = f"{INTERNAL_PREFIX}answered"
"""Tells of what only the server process sees of an answer: the tool that it called."""
QUERY_ACTION = f"{INTERNAL_PREFIX}query"
"""Asks for a report; see `sam.srt.mem_cache.inspect`."""


class Binding:
    """A request with hints. `edits` run once it is over; `generation` is set at queueing.

    `key` is None for a request that carries actions but binds no session.
    """

    __slots__ = (
        "bind",
        "bound",
        "edits",
        "envelope_id",
        "generation",
        "is_warmup",
        "key",
        "rejections",
        "route",
        "time_s",
    )

    def __init__(self, bind: SessionAction | None, envelope_id: str, route: Any) -> None:
        self.bind = bind
        self.bound: ActionResult | None = None
        self.key: SessionKey | None = bind.key if bind else None
        self.time_s = bind.time_s if bind else 0.0
        self.envelope_id = envelope_id
        self.route = route
        self.generation = 0
        self.is_warmup = False
        self.edits: list[SessionAction] = []
        self.rejections: list[ActionResult] = []

    def add_tokens(self, req: Any) -> None:
        """Ranges on tokens are on those of the request itself."""
        for i, edit in enumerate(self.edits):
            if edit.target == "tokens" and edit.token_ids is None:
                ids = array("i", [*req.origin_input_ids, *req.output_ids])
                self.edits[i] = msgspec.structs.replace(
                    edit,
                    token_ids=ids.tobytes(),
                    extra_key=req.extra_key,
                    cache_salt=req.cache_salt,
                )

    def bound_results(self) -> list[ActionResult]:
        return [self.bound] if self.bound is not None else []


class Route:
    """Where outcomes go: the reply channel of a request that may be gone by then.

    Source: `SenderWrapper.send_output` reads `http_worker_ipc` off its second argument.
    """

    __slots__ = ("http_worker_ipc",)

    def __init__(self, http_worker_ipc: str | None) -> None:
        self.http_worker_ipc = http_worker_ipc


def unknown_action(action_id: str, action_type: str) -> ActionResult:
    """Of an action that sam does not implement."""
    return ActionResult(
        action_id=action_id,
        action_type=action_type,
        status=ActionStatus.REJECTED,
        reason="unknown_action",
    )


def more_than_bound(action: SessionAction, bind: SessionAction) -> ActionResult:
    """Of a bind after the first: a request belongs to one session."""
    same = action.does_the_same(bind)
    return ActionResult(
        action_id=action.action_id,
        action_type=action.kind.value,
        status=ActionStatus.DONE if same else ActionStatus.REJECTED,
        reason="" if same else "bound_already",
    )


def binding_of(req: Any) -> Binding | None:
    """The binding of a request whose hints say anything that sam implements, else None.

    `req` is a `sglang.srt.managers.schedule_batch.Req`.
    """
    envelope = req.kv_hints
    if envelope is None:
        return None
    raw = [a for a in envelope.actions if a.action_type != PARALLEL_ACTION]
    try:
        entries = parse_envelope({"actions": raw})
    except HintError:
        return None
    actions = [action for action, _ in entries if action is not None]
    rejections = [rejection for _, rejection in entries if rejection is not None]
    rejections += [
        unknown_action(given.action_id, given.action_type)
        for given, entry in zip(raw, entries, strict=True)
        if entry == (None, None)
    ]
    if not actions and not rejections:
        return None
    bind = next((a for a in actions if a.kind is ActionKind.BIND), None)
    binding = Binding(bind, envelope.message_id, Route(req.http_worker_ipc))
    parallel = len(raw) < len(envelope.actions)
    binding.is_warmup = parallel and req.sampling_params.max_new_tokens == 0
    if not binding.is_warmup:
        binding.edits = [a for a in actions if a.kind is not ActionKind.BIND]
        binding.rejections = rejections + [
            more_than_bound(a, bind) for a in actions if a.kind is ActionKind.BIND and a is not bind
        ]
    return binding
