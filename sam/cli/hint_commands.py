"""Commands that send a hint: offload, prefetch, evict, retain, expect.

Owns their options and how the wait for the outcome is shown. Must never generate tokens.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sam.cli import hints, output
from sam.cli.options import DEFAULT_URL, ApiKey, Json, SessionId, Timeout, Url
from sam.cli.server import Server
from sam.cli.views import outcome_table

hint_app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


class Release(StrEnum):
    LAZY = "lazy"
    NOW = "now"


Messages = Annotated[
    str | None,
    typer.Option(metavar="A:B", help="Only these messages of --body; half-open, A: is to the end."),
]
Tools = Annotated[str | None, typer.Option(metavar="A:B", help="Only these tools of --body.")]
Tokens = Annotated[
    str | None, typer.Option(metavar="A:B", help="Only these tokens of the session's branch.")
]
Body = Annotated[
    Path | None,
    typer.Option(help="Chat request as JSON whose items a range counts; `-`: standard input."),
]
Subtree = Annotated[bool, typer.Option("--subtree", help="The sessions below it as well.")]
Wait = Annotated[
    float, typer.Option("--wait", min=0, help="Seconds to wait for the outcome; 0: do not.")
]
CacheSalt = Annotated[
    str | None, typer.Option("--cache-salt", help="As in the session's own requests.")
]
ExtraKey = Annotated[
    str | None, typer.Option("--extra-key", help="As in the session's own requests.")
]


@hint_app.command()
def offload(
    session_id: SessionId,
    messages: Messages = None,
    tools: Tools = None,
    tokens: Tokens = None,
    body: Body = None,
    release: Annotated[
        Release | None, typer.Option(help="Free the device copy at once, or under pressure.")
    ] = None,
    subtree: Subtree = False,
    cache_salt: CacheSalt = None,
    extra_key: ExtraKey = None,
    wait: Wait = 30.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Move a session, or a range of it, from device to host memory."""
    span = hints.one_range(messages=messages, tools=tools, tokens=tokens)
    extra = {"release": release and release.value, "scope": "subtree" if subtree else None}
    request = _request("offload", session_id, span, body, cache_salt, extra_key, **extra)
    _send(Server(url, api_key, timeout), request, wait, as_json)


@hint_app.command()
def prefetch(
    session_id: SessionId,
    messages: Messages = None,
    tools: Tools = None,
    tokens: Tokens = None,
    body: Body = None,
    subtree: Subtree = False,
    cache_salt: CacheSalt = None,
    extra_key: ExtraKey = None,
    wait: Wait = 30.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Bring a session, or a range of it, back before it resumes."""
    span = hints.one_range(messages=messages, tools=tools, tokens=tokens)
    scope = "subtree" if subtree else None
    request = _request("prefetch", session_id, span, body, cache_salt, extra_key, scope=scope)
    _send(Server(url, api_key, timeout), request, wait, as_json)


@hint_app.command()
def evict(
    session_id: SessionId,
    messages: Messages = None,
    tools: Tools = None,
    tokens: Tokens = None,
    body: Body = None,
    cache_salt: CacheSalt = None,
    extra_key: ExtraKey = None,
    wait: Wait = 30.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """End a session and those below it, or drop a range: what nobody else uses is freed."""
    span = hints.one_range(messages=messages, tools=tools, tokens=tokens)
    request = _request("evict", session_id, span, body, cache_salt, extra_key)
    _send(Server(url, api_key, timeout), request, wait, as_json)


@hint_app.command()
def retain(
    session_id: SessionId,
    ttl: Annotated[float, typer.Option(min=0, max=3_600, help="Seconds; 0 ends it.")] = 300.0,
    cache_salt: CacheSalt = None,
    extra_key: ExtraKey = None,
    wait: Wait = 30.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Keep a session as long as there is a choice: an order, no lock."""
    request = _request("retain", session_id, None, None, cache_salt, extra_key, ttl_s=ttl)
    _send(Server(url, api_key, timeout), request, wait, as_json)


@hint_app.command()
def expect(
    session_id: SessionId,
    idle: Annotated[
        float,
        typer.Option(
            "--idle", min=0, max=86_400, help="Seconds from its last answer to its next request."
        ),
    ],
    cache_salt: CacheSalt = None,
    extra_key: ExtraKey = None,
    wait: Wait = 30.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Say when a session comes back: places it in the order of eviction."""
    request = _request(
        "expect", session_id, None, None, cache_salt, extra_key, expected_idle_s=idle
    )
    _send(Server(url, api_key, timeout), request, wait, as_json)


def _request(
    kind: str,
    session_id: str,
    span: hints.Range | None,
    body: Path | None,
    cache_salt: str | None,
    extra_key: str | None,
    **payload: object,
) -> dict[str, Any]:
    """The body of `POST /kv_hints`."""
    names = {"cache_salt": cache_salt, "extra_key": extra_key}
    given = {name: value for name, value in names.items() if value is not None}
    envelope = hints.envelope_of(kind, session_id, span, **payload)
    return hints.read_body(body, span) | given | envelope


def _send(server: Server, request: dict[str, Any], wait_s: float, as_json: bool) -> None:
    if as_json:
        message = hints.send(server, request, wait_s)
        output.print_json(message)
    else:
        message = _send_with_progress(server, request, wait_s)
        output.console().print(outcome_table(message))
    raise typer.Exit(int(hints.exit_of(message)))


def _send_with_progress(server: Server, request: dict[str, Any], wait_s: float) -> dict[str, Any]:
    with output.console(stderr=True).status("sending") as status:

        def show(message: dict[str, Any]) -> None:
            if hints.is_open(message):
                states = ", ".join(action["status"] for action in message["actions"])
                status.update(f"{states}; waiting for the outcome (Ctrl-C leaves it to the server)")

        return hints.send(server, request, wait_s, show)
