"""From actions on messages and tools to actions on tokens, for one chat request.

Owns which ranges are refused at once, and the payload of those that are resolved. Must never
run on the event loop where it renders (`resolve`), nor answer anything but a span or a reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from sam.core.actions import ACTION_VERSION, ActionKind, parse_action
from sam.core.ranges import RangeResolver, Unrenderable, clamp_range
from sam.core.validation import HintError, HintReason
from sam.srt.entrypoints.rendering import ChatWindow

logger = logging.getLogger(__name__)

MAX_BOUNDARIES = 8
"""Renderings that one request may cost, beside that of the whole window."""
_ITEMS = ("messages", "tools")
_EDITS = (ActionKind.EVICT, ActionKind.DEMOTE, ActionKind.PREFETCH)


class ChatBody:
    """A chat request and the handler that would serve it; ranges index its lists."""

    __slots__ = ("handler", "n_items", "request")

    def __init__(self, handler: Any, request: Any) -> None:
        self.handler = handler
        self.request = request
        self.n_items = {
            "messages": len(request.messages or ()),
            "tools": len(request.tools or ()),
        }


def is_range(action: dict[str, Any]) -> bool:
    """Whether the action is an edit that still counts messages or tools."""
    if action["action_type"] not in _EDITS or action["action_version"] != ACTION_VERSION:
        return False
    payload = action["payload"]
    return isinstance(payload, dict) and payload.get("target") in _ITEMS


def refuse(actions: Iterable[dict[str, Any]], body: ChatBody | None) -> dict[str, HintError]:
    """Ranges that need no rendering to be refused, by action id: malformed, no lists to index,
    nothing selected, too many."""
    refused: dict[str, HintError] = {}
    boundaries: set[tuple[str, int]] = set()
    for action in filter(is_range, actions):
        try:
            boundaries |= _boundaries(action, body)
            if len(boundaries) > MAX_BOUNDARIES:
                detail = f"more than {MAX_BOUNDARIES} different boundaries"
                raise HintError(HintReason.TOO_MANY_EDITS, detail)
        except HintError as error:
            refused[action["action_id"]] = error
    return refused


def _boundaries(action: dict[str, Any], body: ChatBody | None) -> set[tuple[str, int]]:
    parsed = parse_action(action)
    target = parsed.target
    if body is None:
        detail = f"{target}: this request has none"
        raise HintError(HintReason.UNSUPPORTED_TARGET, detail)
    n_items = body.n_items[target]
    first, last = clamp_range(parsed.start, parsed.end, n_items)
    cut_short = target == "messages" and last < n_items
    return {(target, first)} | ({(target, last)} if cut_short else set())


def resolve(
    actions: list[dict[str, Any]], body: ChatBody | None, tokens: list[int] | None = None
) -> list[dict[str, Any] | HintError]:
    """Each action, on tokens now, or why not; others than ranges as they are.

    `tokens` are those of the whole window, where they are known already.
    """
    if body is None:
        return list(actions)
    window = ChatWindow(body.handler, body.request, tokens)
    resolver = RangeResolver(
        window, n_messages=body.n_items["messages"], n_tools=body.n_items["tools"]
    )
    return [_resolved(a, window, resolver) if is_range(a) else a for a in actions]


def _resolved(
    action: dict[str, Any], window: ChatWindow, resolver: RangeResolver
) -> dict[str, Any] | HintError:
    payload = action["payload"]
    target = payload["target"]
    try:
        span = resolver.resolve(target, payload.get("start"), payload.get("end"))
        namespace = window.namespace
    except HintError as error:
        return error
    except Unrenderable as error:
        return HintError(HintReason.UNRESOLVABLE_RANGE, str(error))
    except Exception:
        logger.exception("sam: a range could not be resolved")
        return HintError(HintReason.UNRESOLVABLE_RANGE, "internal error, see the server log")
    kept = {k: v for k, v in payload.items() if k not in ("target", "start", "end")}
    spanned = {"target": "tokens", "source": target, "start": span.start}
    if span.end is not None:
        spanned["end"] = span.end
    return action | {"payload": kept | spanned | {"token_ids": span.token_ids} | namespace}
