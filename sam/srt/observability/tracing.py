"""What SGLang's own OpenTelemetry spans say of sessions, on servers with `--enable-trace`.

Owns the names of the attributes. Must never start a span, nor cost anything on servers that do
not trace: these subclasses are made only where tracing is on. Session ids are on spans as the
client sent them, so that a trace leads to `sam session ID`; API keys and tenants never are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sam.core.actions import ActionKind
from sam.core.sessions import SessionState
from sam.srt.entrypoints.ingress import AgentHintIngress
from sam.srt.managers.bindings import binding_of
from sam.srt.mem_cache.cache import SessionRadixCache

SESSION_ID = "gen_ai.conversation.id"
PARENT_ID = "sam.session.parent_id"
CACHED = "sam.cached_tokens"
HINTS = "sam.hints"
STATE = "sam.session.state"
TIERS = ("device", "host", "storage")


class TracedIngress(AgentHintIngress):
    """Names the session, its hints and the tokens found cached on a request's root span."""

    def _finish(self, obj: Any, meta_info: dict[str, Any]) -> None:
        super()._finish(obj, meta_info)
        state = self._manager.rid_to_state.get(obj.rid)
        if state is not None and state.time_stats.trace_ctx.tracing_enable:
            attributes = request_attributes(getattr(obj, "kv_hints", None), meta_info)
            state.time_stats.trace_ctx.trace_set_root_attrs(attributes)


class TracedRadixCache(SessionRadixCache):
    """Says on the scheduler's span of a request in which state it finds its session."""

    def on_request_queued(self, req: Any, *, is_retracted: bool) -> None:
        trace = req.time_stats.trace_ctx
        if trace.tracing_enable and not is_retracted:
            self._guard(self._name_state, req, trace)
        super().on_request_queued(req, is_retracted=is_retracted)

    def _name_state(self, req: Any, trace: Any) -> None:
        binding = binding_of(req)
        if binding is not None and binding.key is not None:
            session = self.hints.table.get(binding.key)
            trace.trace_set_thread_attrs({STATE: state_name(session)})


def state_name(session: Any) -> str:
    """A session's state in one word: `new` before its first request, `waiting_tool` for an idle
    one whose last answer called a tool."""
    if session is None:
        return "new"
    if session.state is SessionState.IDLE and session.waiting_tool:
        return "waiting_tool"
    return session.state.value


def request_attributes(envelope: Any, meta_info: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a finished request. Tokens by tier only where SGLang tells them apart."""
    attributes: dict[str, Any] = {}
    nothing = {"device": 0} if meta_info.get("cached_tokens") == 0 else {}
    details = meta_info.get("cached_tokens_details") or nothing
    for tier in TIERS:
        if isinstance(details.get(tier), int):
            attributes[f"{CACHED}.{tier}"] = details[tier]
    actions: Iterable[Any] = () if envelope is None else envelope.actions
    bind = next((a for a in actions if a.action_type == ActionKind.BIND), None)
    if bind is not None and isinstance(bind.payload.get("session_id"), str):
        attributes[SESSION_ID] = bind.payload["session_id"]
        parent = bind.payload.get("parent_session_id")
        if isinstance(parent, str) and parent != attributes[SESSION_ID]:
            attributes[PARENT_ID] = parent
    known = (meta_info.get("kv_hints") or {}).get("actions", ())
    told = [f"{a['action_type']}:{a['status']}" for a in known]
    told = [one for one in told if not one.startswith(f"{ActionKind.BIND}:")]
    if told:
        attributes[HINTS] = told
    return attributes
