"""Envelope actions as the scheduler sees them: decoding, validation, results.

Owns the action types `session.*@0.1` and the outcome record. Both doors (`agent_hint`
lowered by `sam.core.hints`, and a client's own `kv_hints`) are decoded here, so both
behave the same. Must never execute anything, and never trust a client's tenant or time
stamp: the ingress overwrites them with `stamp_envelope`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec

from sam.core.lineage import SessionKey
from sam.core.validation import (
    DEFAULT_LIMITS,
    HintError,
    HintLimits,
    HintReason,
    check_choice,
    check_id,
    check_number,
    check_object,
    check_range,
    check_tokens,
    shape_of,
)

PROTOCOL_VERSION = "0.1"
ACTION_VERSION = "0.1"
INTERNAL_KEYS = ("token_ids", "cache_salt", "extra_key", "source")
"""Payload keys that only the ingress may set; `stamp_envelope` removes a client's."""
_SOURCES = ("messages", "tools", "tokens")


class ActionKind(StrEnum):
    """The action types sam implements."""

    BIND = "session.bind"
    EVICT = "session.evict"
    DEMOTE = "session.demote"
    PREFETCH = "session.prefetch"
    RETAIN = "session.retain"
    EXPECT = "session.expect"


_KIND_OF_TYPE = {kind.value: kind for kind in ActionKind}


class ActionStatus(StrEnum):
    """Outcome of an action; ACCEPTED and DEFERRED may still change, the others are final."""

    ACCEPTED = "accepted"
    DEFERRED = "deferred"
    DONE = "done"
    CLIPPED = "clipped"
    DROPPED = "dropped"
    MISSING = "missing"
    REJECTED = "rejected"
    EXPIRED = "expired"


class TierTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens an action moved or freed, per tier."""

    device: int = 0
    host: int = 0
    pool: int = 0


class ActionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one action; `reason` is a short low-cardinality word or empty.

    `span`: of a range, the tokens from the root that it really covered, half-open.
    """

    action_id: str
    action_type: str
    status: ActionStatus
    tokens: TierTokens = TierTokens()
    reason: str = ""
    span: tuple[int, int] | None = None


