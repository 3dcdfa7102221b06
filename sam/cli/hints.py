"""A hint from the command line: its envelope, and the wait for its outcome.

Owns the way from options to `POST /kv_hints`, and which outcome gives which exit code. Must
never send what the server would only half understand: what can be checked here is.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from sam.cli.errors import CliError, Exit
from sam.cli.server import Server
from sam.core.actions import ACTION_VERSION, PROTOCOL_VERSION, ActionKind, ActionStatus

OPEN = (ActionStatus.ACCEPTED, ActionStatus.DEFERRED)
KINDS = {
    "offload": ActionKind.DEMOTE,
    "prefetch": ActionKind.PREFETCH,
    "evict": ActionKind.EVICT,
    "retain": ActionKind.RETAIN,
    "expect": ActionKind.EXPECT,
}
REMEDIES = {
    "unknown_session": "no such session of this API key; 'sam sessions' lists all",
    "not_live": "the session has ended; its next request opens it again",
    "not_cached": "nothing of it is cached where the hint points",
    "overloaded": "too many hints wait; try again",
    "rate_limited": "this owner sends too many hints; see --sam-hint-rate-per-s",
    "over_share": "this owner has as much retained as it may",
    "node_boundary": "the tree could be cut only elsewhere; see the span",
    "what_follows_too": "a prefix tree has no holes: what follows the range went along",
    "less_than_a_page": "nothing is left of the range after alignment to pages",
}
_POLL_S = (0.05, 0.5)
_NOT_OF_THE_PROMPT = ("agent_hint", "kv_hints", "stream", "stream_options")


class Range(NamedTuple):
    """Half-open, 0-based; None is open on that side."""

    target: str
    start: int | None
    end: int | None


def parse_range(target: str, text: str) -> Range:
    """`a:b`, `a:`, `:b` or `:`. Raises CliError."""
    parts = text.split(":")
    if len(parts) == 2 and all(part == "" or part.isdecimal() for part in parts):
        start, end = (int(part) if part else None for part in parts)
        if end is None or (start or 0) < end:
            return Range(target, start, end)
    wanted = "start:end, half-open, from 0; either side may be left out"
    raise CliError(Exit.USAGE, f"--{target} {text!r} is no range", wanted)


def one_range(**given: str | None) -> Range | None:
    """The range among `messages`, `tools` and `tokens`, of which one may be given."""
    ranges = [parse_range(name, text) for name, text in given.items() if text is not None]
    if len(ranges) > 1:
        names = " and ".join(f"--{one.target}" for one in ranges)
        raise CliError(Exit.USAGE, f"{names} together", "one range a hint; send two hints")
    return ranges[0] if ranges else None


def read_body(path: Path | None, span: Range | None) -> dict[str, Any]:
    """The chat request whose lists a range counts; `-` is standard input. Raises CliError."""
    if span is None or span.target == "tokens":
        if path is not None:
            raise CliError(Exit.USAGE, "--body goes with --messages or --tools only")
        return {}
    if path is None:
        text = f"--{span.target} counts the {span.target} of a request, and none was given"
        raise CliError(
            Exit.USAGE, text, "add --body FILE: a chat request as JSON; '-' is standard input"
        )
    try:
        body = json.loads(sys.stdin.read() if str(path) == "-" else path.read_text())
    except (OSError, ValueError) as error:
        raise CliError(Exit.USAGE, f"--body {path}: {error}") from None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise CliError(Exit.USAGE, f"--body {path} is no chat request: it has no messages")
    if span.target == "tools" and not body.get("tools"):
        raise CliError(Exit.USAGE, f"--body {path} has no tools")
    kept = {name: value for name, value in body.items() if name not in _NOT_OF_THE_PROMPT}
    return {"model": "default"} | kept


def envelope_of(kind: str, session_id: str, span: Range | None, **extra: object) -> dict[str, Any]:
    """One action in an envelope with a fresh message id; None values are left out."""
    payload: dict[str, Any] = {"session_id": session_id}
    payload |= {name: value for name, value in extra.items() if value is not None}
    if span is not None:
        payload["target"] = span.target
        ends = {"start": span.start, "end": span.end}
        payload |= {name: value for name, value in ends.items() if value is not None}
    action = {
        "action_id": "a0",
        "action_type": KINDS[kind].value,
        "action_version": ACTION_VERSION,
        "payload": payload,
    }
    return {
        "protocol_version": PROTOCOL_VERSION,
        "message_id": f"cli-{uuid.uuid4().hex}",
        "actions": [action],
    }


def is_open(message: dict[str, Any]) -> bool:
    return any(action["status"] in OPEN for action in message["actions"])


def send(
    server: Server,
    body: dict[str, Any],
    wait_s: float,
    on_news: Callable[[dict[str, Any]], None] = lambda message: None,
) -> dict[str, Any]:
    """Send, then ask until each outcome is final or `wait_s` is over; the last answer.

    `on_news` gets every answer. Raises CliError.
    """
    names = {name: body.get(name) for name in ("cache_salt", "extra_key")}
    message: dict[str, Any] = server.post("/kv_hints", body)
    on_news(message)
    path = f"/kv_hints/{quote(message['message_id'], safe='')}"
    pause_s, deadline = _POLL_S[0], time.monotonic() + wait_s
    while is_open(message) and (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _POLL_S[1])
        message = server.get(path, **names)
        on_news(message)
    return message


def exit_of(message: dict[str, Any]) -> Exit:
    """The exit code that these outcomes give."""
    statuses = {action["status"] for action in message["actions"]}
    if statuses & {*OPEN}:
        return Exit.PENDING
    if ActionStatus.MISSING in statuses:
        return Exit.UNKNOWN
    good = {ActionStatus.DONE, ActionStatus.CLIPPED}
    return Exit.OK if statuses <= good and statuses else Exit.FINDING
