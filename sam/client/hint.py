"""The `agent_hint` that this client puts into request bodies.

Owns its shape, and how it joins what the caller sends. Must never send a request, and must never
overwrite a key that the caller set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_EXPECTED_IDLE_S = 86_400.0


def idle_seconds(value: object) -> float | None:
    """`value` as seconds within 0..86400; None if it is no finite number. Never raises."""
    if isinstance(value, (bool, str, bytes, bytearray)):
        return None
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - the agent's own object, it may do anything
        return None
    return min(max(seconds, 0.0), MAX_EXPECTED_IDLE_S) if math.isfinite(seconds) else None


def agent_hint(
    session_id: str,
    parent_session_id: str | None = None,
    *,
    edits: Sequence[str | Mapping[str, Any]] = (),
    manage_only: bool = False,
    expected_idle_s: float | None = None,
) -> dict[str, Any]:
    """One hint. An edit is `evict`, `offload` or `prefetch` of the whole session, or the
    protocol's own object. `expected_idle_s` outside 0..86400 is moved there; one that is no
    finite number is left out."""
    hint: dict[str, Any] = {"session_id": session_id}
    if parent_session_id is not None:
        hint["parent_session_id"] = parent_session_id
    if edits or manage_only:
        hint["context_management"] = {
            "manage_request": manage_only,
            "edits": [
                {"type": edit, "target": "session"} if isinstance(edit, str) else dict(edit)
                for edit in edits
            ],
        }
    idle_s = None if expected_idle_s is None else idle_seconds(expected_idle_s)
    if idle_s is not None:
        hint["expected_idle_s"] = round(idle_s, 3)
    return hint


def with_hint(kwargs: Mapping[str, Any], hint: Mapping[str, Any]) -> dict[str, Any]:
    """`kwargs` of a `create` call with the hint in `extra_body`; nothing passed in is changed.

    Where the caller has an `agent_hint` of its own, its keys win; the rest is filled in. One that
    is no object is left as it is, and so is an `extra_body` that is none.
    """
    given = kwargs.get("extra_body") or {}
    if not isinstance(given, Mapping):
        return dict(kwargs)
    body = dict(given)
    own = body.get("agent_hint")
    if own is None:
        body["agent_hint"] = dict(hint)
    elif isinstance(own, Mapping):
        body["agent_hint"] = {**hint, **own}
    return {**kwargs, "extra_body": body}
