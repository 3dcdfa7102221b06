"""Shapes on the way from a request to the scheduler and back: envelopes, actions, outcomes.

Owns how they look as plain dicts, and what of them is about one prompt of several. Must never
keep anything, nor read a clock.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import msgspec
from sglang.srt.managers.kv_hints import KvHintAction, decode_kv_hints_envelope

from sam.core.actions import ActionKind
from sam.core.hints import PROTOCOL_VERSION, AgentHint, lower
from sam.core.validation import DEFAULT_LIMITS, HintError, HintReason
from sam.srt.entrypoints.results import wire_id
from sam.srt.managers.bindings import PARALLEL_ACTION

HINT_ACTION = "agent_hint"
_SPARE_LEVELS = 64
"""How much deeper than in its check an envelope may lie, and the stack be, where it is sent."""


class CarriedHint(dict):
    """An `agent_hint` or `kv_hints` on its way through upstream's conversion of a request.

    `body` is the chat request that its ranges index; None where it has none.
    """

    def __init__(self, hint: dict[str, Any], body: Any = None) -> None:
        super().__init__(hint)
        self.body = body


def envelope_of(message_id: str, actions: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "protocol_version": PROTOCOL_VERSION,
        "message_id": message_id,
        "actions": actions,
    }


def joined(
    hint: AgentHint | None,
    own: dict[str, Any] | None,
    tenant: str,
    now_s: float,
    *,
    manage_only: bool,
) -> dict[str, Any]:
    """One envelope of the lowered hint and then the client's own actions, if any."""
    wire = own["message_id"] if own is not None else wire_id(tenant, uuid.uuid4().hex)
    actions: list[dict[str, Any]] = []
    if hint is not None:
        actions = lower(
            hint, message_id=wire, now_s=now_s, tenant=tenant, manage_only=manage_only
        )["actions"]
    if own is not None:
        for action in actions:
            action["action_id"] = f"hint-{action['action_id']}"
        actions += own["actions"]
    return envelope_of(wire, actions)


def bind_only(hint: AgentHint) -> AgentHint:
    """The hint for one more request of the same body: whose it is, and nothing to do."""
    return msgspec.structs.replace(hint, edits=(), expected_idle_s=None, cache_control=None)


def n_held(obj: Any, envelope: dict[str, Any], own: dict[str, Any] | None) -> int:
    """How many of a joined envelope's actions, from the first, are about all prompts of the
    body together: the hint's where each prompt has an envelope of its `own`, else all. With
    several answers to each prompt the scheduler sees to that."""
    if n_prompts(obj) == 1:
        return 0
    if isinstance(obj.kv_hints, list):
        return len(envelope["actions"]) - len(own["actions"] if own is not None else ())
    return 0 if is_parallel(obj.sampling_params) else len(envelope["actions"])


def check_encodable(envelope: dict[str, Any]) -> None:
    """Raise ValueError for what JSON allows and the way to the scheduler does not: integers
    over 64 bits, lone surrogates, endless nesting. Costs one encoding of the envelope."""
    nested: Any = decode_kv_hints_envelope(envelope)
    for _ in range(_SPARE_LEVELS):
        nested = [nested]
    try:
        msgspec.msgpack.encode(nested)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        detail = f"kv_hints: cannot be encoded ({type(error).__name__})"
        raise HintError(HintReason.BAD_ENVELOPE, detail) from None


def sessions_of(actions: Iterable[dict[str, Any]], tenant: str) -> set[tuple[str, str]]:
    """(tenant, session id) of all actions that name a session."""
    payloads = [action["payload"] for action in actions]
    ids = [p.get("session_id") for p in payloads if isinstance(p, dict)]
    return {(tenant, one) for one in ids if isinstance(one, str)}


def surplus(actions: list[dict[str, Any]]) -> dict[str, HintError]:
    """Actions that the scheduler would not take, by id: an `agent_hint` and a client's own
    envelope may be too much together. What binds goes first."""
    limit = DEFAULT_LIMITS.max_actions
    by_need = sorted(actions, key=lambda a: a["action_type"] != ActionKind.BIND)
    detail = f"actions: {len(actions)}, at most {limit} in one request"
    error = HintError(HintReason.TOO_MANY_EDITS, detail)
    return {action["action_id"]: error for action in by_need[limit:]}


def is_parallel(sampling_params: object) -> bool:
    """Whether more than one answer is asked for: upstream runs a warm-up of the prefix first."""
    items = sampling_params if isinstance(sampling_params, list) else [sampling_params]
    counts = [item.get("n") for item in items if isinstance(item, dict)]
    return any(isinstance(n, int) and n > 1 for n in counts)


def marked(kv_hints: Any) -> Any:
    """Tell the scheduler that the envelope comes with several requests, a warm-up first."""
    if isinstance(kv_hints, list):
        return [marked(item) for item in kv_hints]
    if not kv_hints:
        return kv_hints
    envelope = decode_kv_hints_envelope(kv_hints)
    mark = KvHintAction(
        action_id="", action_type=PARALLEL_ACTION, action_version=PROTOCOL_VERSION, payload={}
    )
    return msgspec.structs.replace(envelope, actions=[*envelope.actions, mark])


def fitting(obj: Any) -> Any:
    """The request's `kv_hints`, but nothing for an empty list, and for a list of envelopes that
    is not one for each prompt something that is rejected."""
    hints = obj.kv_hints
    if not isinstance(hints, list) or not hints:
        return hints or None
    batch = _batch_of(obj)
    if batch is not None and len(batch) == len(hints):
        return hints
    where = "a single request" if batch is None else f"{len(batch)} prompts"
    return {"kv_hints": f"a list of {len(hints)}, for {where}"}


def n_prompts(obj: Any) -> int:
    """How many prompts the body brings, each of which becomes a request."""
    batch = _batch_of(obj)
    return 1 if batch is None else len(batch)


def _batch_of(obj: Any) -> list[Any] | None:
    """The list of prompts, where the body brings one.

    Source: `GenerateReqInput._determine_batch_size`.
    """
    if obj.text is not None:
        return obj.text if isinstance(obj.text, list) else None
    prompts = obj.input_ids if obj.input_ids is not None else obj.input_embeds
    first: Any = prompts
    for _ in range(1 if obj.input_ids is not None else 2):
        first = first[0] if isinstance(first, list) and first else None
    return prompts if isinstance(first, list) else None


def outcomes(
    actions: Iterable[dict[str, Any]], status: str, reason: str = ""
) -> list[dict[str, Any]]:
    """The same outcome for each action."""
    return [
        {
            "action_id": action["action_id"],
            "action_type": action["action_type"],
            "status": status,
            "reason": reason,
        }
        for action in actions
    ]


def refusal(action: dict[str, Any], error: HintError) -> dict[str, Any]:
    """The outcome of an action that goes no further."""
    (outcome,) = outcomes([action], "rejected", error.reason.value)
    return outcome | {"detail": error.detail}


def rejected_hint(reason: str, detail: str) -> dict[str, Any]:
    """The outcome of a hint that has no actions because it is malformed."""
    return {
        "action_id": HINT_ACTION,
        "action_type": HINT_ACTION,
        "status": "rejected",
        "reason": reason,
        "detail": detail,
    }


def shown(result: Any) -> dict[str, Any]:
    """A scheduler's result as clients see it."""
    return {
        "action_id": result.action_id,
        "action_type": result.action_type,
        "status": result.status,
        "reason": result.reason,
        **result.detail,
    }
