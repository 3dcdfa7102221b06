"""Hint ingress in the server process: validate, lower, answer management requests.

Owns the way from a request body to an envelope, and the outcomes that go back. Must never
fail, delay or change an inference because of a hint (but for malformed ones where the operator
asked for that), and never let a client choose its own tenant, time stamp or token ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

from sglang.srt.managers.kv_hint_ingress import KvHintIngress
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

from sam.config import SamConfig, load_config
from sam.core.hints import (
    PROTOCOL_VERSION,
    AgentHint,
    HintError,
    is_manage,
    parse_agent_hint,
    stamp_envelope,
)
from sam.core.validation import DEFAULT_LIMITS, HintReason, check_id
from sam.srt.entrypoints.dispatch import HintDispatch
from sam.srt.entrypoints.envelopes import (
    CarriedHint,
    bind_only,
    check_encodable,
    envelope_of,
    fitting,
    is_parallel,
    joined,
    marked,
    n_held,
    rejected_hint,
    shown,
)
from sam.srt.entrypoints.release import chat_request, is_release_mode, release_hint
from sam.srt.entrypoints.replies import generate_reply, openai_reply
from sam.srt.entrypoints.results import HintResults, client_id, wire_id
from sam.srt.entrypoints.spans import ChatBody
from sam.srt.entrypoints.tenant import tenant_of
from sam.srt.managers.bindings import INTERNAL_PREFIX, QUERY_ACTION
from sam.srt.observability.metrics import IngressMetrics

logger = logging.getLogger(__name__)


class AgentHintIngress(KvHintIngress):
    """Source: `sglang.srt.managers.kv_hint_ingress.KvHintIngress`."""

    def __init__(self, tokenizer_manager: Any, config: SamConfig | None = None) -> None:
        self._manager = tokenizer_manager
        self.config = config if config is not None else load_config()
        self.results = HintResults(
            capacity=self.config.max_hint_results, ttl_s=self.config.hint_result_ttl_s
        )
        self.metrics = IngressMetrics(enabled=tokenizer_manager.enable_metrics)
        self.dispatch = HintDispatch(tokenizer_manager, self.config, self.results, self.metrics)
        self._queries: dict[str, asyncio.Future[list[Any]]] = {}

    # -- upstream's calls ---------------------------------------------------------

    async def intercept_openai_request(
        self, handler: Any, request: Any, raw_request: Any
    ) -> Any | None:
        fields = type(request).model_fields
        if "agent_hint" not in fields:
            return None
        self._check_strict(request.agent_hint, request.kv_hints)
        hint, chat = request.agent_hint, "messages" in fields
        body = ChatBody(handler, request) if chat else None
        if isinstance(request.kv_hints, dict):
            request.kv_hints = CarriedHint(request.kv_hints, body)
        if not is_manage(hint):
            if hint is None:
                session_id = await _session_of(request, raw_request)
                hint = None if session_id is None else {"session_id": session_id}
            if isinstance(hint, dict):
                request.agent_hint = CarriedHint(hint, body)
            return None
        tenant = tenant_of(raw_request, request.cache_salt, request.extra_key)
        kv_hints = self.manage(hint, tenant, body, request.kv_hints)
        return openai_reply(
            chat=chat,
            stream=bool(request.stream),
            model=request.model,
            message_id=kv_hints["message_id"],
            kv_hints=kv_hints,
        )

    async def intercept_generate_request(self, obj: Any, raw_request: Any) -> dict[str, Any] | None:
        body = self._unwrap(obj)
        hint = obj.agent_hint
        if hint is None and isinstance(obj.session_id, str):
            hint = {"session_id": obj.session_id}
        if hint is None and obj.kv_hints is None:
            return None
        tenant = tenant_of(raw_request, obj.cache_salt, obj.extra_key)
        if is_manage(hint):
            kv_hints = self.manage(hint, tenant, None, fitting(obj))
            return generate_reply(kv_hints["message_id"], kv_hints)
        try:
            obj.kv_hints = self._lower_inference(obj, hint, tenant, body)
            if is_parallel(obj.sampling_params):
                obj.kv_hints = marked(obj.kv_hints)
        except Exception:
            logger.exception("sam: a hint could not be lowered; the request is served without")
            self.metrics.rejected("internal_error")
            obj.kv_hints = None
        return None

    def finish_request(self, obj: Any, meta_info: dict[str, Any]) -> None:
        """Called in the loop that hands out all answers: an exception would end the server."""
        try:
            self._finish(obj, meta_info)
        except Exception:
            self.metrics.rejected("internal_error")
            logger.exception("sam: an answer goes out without the outcome of its hints")

    def _finish(self, obj: Any, meta_info: dict[str, Any]) -> None:
        envelope = getattr(obj, "kv_hints", None)
        if envelope is not None:
            self.dispatch.request_over(obj.rid)
            known = self.results.get_wire(envelope.message_id, time.time())
            if known is not None:
                meta_info["kv_hints"] = known

    def on_results(self, message_id: str, results: list[Any]) -> None:
        """Called in the same loop."""
        try:
            self._take_results(message_id, results)
        except Exception:
            self.metrics.rejected("internal_error")
            logger.exception("sam: results of a hint are lost")

    def _take_results(self, message_id: str, results: list[Any]) -> None:
        query = self._queries.pop(message_id, None)
        if query is not None:
            if not query.done():
                query.set_result(results)
            return
        self.dispatch.answered(message_id)
        self.results.update(message_id, [shown(r) for r in results], time.time())

    # -- for the routes -----------------------------------------------------------

    def manage(
        self, raw_hint: object, tenant: str, body: ChatBody | None = None, kv_hints: object = None
    ) -> dict[str, Any]:
        """Accept or reject a management request, and what the client's own envelope says
        beside it; returns what the response shows."""
        try:
            hint, error = self._parsed(raw_hint)
            now_s = time.time()
            own = self._stamp_client(kv_hints, tenant, now_s)
            if error is not None and own is None:
                return self._rejection(error, tenant)
            envelope = joined(hint, own, tenant, now_s, manage_only=True)
            if error is not None:
                self._report_beside([envelope["message_id"]], error, tenant)
            message_id = client_id(tenant, envelope["message_id"])
            return self.dispatch.submit(message_id, envelope, tenant, body)
        except Exception:
            logger.exception("sam: a management request failed")
            return self._reject("internal_error", "see the server log", tenant)

    def release(self, handler: Any, body: dict[str, Any], tenant: str) -> dict[str, Any]:
        """Take the body of a release; `handler` serves chat requests. Raises HintError for a
        malformed one if hints are strict."""
        try:
            chat = ChatBody(handler, chat_request(body))
            hint = release_hint(body)
            if self.config.strict_hints:
                parse_agent_hint(hint)
        except HintError as error:
            return {"kv_hints": self.refused(error, tenant)}
        return {"kv_hints": self.manage(hint, tenant, chat)}

    def submit_envelope(
        self,
        envelope: dict[str, Any],
        tenant: str,
        body: ChatBody | None = None,
        *,
        by_operator: bool = False,
    ) -> dict[str, Any]:
        """Send a client's envelope without inference; its ranges index the lists of `body`.
        Raises HintError if it is malformed. `by_operator`: not charged to the tenant."""
        try:
            decode_kv_hints_envelope(envelope)
            message_id, stamped = self._stamped(envelope, tenant, time.time())
        except HintError:
            raise
        except ValueError as error:
            raise HintError(HintReason.BAD_ENVELOPE, str(error)) from None
        return self.dispatch.submit(message_id, stamped, tenant, body, by_operator=by_operator)

    def refused(self, error: HintError, tenant: str) -> dict[str, Any]:
        """What a management request's response shows of a malformed hint. Raises the error
        itself if hints are strict."""
        if self.config.strict_hints:
            self.metrics.rejected(error.reason.value)
            raise error
        return self._rejection(error, tenant)

    async def query(self, what: str, timeout_s: float = 5.0, **payload: int) -> dict[str, Any]:
        """Ask the scheduler; raises TimeoutError while it is too busy to answer."""
        message_id = f"query-{uuid.uuid4().hex}"
        action = {
            "action_id": "q",
            "action_type": QUERY_ACTION,
            "action_version": PROTOCOL_VERSION,
            "payload": {"what": what, **payload},
        }
        future = asyncio.get_running_loop().create_future()
        self._queries[message_id] = future
        try:
            self._manager.send_kv_hints(
                decode_kv_hints_envelope(envelope_of(message_id, [action]))
            )
            results = await asyncio.wait_for(future, timeout_s)
        finally:
            self._queries.pop(message_id, None)
        return results[0].detail

    # -- inside -------------------------------------------------------------------

    def _check_strict(self, raw_hint: object, kv_hints: object) -> None:
        """With `strict_hints`, raise ValueError for what would be reported as malformed."""
        if not self.config.strict_hints:
            return
        try:
            if raw_hint is not None:
                parse_agent_hint(raw_hint)
            for own in kv_hints if isinstance(kv_hints, list) else [kv_hints]:
                if own:
                    decode_kv_hints_envelope(own)
                    self._stamped(own, "", time.time())
        except HintError as error:
            self.metrics.rejected(error.reason.value)
            raise
        except ValueError:
            self.metrics.rejected(HintReason.BAD_ENVELOPE.value)
            raise

    def _unwrap(self, obj: Any) -> ChatBody | None:
        """Plain hints instead of carried ones; returns what their ranges index. What comes
        from no OpenAI route is checked here."""
        hint, own = obj.agent_hint, obj.kv_hints
        carried = [one for one in (hint, own) if isinstance(one, CarriedHint)]
        if not carried:
            self._check_strict(hint, fitting(obj))
            return None
        obj.agent_hint = dict(hint) if isinstance(hint, CarriedHint) else hint
        obj.kv_hints = dict(own) if isinstance(own, CarriedHint) else own
        return carried[0].body

    def _lower_inference(
        self, obj: Any, raw_hint: object, tenant: str, body: ChatBody | None
    ) -> Any:
        """The envelope(s) of an inference: the client's own, stamped, plus the lowered hint,
        whose edits count once, however many prompts and envelopes there are."""
        hint, error = self._parsed(raw_hint)
        now_s = time.time()  # all that one request carries is of one time
        kv_hints = obj.kv_hints = fitting(obj)
        lowered, said = [], hint
        for one in kv_hints if isinstance(kv_hints, list) else [kv_hints]:
            own = self._stamp_client(one, tenant, now_s)
            lowered.append(self._together(obj, said, own, tenant, now_s, body))
            said = None if said is None else bind_only(said)
        if error is not None and any(lowered):
            wires = [envelope.message_id for envelope in lowered if envelope is not None]
            self._report_beside(wires, error, tenant)
        elif error is not None:
            return self._rejected_envelope(error, tenant)
        return lowered if isinstance(kv_hints, list) else lowered[0]

    def _together(
        self,
        obj: Any,
        hint: AgentHint | None,
        own: dict[str, Any] | None,
        tenant: str,
        now_s: float,
        body: ChatBody | None,
    ) -> Any:
        """One envelope of the lowered hint and the client's own actions, if any; what can be
        sent only when all of `obj` is over waits for that."""
        if hint is None and own is None:
            return None
        envelope = joined(hint, own, tenant, now_s, manage_only=False)
        wire = envelope["message_id"]
        ready, after = self.dispatch.open_inference(
            client_id(tenant, wire), envelope, tenant, body, n_held(obj, envelope, own)
        )
        if after:
            self.dispatch.edit_after(obj, envelope_of(wire, after), tenant, body)
        return decode_kv_hints_envelope(envelope_of(wire, ready))

    def _stamp_client(
        self, kv_hints: object, tenant: str, now_s: float
    ) -> dict[str, Any] | None:
        """The client's envelope, ours to trust; a malformed one is reported and dropped."""
        if not kv_hints:
            return None
        try:
            decode_kv_hints_envelope(kv_hints)
            _, stamped = self._stamped(kv_hints, tenant, now_s)
        except HintError as error:
            return self._rejected_envelope(error, tenant)
        except ValueError as error:
            malformed = HintError(HintReason.BAD_ENVELOPE, str(error))
            return self._rejected_envelope(malformed, tenant)
        return stamped

    def _report_beside(self, wires: list[str], error: HintError, tenant: str) -> None:
        """A malformed hint beside the client's envelope(s): those count, it is reported."""
        self.metrics.rejected(error.reason.value)
        action = rejected_hint(error.reason.value, error.detail)
        for wire in wires:
            self.results.open(client_id(tenant, wire), tenant, [action], time.time())

    def _stamped(
        self, envelope: object, tenant: str, now_s: float
    ) -> tuple[str, dict[str, Any]]:
        """The client's message id, and the envelope as it goes to the scheduler."""
        stamped = stamp_envelope(envelope, tenant=tenant, now_s=now_s)
        message_id = check_id(
            stamped["message_id"],
            DEFAULT_LIMITS.max_id_bytes,
            "message_id",
            HintReason.BAD_ENVELOPE,
        )
        stamped["message_id"] = wire_id(tenant, message_id)
        stamped["actions"] = [
            action
            for action in stamped["actions"]
            if not str(action["action_type"]).startswith(INTERNAL_PREFIX)
        ]
        for action in stamped["actions"]:
            for name in ("action_id", "action_type", "action_version"):
                check_id(action[name], DEFAULT_LIMITS.max_id_bytes, name, HintReason.BAD_ACTION)
            if action["payload"] is None:
                action["payload"] = {}
        check_encodable(stamped)
        return message_id, stamped

    def _parsed(self, raw_hint: object) -> tuple[AgentHint | None, HintError | None]:
        if raw_hint is None:
            return None, None
        try:
            hint = parse_agent_hint(raw_hint)
        except HintError as error:
            return None, error
        if hint.unknown_keys:
            self.metrics.unknown_keys(len(hint.unknown_keys))
        return hint, None

    def _rejected_envelope(self, error: HintError, tenant: str) -> dict[str, Any]:
        """Nothing to do, under an id by which the inference's response finds the reason."""
        message_id = self._rejection(error, tenant)["message_id"]
        return envelope_of(wire_id(tenant, message_id), [])

    def _rejection(self, error: HintError, tenant: str) -> dict[str, Any]:
        return self._reject(error.reason.value, error.detail, tenant)

    def _reject(self, reason: str, detail: str, tenant: str) -> dict[str, Any]:
        self.metrics.rejected(reason)
        message_id, now_s = uuid.uuid4().hex, time.time()
        self.results.open(message_id, tenant, [rejected_hint(reason, detail)], now_s)
        return self.results.get(message_id, tenant, now_s) or {}


async def _session_of(request: Any, raw_request: Any) -> str | None:
    """The session of an OpenAI request without a hint, where something else names one."""
    if request.session_id:
        return None
    if request.prompt_cache_key:
        return request.prompt_cache_key
    if isinstance(request.cache_salt, str) and await is_release_mode(raw_request):
        return request.cache_salt
    return None
