"""Bounded checks of untrusted hint values: limits, reasons, scalar checkers.

Owns the closed list of rejection reasons. Every check is O(1) in the size of a
rejected value (types and lengths before content) and never recurses, so that a
megabyte of nonsense costs what a typo costs. Must never raise anything but HintError.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import msgspec

MAX_DETAIL_CHARS = 200
TOKEN_BYTES = 4
_SHOWN_CHARS = 40


class HintReason(StrEnum):
    """Why a hint or an action was rejected. Low-cardinality: safe as a metric label."""

    NOT_AN_OBJECT = "not_an_object"
    TOO_MANY_KEYS = "too_many_keys"
    BAD_SESSION_ID = "bad_session_id"
    BAD_PARENT_SESSION_ID = "bad_parent_session_id"
    ID_TOO_LONG = "id_too_long"
    BAD_CONTEXT_MANAGEMENT = "bad_context_management"
    BAD_MANAGE_REQUEST = "bad_manage_request"
    BAD_EDITS = "bad_edits"
    TOO_MANY_EDITS = "too_many_edits"
    BAD_EDIT = "bad_edit"
    BAD_EDIT_TYPE = "bad_edit_type"
    BAD_EDIT_TARGET = "bad_edit_target"
    BAD_RANGE = "bad_range"
    BAD_RELEASE = "bad_release"
    BAD_NUMBER = "bad_number"
    BAD_CACHE_CONTROL = "bad_cache_control"
    BAD_ENVELOPE = "bad_envelope"
    BAD_ACTION = "bad_action"
    BAD_TENANT = "bad_tenant"
    BAD_SCOPE = "bad_scope"
    BAD_TIME = "bad_time"
    BAD_TOKENS = "bad_tokens"
    EMPTY_RANGE = "empty_range"
    UNRESOLVABLE_RANGE = "unresolvable_range"
    UNSUPPORTED_TARGET = "unsupported_target"


class HintError(ValueError):
    """A rejected hint or action.

    `reason` is one of HintReason; `detail` is for humans, at most 200 characters,
    and never echoes more than the head of a client's value.
    """

    def __init__(self, reason: HintReason, detail: str) -> None:
        self.reason = HintReason(reason)
        self.detail = detail[:MAX_DETAIL_CHARS]
        super().__init__(f"{self.reason.value}: {self.detail}")


class HintLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds of what a client may send; all inclusive. Bind, expect and retain may ride
    with the edits: `max_extra_actions`."""

    max_id_bytes: int = 512
    max_tenant_bytes: int = 2048
    max_edits: int = 64
    max_extra_actions: int = 3
    max_keys: int = 64
    max_unknown_keys: int = 16
    max_index: int = 2**31
    max_namespace_bytes: int = 65_536
    max_expected_idle_s: float = 86_400.0
    max_ttl_s: float = 3_600.0
    default_ttl_s: float = 300.0
    max_time_s: float = 1e11

    @property
    def max_actions(self) -> int:
        """Of one envelope."""
        return self.max_edits + self.max_extra_actions


DEFAULT_LIMITS = HintLimits()


def shape_of(value: object) -> str:
    """A short, bounded description of any value, for HintError.detail."""
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 64 else "int over 64 bits"
    if isinstance(value, str):
        head = repr(value[:_SHOWN_CHARS])
        return head if len(value) <= _SHOWN_CHARS else f"{head}... ({len(value)} characters)"
    if isinstance(value, (list, tuple, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__[:_SHOWN_CHARS]


def check_object(
    value: object, limits: HintLimits, where: str, reason: HintReason
) -> dict[object, object]:
    """Return `value` as a dict with a bounded number of keys, or raise HintError."""
    if not isinstance(value, dict):
        raise HintError(reason, f"{where}: expected an object, got {shape_of(value)}")
    if len(value) > limits.max_keys:
        raise HintError(
            HintReason.TOO_MANY_KEYS, f"{where}: {len(value)} keys, at most {limits.max_keys}"
        )
    return value


def check_id(value: object, limit_bytes: int, where: str, reason: HintReason) -> str:
    """Return a non-empty string of at most `limit_bytes` UTF-8 bytes, or raise HintError."""
    if not isinstance(value, str) or not value:
        raise HintError(reason, f"{where}: expected a non-empty string, got {shape_of(value)}")
    too_long = len(value) > limit_bytes
    if not too_long and not value.isascii():
        try:
            too_long = len(value.encode()) > limit_bytes
        except UnicodeEncodeError:
            raise HintError(reason, f"{where}: not encodable as UTF-8") from None
    if too_long:
        raise HintError(
            HintReason.ID_TOO_LONG,
            f"{where}: {len(value)} characters, over {limit_bytes} bytes",
        )
    return value


def check_number(
    value: object, low: float, high: float, where: str, reason: HintReason
) -> float:
    """Return a finite number in [low, high] as a float, or raise HintError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise HintError(reason, f"{where}: expected a number, got {shape_of(value)}")
    if (isinstance(value, float) and not math.isfinite(value)) or not low <= value <= high:
        raise HintError(reason, f"{where}: {shape_of(value)} is not in [{low:g}, {high:g}]")
    return float(value)


def check_index(value: object, limits: HintLimits, where: str) -> int | None:
    """Return None or an int in [0, max_index]; booleans and floats are refused."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise HintError(
            HintReason.BAD_RANGE, f"{where}: expected an integer, got {shape_of(value)}"
        )
    if not 0 <= value <= limits.max_index:
        raise HintError(
            HintReason.BAD_RANGE,
            f"{where}: {shape_of(value)} is not in [0, {limits.max_index}]",
        )
    return value


def check_range(
    value: dict[object, object], target: str, limits: HintLimits, where: str
) -> tuple[int | None, int | None]:
    """Return the half-open (start, end) of an edit or a payload.

    None means open on that side. A session target carries no range: honouring only
    the target would do more than was asked, so a range there is an error.
    """
    start = check_index(value.get("start"), limits, f"{where}.start")
    end = check_index(value.get("end"), limits, f"{where}.end")
    if target == "session" and (start is not None or end is not None):
        raise HintError(HintReason.BAD_RANGE, f"{where}: target session takes no range")
    if end is not None and (start or 0) >= end:
        raise HintError(HintReason.BAD_RANGE, f"{where}: start {start} >= end {end}")
    return start, end


def check_choice(
    value: object, choices: tuple[str, ...], where: str, reason: HintReason
) -> Any:
    """Return `value`, a string, if it is one of `choices`, or raise HintError."""
    if not isinstance(value, str) or value not in choices:
        raise HintError(
            reason, f"{where}: {shape_of(value)} is not one of {', '.join(choices)}"
        )
    return value


def check_tokens(value: object, n_tokens: int, limits: HintLimits, where: str) -> bytes | None:
    """Return None or at least `n_tokens` token ids as little-endian int32 bytes, or raise
    HintError."""
    if value is None:
        return None
    if not isinstance(value, bytes) or len(value) % TOKEN_BYTES:
        raise HintError(
            HintReason.BAD_TOKENS, f"{where}: expected int32 bytes, got {shape_of(value)}"
        )
    found = len(value) // TOKEN_BYTES
    if not n_tokens <= found <= limits.max_index:
        detail = f"{where}: {found} tokens, expected at least {n_tokens}"
        raise HintError(HintReason.BAD_TOKENS, detail)
    return value
