"""Release mode: what clients older than `agent_hint` send, as the same hints.

Owns the reading of `POST /release_kv_cache` bodies and the mark of such a client's inference.
Must never take another namespace than the body's own `cache_salt`.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sam.core.validation import DEFAULT_LIMITS, HintError, HintReason, check_index

_INDEXES = {
    "messages": "messages_released_index",
    "tools": "tools_released_index",
}
_HINTS = ("agent_hint", "kv_hints", "protocol_version", "message_id", "actions")
# A quote inside a JSON string has a backslash before it: this can only be a key.
_CACHE_SHARING = re.compile(rb'(?<!\\)"cache_sharing"\s*:\s*true')


async def is_release_mode(raw_request: Any) -> bool:
    """Whether an inference says that its `cache_salt` names a session (`cache_sharing`).

    Reads the body that FastAPI keeps; upstream's request model drops the field.
    """
    if raw_request is None:
        return False
    return _CACHE_SHARING.search(await raw_request.body()) is not None


def release_hint(body: dict[str, Any]) -> dict[str, Any]:
    """The `agent_hint` of a release: evict from the given indexes on, of the session that the
    body's own hint names, else of the one named `cache_salt`. Raises HintError."""
    edits = []
    for target, name in _INDEXES.items():
        items = body.get(target)
        start = check_index(body.get(name), DEFAULT_LIMITS, name)
        if start is not None and start < len(items if isinstance(items, list) else ()):
            edits.append({"type": "evict", "target": target, "start": start})
    if not edits:
        raise HintError(HintReason.EMPTY_RANGE, "no message or tool from the given index on")
    own = body.get("agent_hint")
    session_id = own.get("session_id") if isinstance(own, dict) else body.get("cache_salt")
    return {
        "session_id": session_id,
        "context_management": {"manage_request": True, "edits": edits},
    }


def chat_request(body: dict[str, Any]) -> ChatCompletionRequest:
    """The chat request whose lists the indexes count. Raises HintError."""
    fields = {k: v for k, v in body.items() if k not in _HINTS}
    try:
        return ChatCompletionRequest(**fields)
    except (ValidationError, ValueError, TypeError, AttributeError) as error:
        raise HintError(HintReason.UNRESOLVABLE_RANGE, str(error)) from None
