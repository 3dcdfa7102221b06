"""The `agent_hint` request field: schema, validation, lowering to the kv_hints envelope.

Owns what a client may say about its session and how that becomes envelope actions.
Must never look at messages or tokens (ranges stay in the target's own unit), read a
clock, or trust a value before its type and size are checked.

The scheduler-side decoder of the same actions is `sam.core.actions`, re-exported here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sam.core.actions import (
    ACTION_VERSION,
    PROTOCOL_VERSION,
    ActionKind,
    ActionResult,
    ActionStatus,
    SessionAction,
    TierTokens,
    parse_action,
    parse_envelope,
    stamp_envelope,
)
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
    shape_of,
)

__all__ = [
    "ACTION_VERSION",
    "PROTOCOL_VERSION",
    "ActionKind",
    "ActionResult",
    "ActionStatus",
    "AgentHint",
    "CacheControl",
    "Edit",
    "HintError",
    "HintLimits",
    "HintReason",
    "SessionAction",
    "TierTokens",
    "is_manage",
    "lower",
    "parse_action",
    "parse_agent_hint",
    "parse_envelope",
    "stamp_envelope",
]

EDIT_TYPES = ("evict", "offload", "prefetch")
EDIT_TARGETS = ("session", "messages", "tools", "tokens")
RELEASES = ("now", "lazy")

_HINT_KEYS = (
    "session_id",
    "parent_session_id",
    "context_management",
    "expected_idle_s",
    "cache_control",
)
_MANAGEMENT_KEYS = ("manage_request", "edits")
_EDIT_KEYS = ("type", "target", "start", "end", "release")
_CACHE_CONTROL_KEYS = ("type", "ttl")
_UNKNOWN_KEY_CHARS = 64
_KIND_OF_EDIT = {
    "evict": ActionKind.EVICT,
    "offload": ActionKind.DEMOTE,
    "prefetch": ActionKind.PREFETCH,
}


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """One cache edit; [start, end) counts items of `target`, None is open on that side."""

    type: Literal["evict", "offload", "prefetch"]
    target: Literal["session", "messages", "tools", "tokens"]
    start: int | None = None
    end: int | None = None
    release: Literal["now", "lazy"] | None = None


class CacheControl(msgspec.Struct, frozen=True, kw_only=True):
    """Soft keep-alive of the session for `ttl_s` seconds."""

    type: Literal["ephemeral"]
    ttl_s: float


class AgentHint(msgspec.Struct, frozen=True, kw_only=True):
    """A validated `agent_hint`. `unknown_keys` are dotted, cut and bounded."""

    session_id: str
    parent_session_id: str | None = None
    manage_request: bool = False
    edits: tuple[Edit, ...] = ()
    expected_idle_s: float | None = None
    cache_control: CacheControl | None = None
    unknown_keys: tuple[str, ...] = ()


class _UnknownKeys:
    """Collects a bounded number of unknown keys over one hint."""

    def __init__(self, limits: HintLimits) -> None:
        self._max = limits.max_unknown_keys
        self.keys: dict[str, None] = {}

    def note(self, value: dict[object, object], known: tuple[str, ...], prefix: str) -> None:
        for key in value:
            if len(self.keys) >= self._max:
                return
            if key not in known:
                name = key[:_UNKNOWN_KEY_CHARS] if isinstance(key, str) else "<not a string>"
                self.keys[prefix + name] = None


def is_manage(raw: object) -> bool:
    """Cheap peek, valid on malformed hints too: does this ask for management only?

    True iff `raw` is a dict whose `context_management` is a dict with
    `manage_request is True`. Such a request must never generate.
    """
    if not isinstance(raw, dict):
        return False
    management = raw.get("context_management")
    return isinstance(management, dict) and management.get("manage_request") is True


def parse_agent_hint(raw: object, limits: HintLimits = DEFAULT_LIMITS) -> AgentHint:
    """Validate the `agent_hint` of a request body.

    A null value of an optional key counts as absent. Raises HintError on anything the
    protocol calls malformed; unknown keys are no error, they are listed.
    """
    hint = check_object(raw, limits, "agent_hint", HintReason.NOT_AN_OBJECT)
    unknown = _UnknownKeys(limits)
    unknown.note(hint, _HINT_KEYS, "")
    session_id = check_id(
        hint.get("session_id"), limits.max_id_bytes, "session_id", HintReason.BAD_SESSION_ID
    )
    parent = hint.get("parent_session_id")
    if parent is not None:
        parent = check_id(
            parent, limits.max_id_bytes, "parent_session_id", HintReason.BAD_PARENT_SESSION_ID
        )
    manage_request, edits = _parse_management(hint.get("context_management"), limits, unknown)
    idle = hint.get("expected_idle_s")
    if idle is not None:
        idle = check_number(
            idle, 0, limits.max_expected_idle_s, "expected_idle_s", HintReason.BAD_NUMBER
        )
    return AgentHint(
        session_id=session_id,
        parent_session_id=parent,
        manage_request=manage_request,
        edits=edits,
        expected_idle_s=idle,
        cache_control=_parse_cache_control(hint.get("cache_control"), limits, unknown),
        unknown_keys=tuple(unknown.keys),
    )


def _parse_management(
    raw: object, limits: HintLimits, unknown: _UnknownKeys
) -> tuple[bool, tuple[Edit, ...]]:
    if raw is None:
        return False, ()
    where = "context_management"
    management = check_object(raw, limits, where, HintReason.BAD_CONTEXT_MANAGEMENT)
    unknown.note(management, _MANAGEMENT_KEYS, "context_management.")
    manage_request = management.get("manage_request")
    if manage_request is None:
        manage_request = False
    if not isinstance(manage_request, bool):
        raise HintError(
            HintReason.BAD_MANAGE_REQUEST,
            f"manage_request: expected a boolean, got {shape_of(manage_request)}",
        )
    edits = management.get("edits")
    if edits is None:
        return manage_request, ()
    if not isinstance(edits, (list, tuple)):
        raise HintError(
            HintReason.BAD_EDITS, f"edits: expected an array, got {shape_of(edits)}"
        )
    if len(edits) > limits.max_edits:
        raise HintError(
            HintReason.TOO_MANY_EDITS, f"edits: {len(edits)}, at most {limits.max_edits}"
        )
    parsed = [_parse_edit(edit, i, limits, unknown) for i, edit in enumerate(edits)]
    return manage_request, tuple(parsed)


def _parse_edit(raw: object, i: int, limits: HintLimits, unknown: _UnknownKeys) -> Edit:
    where = f"edits[{i}]"
    edit = check_object(raw, limits, where, HintReason.BAD_EDIT)
    unknown.note(edit, _EDIT_KEYS, "context_management.edits.")
    edit_type = check_choice(
        edit.get("type"), EDIT_TYPES, f"{where}.type", HintReason.BAD_EDIT_TYPE
    )
    target = check_choice(
        edit.get("target"), EDIT_TARGETS, f"{where}.target", HintReason.BAD_EDIT_TARGET
    )
    start, end = check_range(edit, target, limits, where)
    release = edit.get("release")
    if release is not None:
        release = check_choice(release, RELEASES, f"{where}.release", HintReason.BAD_RELEASE)
    return Edit(type=edit_type, target=target, start=start, end=end, release=release)


def _parse_cache_control(
    raw: object, limits: HintLimits, unknown: _UnknownKeys
) -> CacheControl | None:
    if raw is None:
        return None
    control = check_object(raw, limits, "cache_control", HintReason.BAD_CACHE_CONTROL)
    unknown.note(control, _CACHE_CONTROL_KEYS, "cache_control.")
    kind = check_choice(
        control.get("type"), ("ephemeral",), "cache_control.type", HintReason.BAD_CACHE_CONTROL
    )
    ttl = control.get("ttl")
    if ttl is None:
        return CacheControl(type=kind, ttl_s=limits.default_ttl_s)
    ttl_s = check_number(ttl, 0, limits.max_ttl_s, "cache_control.ttl", HintReason.BAD_NUMBER)
    return CacheControl(type=kind, ttl_s=ttl_s)


def lower(
    hint: AgentHint, *, message_id: str, now_s: float, tenant: str, manage_only: bool
) -> dict[str, Any]:
    """Return the hint as a plain dict of the shape of upstream's KvHintsEnvelope.

    Order: bind, expect, retain, then the edits as sent; ids `a0, a1, ...`. `now_s` is
    the message time stamp in seconds that all ranks will use as logical time.

    A manage-only request carries no bind: it opens, resurrects and re-parents nothing.
    Its self-parent means scope "subtree" for edits on the whole session. A range
    belongs to one session's branch, so it always has scope "session".
    """
    base: dict[str, Any] = {"session_id": hint.session_id, "tenant": tenant, "time_s": now_s}
    if hint.parent_session_id is not None:
        base["parent_session_id"] = hint.parent_session_id
    whole = {"target": "session", "scope": "session"}
    steps: list[tuple[ActionKind, dict[str, Any]]] = []
    if not manage_only:
        steps.append((ActionKind.BIND, base | whole))
    if hint.expected_idle_s is not None:
        extra = {"expected_idle_s": hint.expected_idle_s}
        steps.append((ActionKind.EXPECT, base | whole | extra))
    if hint.cache_control is not None:
        steps.append((ActionKind.RETAIN, base | whole | {"ttl_s": hint.cache_control.ttl_s}))
    self_parent = manage_only and hint.parent_session_id == hint.session_id
    for edit in hint.edits:
        steps.append((_KIND_OF_EDIT[edit.type], base | _edit_payload(edit, self_parent)))
    return {
        "protocol_version": PROTOCOL_VERSION,
        "message_id": message_id,
        "actions": [
            {
                "action_id": f"a{i}",
                "action_type": kind.value,
                "action_version": ACTION_VERSION,
                "payload": payload,
            }
            for i, (kind, payload) in enumerate(steps)
        ],
    }


def _edit_payload(edit: Edit, self_parent: bool) -> dict[str, Any]:
    cascades = edit.target == "session" and (self_parent or edit.type == "evict")
    payload: dict[str, Any] = {
        "target": edit.target,
        "scope": "subtree" if cascades else "session",
    }
    for name in ("start", "end", "release"):
        value = getattr(edit, name)
        if value is not None:
            payload[name] = value
    if edit.target == "tokens":
        payload["source"] = "tokens"
    return payload
