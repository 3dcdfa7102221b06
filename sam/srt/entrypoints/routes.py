"""Inspection and hint routes on SGLang's own HTTP server.

Owns `GET /sessions`, `GET /sessions/tree`, `POST /kv_hints`, `GET /kv_hints/{id}` and
`POST /release_kv_cache`. Must never block the event loop, nor answer for another tenant's
message.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import Body, Query, Request
from fastapi.responses import JSONResponse
from sglang.srt.utils.auth import AuthLevel, auth_level

from sam.core.validation import HintError, HintReason, shape_of
from sam.srt.entrypoints.ingress import AgentHintIngress
from sam.srt.entrypoints.release import chat_request
from sam.srt.entrypoints.spans import ChatBody
from sam.srt.entrypoints.tenant import tenant_of


def install_routes(app: Any, ingress: AgentHintIngress) -> None:
    """Add the routes to the FastAPI application, once."""
    if any(getattr(route, "path", None) == "/sessions" for route in app.routes):
        return

    @app.get("/sessions")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def sessions(
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> JSONResponse:
        """Sessions of this server, one page: state, lineage, tokens per tier."""
        return await _ask(ingress, "sessions", offset=offset, limit=limit)

    @app.get("/sessions/tree")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def sessions_tree(
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> JSONResponse:
        """The radix tree node by node: tokens per tier, owners, retention class, locks."""
        return await _ask(ingress, "tree", limit=limit)

    @app.post("/kv_hints")
    async def submit_kv_hints(
        request: Request, envelope: Annotated[Any, Body()] = None
    ) -> JSONResponse:
        """Take an envelope without inference; answered at once, executed asynchronously. Its
        ranges index `messages` and `tools` of the same body."""
        if not isinstance(envelope, dict):
            return _refused(ingress, _no_object(envelope), tenant_of(request))
        tenant = tenant_of(request, envelope.get("cache_salt"), envelope.get("extra_key"))
        body = None
        try:
            if envelope.get("messages"):
                handler = request.app.state.openai_serving_chat
                body = ChatBody(handler, chat_request(envelope))
            return JSONResponse(ingress.submit_envelope(envelope, tenant, body))
        except HintError as error:
            return _refused(ingress, error, tenant)

    @app.get("/kv_hints/{message_id:path}")
    async def kv_hint_results(
        request: Request,
        message_id: str,
        cache_salt: str | None = None,
        extra_key: str | None = None,
    ) -> JSONResponse:
        """Outcomes of one message, for its sender."""
        tenant = tenant_of(request, cache_salt, extra_key)
        known = ingress.results.get(message_id, tenant, time.time())
        if known is None:
            return _error(404, "unknown message_id, or its outcome is no longer kept")
        return JSONResponse(known)

    @app.post("/release_kv_cache")
    @app.post("/v1/release_kv_cache")
    async def release_kv_cache(
        request: Request, body: Annotated[Any, Body()] = None
    ) -> JSONResponse:
        """Evict from an index on, as clients older than `agent_hint` ask for it."""
        if not isinstance(body, dict):
            return _refused(ingress, _no_object(body), tenant_of(request), nested=True)
        tenant = tenant_of(request, body.get("cache_salt"), body.get("extra_key"))
        handler = request.app.state.openai_serving_chat
        try:
            return JSONResponse(ingress.release(handler, body, tenant))
        except HintError as error:
            return _error(400, str(error))


async def _ask(ingress: AgentHintIngress, what: str, **payload: int) -> JSONResponse:
    try:
        report = await ingress.query(what, **payload)
    except TimeoutError:
        return _error(503, "the scheduler is busy; try again")
    if what == "sessions":
        report["ingress"] = ingress.metrics.snapshot()
    return JSONResponse(report)


def _no_object(body: object) -> HintError:
    remedy = " (send Content-Type: application/json)" if isinstance(body, bytes) else ""
    text = f"body: expected an object, got {shape_of(body)}{remedy}"
    return HintError(HintReason.NOT_AN_OBJECT, text)


def _refused(
    ingress: AgentHintIngress, error: HintError, tenant: str, *, nested: bool = False
) -> JSONResponse:
    """200 with the reason, so that no client takes it for a failure; 400 for strict hints.
    `nested`: as the field `kv_hints`."""
    try:
        shown = ingress.refused(error, tenant)
    except HintError:
        return _error(400, str(error))
    return JSONResponse({"kv_hints": shown} if nested else shown)


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
