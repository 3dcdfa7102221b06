"""The live page at `/sam/`: its data, its commands, and its files before any key is asked for.

Owns the routes below `/sam/api/` and the way of the page's files past the API key check: a
browser cannot send a key with an address, and the files hold no secret. Must never answer data
without the key that `/sessions` asks for, nor pass on a command unless the operator allowed it.
"""

from __future__ import annotations

import ipaddress
import logging
import time
import uuid
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from fastapi import Body, Query, Request
from fastapi.responses import JSONResponse, Response
from sglang.srt.runtime_context import get_serving
from sglang.srt.utils.auth import AuthLevel, auth_level

from sam import web
from sam.core.actions import ActionKind
from sam.core.hints import PROTOCOL_VERSION
from sam.srt.entrypoints.envelopes import envelope_of
from sam.srt.entrypoints.ingress import AgentHintIngress
from sam.srt.entrypoints.page_feed import PageFeed

PREFIX = "/sam"
LIVE = f"{PREFIX}/api/live"
KINDS = {
    "offload": ActionKind.DEMOTE,
    "prefetch": ActionKind.PREFETCH,
    "evict": ActionKind.EVICT,
}
_METHODS = ("GET", "HEAD")


def install_page(app: Any, ingress: AgentHintIngress) -> None:
    """Add the page to the FastAPI application, once."""
    if any(getattr(route, "path", None) == LIVE for route in app.routes):
        return
    feed = PageFeed(lambda **payload: ingress.query("page", **payload))
    _install_files(app)
    _install_live(app, ingress, feed)
    _install_hints(app, ingress, feed)
    logging.getLogger("uvicorn.access").addFilter(_is_worth_a_line)


def _install_live(app: Any, ingress: AgentHintIngress, feed: PageFeed) -> None:
    @app.get(LIVE)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def live(
        request: Request,
        epoch: str = "",
        version: Annotated[int, Query(ge=0)] = 0,
        event: Annotated[int, Query(ge=0)] = 0,
        bucket_s: float = 0.0,
        tenant: str | None = None,
        session_id: str | None = None,
        since: int = 0,
    ) -> Response:
        """What changed since the viewer's last look, and the story of one session."""
        if _is_from_elsewhere(request):
            return _error(403, "the page reads this, no other site")
        key = None if tenant is None or session_id is None else (tenant, session_id)
        try:
            news = await feed.look(epoch, version, event, bucket_s, key, since)
        except TimeoutError:
            return _error(503, feed.problem or "the scheduler is busy")
        news["control"] = ingress.config.allow_control
        news["ingress"] = ingress.metrics.snapshot()
        return Response(msgspec.json.encode(news), media_type="application/json")


def _install_hints(app: Any, ingress: AgentHintIngress, feed: PageFeed) -> None:
    @app.post(f"{PREFIX}/api/hints")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def act(request: Request, body: Annotated[dict[str, Any], Body()]) -> JSONResponse:
        """Offload, prefetch or evict a session on its owner's behalf; what is below it goes
        along with an evict."""
        if _is_from_elsewhere(request):
            return _error(403, "the page sends this, no other site")
        if not ingress.config.allow_control:
            return _error(403, "read-only: the server was started without --sam-allow-control")
        if not _has_key() and not _is_local_name(request.url.hostname):
            return _error(403, "a server without a key is controlled by IP address or localhost")
        key = (str(body.get("tenant")), str(body.get("session_id")))
        kind = KINDS.get(str(body.get("action")))
        if kind is None or not feed.knows(key):
            return _error(404, "no such session, or no such action")
        action = {
            "action_id": "page",
            "action_type": kind.value,
            "action_version": PROTOCOL_VERSION,
            "payload": {"session_id": key[1]},
        }
        envelope = envelope_of(f"page-{uuid.uuid4().hex}", [action])
        return JSONResponse(ingress.submit_envelope(envelope, key[0], by_operator=True))

    @app.get(f"{PREFIX}/api/hints/{{message_id}}")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def outcome(request: Request, message_id: str, tenant: str) -> JSONResponse:
        """What became of it."""
        if _is_from_elsewhere(request):
            return _error(403, "the page reads this, no other site")
        known = ingress.results.get(message_id, tenant, time.time())
        return _error(404, "unknown message_id") if known is None else JSONResponse(known)


def _is_from_elsewhere(request: Request) -> bool:
    """Whether a browser sends this for a page of another site: SGLang lets any site ask. What
    the browser says counts, if it says it: a proxy may have put another name into `host`."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != request.headers.get("host")


def _has_key() -> bool:
    """Whether the server asks those who use the page for a key."""
    return bool(get_serving().api_key or get_serving().admin_api_key)


def _is_local_name(host: str | None) -> bool:
    """Whether no foreign name server can have brought a browser here under this name: where
    no key is asked for, a site whose name turns into our address would look like ours."""
    try:
        ipaddress.ip_address(host or "")
    except ValueError:
        return host == "localhost"
    return True


def _install_files(app: Any) -> None:
    """Put the files in front of all middleware, whatever is added until the start."""
    build = app.build_middleware_stack

    def build_with_files() -> Any:
        inner = build()

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            answer = _file_for(scope) if scope["type"] == "http" else None
            await (inner if answer is None else answer)(scope, receive, send)

        return serve

    app.build_middleware_stack = build_with_files


def _file_for(scope: Any) -> Response | None:
    """The answer to a request for one of the page's files, else None."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if scope["method"] not in _METHODS or not path.startswith(PREFIX):
        return None
    if path == PREFIX:
        return Response(status_code=307, headers={"location": "sam/"})
    found = web.find(path.removeprefix(f"{PREFIX}/")) if path.startswith(f"{PREFIX}/") else None
    if found is None:
        return None
    sent = dict(scope["headers"]).get(b"if-none-match", b"").decode("latin-1")
    if sent == found.headers["etag"]:
        return Response(status_code=304, headers=found.headers)
    body = found.body if scope["method"] == "GET" else b""
    return Response(body, headers=found.headers, media_type=found.media_type)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Not each look of each viewer, once a second, in the access log."""
    args = record.args
    if not isinstance(args, tuple) or len(args) < 5:
        return True
    return not (str(args[2]).startswith(LIVE) and args[4] == 200)


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
