"""The tool wait: an answer that calls a tool says so to the scheduler, which sees only tokens.

Owns the hooks on upstream's chat handler and what they read of an answer. Must never change,
delay or fail the answer, nor wrap a stream that belongs to no session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from sam.core.actions import ACTION_VERSION, ActionKind
from sam.core.gaps import FINISH_TOOL_CALLS
from sam.srt.managers.bindings import ANSWERED_ACTION

logger = logging.getLogger(__name__)

HANDLER = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_MAX_NAME_CHARS = 128
# Inside a JSON string the quotes have a backslash before them: these can only be keys.
_CALLS = re.compile(r'"tool_calls":\s*\[')
_ENDS = re.compile(r'"finish_reason":\s*"tool_calls"')
_installed = False


def install_tool_wait() -> None:
    """Hook upstream's chat handler, once; call before the server takes requests."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    global _installed
    if _installed:
        return
    _installed = True
    whole, stream = "_handle_non_streaming_request", "_generate_chat_stream"
    HookRegistry.register(f"{HANDLER}.{whole}", _around_answer, HookType.AROUND)
    HookRegistry.register(f"{HANDLER}.{stream}", _around_stream, HookType.AROUND)
    HookRegistry.apply_hooks()


async def _around_answer(
    original: Any, handler: Any, adapted_request: Any, request: Any, raw_request: Any
) -> Any:
    response = await original(handler, adapted_request, request, raw_request)
    dispatch = _dispatch_of(handler, adapted_request)
    for choice in getattr(response, "choices", ()) if dispatch is not None else ():
        if choice.finish_reason == FINISH_TOOL_CALLS:
            calls = choice.message.tool_calls or []
            _tell_soon(dispatch, adapted_request, next(map(_name_of, calls), None))
            break
    return response


def _around_stream(
    original: Any, handler: Any, adapted_request: Any, request: Any, raw_request: Any
) -> AsyncIterator[str]:
    chunks = original(handler, adapted_request, request, raw_request)
    dispatch = _dispatch_of(handler, adapted_request)
    return chunks if dispatch is None else _watched(chunks, dispatch, adapted_request)


async def _watched(chunks: Any, dispatch: Any, obj: Any) -> AsyncIterator[str]:
    answer = StreamedAnswer()
    async with aclosing(chunks):
        async for chunk in chunks:
            if answer.ends_with_calls(chunk):
                _tell_soon(dispatch, obj, answer.tool_name)
            yield chunk


class StreamedAnswer:
    """What the client reads, as server-sent events: the first call's name, and the end."""

    __slots__ = ("_told", "tool_name")

    def __init__(self) -> None:
        self.tool_name: str | None = None
        self._told = False

    def ends_with_calls(self, chunk: str) -> bool:
        """Whether this event, of all that came, is the first to end an answer with calls."""
        if self.tool_name is None and _CALLS.search(chunk):
            self.tool_name = _streamed_name(chunk)
        if self._told or not _ENDS.search(chunk):
            return False
        self._told = True
        return True


def _streamed_name(event: str) -> str | None:
    try:
        choices = json.loads(event.removeprefix("data: "))["choices"]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
        return next((name for call in calls if (name := call["function"].get("name"))), None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _name_of(call: Any) -> str | None:
    return call.function.name


def _dispatch_of(handler: Any, obj: Any) -> Any | None:
    """Whom to tell about the answer, or None where it can belong to no session."""
    ingress = handler.tokenizer_manager.kv_hint_ingress
    hinted = (obj.agent_hint, obj.kv_hints, obj.session_id)
    return None if ingress is None or hinted == (None, None, None) else ingress.dispatch


def _tell_soon(dispatch: Any, obj: Any, tool_name: str | None) -> None:
    """Tell after the part of the answer at hand is on its way, and before the event loop reads
    another request: the session's next one cannot overtake it."""
    asyncio.get_running_loop().call_soon(_tell, dispatch, obj, tool_name, time.time())


def _tell(dispatch: Any, obj: Any, tool_name: str | None, time_s: float) -> None:
    try:
        session = _bound_session(obj.kv_hints)
        if session is None:
            return
        payload = {
            **session,
            "time_s": time_s,
            "finish_reason": FINISH_TOOL_CALLS,
            "tool_name": tool_name[:_MAX_NAME_CHARS] if tool_name else None,
        }
        action = {
            "action_id": "answered",
            "action_type": ANSWERED_ACTION,
            "action_version": ACTION_VERSION,
            "payload": payload,
        }
        dispatch.tell(session["tenant"], action)
    except Exception:
        logger.exception("sam: a tool wait could not be reported")


def _bound_session(envelopes: Any) -> dict[str, str] | None:
    """`session_id` and `tenant` that the request was bound to, as the scheduler got them."""
    envelope = envelopes[0] if isinstance(envelopes, list) else envelopes
    for action in envelope.actions if envelope is not None else ():
        if action.action_type == ActionKind.BIND:
            return {name: action.payload[name] for name in ("session_id", "tenant")}
    return None