class SessionAction(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded action. [start, end) counts items of `target`; `time_s` is message time.

    A range that came as messages or tools has target `tokens` and `source` says what it was:
    `token_ids` are all of the window's tokens, as little-endian int32; `cache_salt` and
    `extra_key` are those of its radix key.
    """

    kind: ActionKind
    action_id: str
    key: SessionKey
    time_s: float
    parent_session_id: str | None = None
    target: Literal["session", "messages", "tools", "tokens"] = "session"
    start: int | None = None
    end: int | None = None
    scope: Literal["session", "subtree"] = "session"
    expected_idle_s: float | None = None
    ttl_s: float | None = None
    release: Literal["now", "lazy"] | None = None
    token_ids: bytes | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    source: Literal["messages", "tools", "tokens"] | None = None

    def does_the_same(self, other: SessionAction) -> bool:
        """Whether the two differ in nothing but their id and time."""
        return self == msgspec.structs.replace(
            other, action_id=self.action_id, time_s=self.time_s
        )


def parse_action(action: object, limits: HintLimits = DEFAULT_LIMITS) -> SessionAction | None:
    """Decode one action, a dict or a struct of the shape of upstream's KvHintAction.

    Returns None for a type or version that sam does not implement. Raises HintError
    for a malformed action or payload.
    """
    action_id, action_type, version, payload = _fields_of(action)
    kind = _KIND_OF_TYPE.get(action_type) if isinstance(action_type, str) else None
    if kind is None or version != ACTION_VERSION:
        return None
    action_id = check_id(action_id, limits.max_id_bytes, "action_id", HintReason.BAD_ACTION)
    payload = check_object(payload, limits, "payload", HintReason.BAD_ACTION)
    target = payload.get("target")
    if target is None:
        target = "session"
    target = check_choice(
        target,
        ("session", "messages", "tools", "tokens"),
        "payload.target",
        HintReason.BAD_EDIT_TARGET,
    )
    start, end = check_range(payload, target, limits, "payload")
    return SessionAction(
        kind=kind,
        action_id=action_id,
        key=_key_of(payload, limits),
        parent_session_id=_parent_of(payload, limits),
        target=target,
        start=start,
        end=end,
        scope=_scope_of(payload, kind, target),
        time_s=_number_of(payload, "time_s", limits.max_time_s, HintReason.BAD_TIME),
        release=_release_of(payload),
        **_window_of(payload, end if end is not None else start or 0, limits),
        **_kind_fields(payload, kind, limits),
    )


def parse_envelope(
    envelope: object, limits: HintLimits = DEFAULT_LIMITS
) -> list[tuple[SessionAction | None, ActionResult | None]]:
    """Decode all actions of an envelope (dict or struct), one entry per action in order.

    An entry is (action, None), or (None, result) with status `rejected` for a malformed
    action, or (None, None) for one that sam does not implement: a bad action never
    takes its neighbours down. Raises HintError only when the envelope has no usable
    action list.
    """
    if isinstance(envelope, dict):
        actions = envelope.get("actions")
    else:
        actions = getattr(envelope, "actions", None)
    entries: list[tuple[SessionAction | None, ActionResult | None]] = []
    for action in _checked_actions(actions, limits):
        try:
            entries.append((parse_action(action, limits), None))
        except HintError as error:
            entries.append((None, _rejection(action, error)))
    return entries


def stamp_envelope(
    envelope: object, *, tenant: str, now_s: float, limits: HintLimits = DEFAULT_LIMITS
) -> dict[str, Any]:
    """Return a plain-dict copy with the server's `tenant` and `time_s` in every payload.

    For a client's own `kv_hints`: whatever owner or time the client wrote is replaced, and
    INTERNAL_KEYS are removed.
    Actions of types that sam does not implement pass unchanged. Raises HintError when
    the envelope has no usable action list.
    """
    if isinstance(envelope, dict):
        head = envelope
    else:
        names = ("protocol_version", "message_id", "actions")
        head = {name: getattr(envelope, name, None) for name in names}
    stamped = []
    for action in _checked_actions(head.get("actions"), limits):
        action_id, action_type, version, payload = _fields_of(action)
        known = isinstance(action_type, str) and action_type in _KIND_OF_TYPE
        if known and isinstance(payload, dict):
            payload = {k: v for k, v in payload.items() if k not in INTERNAL_KEYS}
            payload |= {"tenant": tenant, "time_s": now_s}
        stamped.append(
            {
                "action_id": action_id,
                "action_type": action_type,
                "action_version": version,
                "payload": payload,
            }
        )
    return {
        "protocol_version": head.get("protocol_version"),
        "message_id": head.get("message_id"),
        "actions": stamped,
    }


def _checked_actions(actions: object, limits: HintLimits) -> list[object] | tuple[object, ...]:
    if not isinstance(actions, (list, tuple)):
        raise HintError(
            HintReason.BAD_ENVELOPE, f"actions: expected an array, got {shape_of(actions)}"
        )
    if len(actions) > limits.max_actions:
        raise HintError(HintReason.TOO_MANY_EDITS, f"actions: {len(actions)}")
    return actions


def _fields_of(action: object) -> tuple[Any, ...]:
    names = ("action_id", "action_type", "action_version", "payload")
    if isinstance(action, dict):
        return tuple(action.get(name) for name in names)
    try:
        return tuple(getattr(action, name) for name in names)
    except AttributeError:
        raise HintError(
            HintReason.BAD_ACTION, f"action: expected an object, got {shape_of(action)}"
        ) from None


def _rejection(action: object, error: HintError) -> ActionResult:
    try:
        action_id, action_type, _, _ = _fields_of(action)
    except HintError:
        action_id, action_type = "", ""
    return ActionResult(
        action_id=action_id[:512] if isinstance(action_id, str) else "",
        action_type=action_type if isinstance(action_type, str) else "",
        status=ActionStatus.REJECTED,
        reason=error.reason.value,
    )


def _key_of(payload: dict[object, object], limits: HintLimits) -> SessionKey:
    session_id = check_id(
        payload.get("session_id"),
        limits.max_id_bytes,
        "payload.session_id",
        HintReason.BAD_SESSION_ID,
    )
    tenant = check_id(
        payload.get("tenant"), limits.max_tenant_bytes, "payload.tenant", HintReason.BAD_TENANT
    )
    return SessionKey(tenant, session_id)


def _parent_of(payload: dict[object, object], limits: HintLimits) -> str | None:
    parent = payload.get("parent_session_id")
    if parent is None:
        return None
    return check_id(
        parent,
        limits.max_id_bytes,
        "payload.parent_session_id",
        HintReason.BAD_PARENT_SESSION_ID,
    )


def _scope_of(
    payload: dict[object, object], kind: ActionKind, target: str
) -> Literal["session", "subtree"]:
    scope = payload.get("scope")
    if scope is not None:
        scope = check_choice(
            scope, ("session", "subtree"), "payload.scope", HintReason.BAD_SCOPE
        )
    if target != "session":
        return "session"
    if kind is ActionKind.EVICT:
        return "subtree"
    return scope or "session"


def _release_of(payload: dict[object, object]) -> Any:
    release = payload.get("release")
    if release is None:
        return None
    return check_choice(release, ("now", "lazy"), "payload.release", HintReason.BAD_RELEASE)


def _window_of(
    payload: dict[object, object], n_tokens: int, limits: HintLimits
) -> dict[str, Any]:
    """The fields that name the rendered window of a token range, where the ingress set them."""
    fields: dict[str, Any] = {
        "token_ids": check_tokens(payload.get("token_ids"), n_tokens, limits, "payload.token_ids")
    }
    for name in ("cache_salt", "extra_key"):
        value = payload.get(name)
        if value is not None:
            value = check_id(
                value, limits.max_namespace_bytes, f"payload.{name}", HintReason.BAD_ACTION
            )
        fields[name] = value
    source = payload.get("source")
    if source is not None:
        source = check_choice(source, _SOURCES, "payload.source", HintReason.BAD_ACTION)
    return fields | {"source": source}


def _number_of(
    payload: dict[object, object], name: str, high: float, reason: HintReason
) -> float:
    return check_number(payload.get(name), 0, high, f"payload.{name}", reason)


def _kind_fields(
    payload: dict[object, object], kind: ActionKind, limits: HintLimits
) -> dict[str, Any]:
    if kind is ActionKind.EXPECT:
        idle = _number_of(
            payload, "expected_idle_s", limits.max_expected_idle_s, HintReason.BAD_NUMBER
        )
        return {"expected_idle_s": idle}
    if kind is ActionKind.RETAIN:
        if payload.get("ttl_s") is None:
            return {"ttl_s": limits.default_ttl_s}
        return {"ttl_s": _number_of(payload, "ttl_s", limits.max_ttl_s, HintReason.BAD_NUMBER)}
    return {}
