"""Hint ingress in the server process: validate, lower, answer management requests.

Owns the way from a request body to an envelope, and the outcomes that go back. Must never
fail, delay or change an inference because of a hint, and never let a client choose its own
tenant or time stamp.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

import msgspec
from sglang.srt.managers.kv_hint_ingress import KvHintIngress
from sglang.srt.managers.kv_hints import KvHintAction, decode_kv_hints_envelope

from sam.config import SamConfig, load_config
from sam.core.hints import (
    PROTOCOL_VERSION,
    AgentHint,
    HintError,
    is_manage,
    lower,
    parse_agent_hint,
    stamp_envelope,
)
from sam.core.validation import DEFAULT_LIMITS, HintReason, check_id
from sam.srt.entrypoints.replies import generate_reply, openai_reply
from sam.srt.entrypoints.results import HintResults, client_id, wire_id
from sam.srt.entrypoints.tenant import tenant_of
from sam.srt.managers.bindings import INTERNAL_PREFIX, PARALLEL_ACTION, QUERY_ACTION
from sam.srt.observability.metrics import IngressMetrics

logger = logging.getLogger(__name__)

HINT_ACTION = "agent_hint"
OVERLOADED = "overloaded"


class AgentHintIngress(KvHintIngress):
    """Source: `sglang.srt.managers.kv_hint_ingress.KvHintIngress`."""

    def __init__(self, tokenizer_manager: Any, config: SamConfig | None = None) -> None:
        self._manager = tokenizer_manager
        self.config = config if config is not None else load_config()
        self.results = HintResults(
            capacity=self.config.max_hint_results, ttl_s=self.config.hint_result_ttl_s
        )
        self.metrics = IngressMetrics(enabled=tokenizer_manager.enable_metrics)
        self._queries: dict[str, asyncio.Future[list[Any]]] = {}
        self._in_flight: dict[str, int] = {}

    # -- upstream's calls ---------------------------------------------------------

    async def intercept_openai_request(
        self, handler: Any, request: Any, raw_request: Any
    ) -> Any | None:
        fields = type(request).model_fields
        if "agent_hint" not in fields:
            return None
        if request.agent_hint is None:
            if request.prompt_cache_key and not request.session_id:
                request.agent_hint = {"session_id": request.prompt_cache_key}
            return None
        if not is_manage(request.agent_hint):
            return None
        tenant = tenant_of(raw_request, request.cache_salt, request.extra_key)
        kv_hints = self._manage(request.agent_hint, tenant)
        return openai_reply(
            chat="messages" in fields,
            stream=bool(request.stream),
            model=request.model,
            message_id=kv_hints["message_id"],
            kv_hints=kv_hints,
        )

    async def intercept_generate_request(self, obj: Any, raw_request: Any) -> dict[str, Any] | None:
        hint = obj.agent_hint
        if hint is None and isinstance(obj.session_id, str):
            hint = {"session_id": obj.session_id}
        if hint is None and obj.kv_hints is None:
            return None
        tenant = tenant_of(raw_request, obj.cache_salt, obj.extra_key)
        if is_manage(hint):
            kv_hints = self._manage(hint, tenant)
            return generate_reply(kv_hints["message_id"], kv_hints)
        try:
            obj.kv_hints = self._lower_inference(hint, _fitting(obj), tenant)
            if _is_parallel(obj.sampling_params):
                obj.kv_hints = _marked(obj.kv_hints)
        except Exception:
            logger.exception("sam: a hint could not be lowered; the request is served without")
            self.metrics.rejected("internal_error")
            obj.kv_hints = None
        return None

    def finish_request(self, obj: Any, meta_info: dict[str, Any]) -> None:
        envelope = getattr(obj, "kv_hints", None)
        if envelope is not None:
            known = self.results.get_wire(envelope.message_id, time.time())
            if known is not None:
                meta_info["kv_hints"] = known

    def on_results(self, message_id: str, results: list[Any]) -> None:
        query = self._queries.pop(message_id, None)
        if query is not None:
            if not query.done():
                query.set_result(results)
            return
        self._in_flight.pop(message_id, None)
        self.results.update(message_id, [_shown(r) for r in results], time.time())

    # -- for the routes -----------------------------------------------------------

    def submit_envelope(self, envelope: dict[str, Any], tenant: str) -> dict[str, Any]:
        """Send a client's envelope without inference; raises ValueError if it is malformed."""
        decode_kv_hints_envelope(envelope)
        message_id, stamped = self._stamped(envelope, tenant)
        return self._send(message_id, decode_kv_hints_envelope(stamped), tenant)

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
            self._manager.send_kv_hints(decode_kv_hints_envelope(_envelope(message_id, [action])))
            results = await asyncio.wait_for(future, timeout_s)
        finally:
            self._queries.pop(message_id, None)
        return results[0].detail

    # -- inside -------------------------------------------------------------------

    def _manage(self, raw_hint: object, tenant: str) -> dict[str, Any]:
        """Accept or reject a management request; returns what the response shows."""
        try:
            hint = parse_agent_hint(raw_hint)
            message_id = uuid.uuid4().hex
            envelope = _lowered(hint, wire_id(tenant, message_id), tenant, manage_only=True)
            self._note_unknown_keys(hint)
            return self._send(message_id, decode_kv_hints_envelope(envelope), tenant)
        except HintError as error:
            return self._rejection(error, tenant)
        except Exception:
            logger.exception("sam: a management request failed")
            return self._reject("internal_error", "see the server log", tenant)

    def _send(self, message_id: str, envelope: Any, tenant: str) -> dict[str, Any]:
        """Hand actions to the scheduler, unless too many wait there to be looked at."""
        n_actions = len(envelope.actions)
        n_waiting = sum(self._in_flight.values())
        if n_actions and n_waiting + n_actions > self.config.max_in_flight_actions:
            self.metrics.rejected(OVERLOADED)
            actions = _known(envelope.actions, "dropped", OVERLOADED)
            self.results.open(message_id, tenant, actions, time.time())
        else:
            self._open(message_id, envelope.actions, tenant)
            if n_actions:
                self._in_flight[envelope.message_id] = n_actions
                self._manager.send_kv_hints(envelope)
        return self.results.get(message_id, tenant, time.time()) or {}

    def _open(self, message_id: str, actions: Any, tenant: str) -> None:
        self.results.open(message_id, tenant, _known(actions, "accepted"), time.time())
        self.metrics.accepted(len(actions))

    def _lower_inference(self, raw_hint: object, kv_hints: object, tenant: str) -> Any:
        """The envelope(s) of an inference: the client's own, stamped, plus the lowered hint."""
        own = self._stamp_client(kv_hints, tenant)
        if raw_hint is None:
            return own
        try:
            hint = parse_agent_hint(raw_hint)
        except HintError as error:
            return self._beside_rejected(own, error, tenant)
        self._note_unknown_keys(hint)
        if isinstance(own, list):
            return [self._with_hint(hint, one, tenant) for one in own]
        return self._with_hint(hint, own, tenant)

    def _with_hint(self, hint: AgentHint, own: Any, tenant: str) -> Any:
        """One envelope of the lowered hint and the client's own actions, if any."""
        message_id = uuid.uuid4().hex
        lowered = _lowered(hint, wire_id(tenant, message_id), tenant, manage_only=False)
        if own is not None:
            message_id = client_id(tenant, own["message_id"])
            lowered["message_id"] = own["message_id"]
            lowered["actions"] = [
                {**action, "action_id": f"hint-{action['action_id']}"}
                for action in lowered["actions"]
            ] + own["actions"]
        envelope = decode_kv_hints_envelope(lowered)
        self._open(message_id, envelope.actions, tenant)
        return envelope

    def _stamp_client(self, kv_hints: object, tenant: str) -> Any:
        """The client's envelope(s), ours to trust; a malformed one is reported and dropped."""
        if isinstance(kv_hints, list):
            return [self._stamp_client(item, tenant) for item in kv_hints]
        if not kv_hints:
            return None
        try:
            decode_kv_hints_envelope(kv_hints)
            message_id, stamped = self._stamped(kv_hints, tenant)
        except HintError as error:
            return self._rejected_envelope(error, tenant)
        except ValueError as error:
            malformed = HintError(HintReason.BAD_ENVELOPE, str(error))
            return self._rejected_envelope(malformed, tenant)
        self._open(message_id, decode_kv_hints_envelope(stamped).actions, tenant)
        return stamped

    def _beside_rejected(self, own: Any, error: HintError, tenant: str) -> Any:
        """A malformed hint beside the client's envelope(s): those count, it is reported."""
        if own is None:
            return self._rejected_envelope(error, tenant)
        self.metrics.rejected(error.reason.value)
        for envelope in own if isinstance(own, list) else [own]:
            if envelope is not None:
                message_id = client_id(tenant, envelope["message_id"])
                action = _rejected_action(error.reason.value, error.detail)
                self.results.open(message_id, tenant, [action], time.time())
        return own

    def _stamped(self, envelope: object, tenant: str) -> tuple[str, dict[str, Any]]:
        """The client's message id, and the envelope as it goes to the scheduler."""
        stamped = stamp_envelope(envelope, tenant=tenant, now_s=time.time())
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
            for name in ("action_id", "action_type"):
                check_id(action[name], DEFAULT_LIMITS.max_id_bytes, name, HintReason.BAD_ACTION)
            if action["payload"] is None:
                action["payload"] = {}
        return message_id, stamped

    def _note_unknown_keys(self, hint: AgentHint) -> None:
        if hint.unknown_keys:
            self.metrics.unknown_keys(len(hint.unknown_keys))

    def _rejected_envelope(self, error: HintError, tenant: str) -> dict[str, Any]:
        """Nothing to do, under an id by which the inference's response finds the reason."""
        message_id = self._rejection(error, tenant)["message_id"]
        return _envelope(wire_id(tenant, message_id), [])

    def _rejection(self, error: HintError, tenant: str) -> dict[str, Any]:
        return self._reject(error.reason.value, error.detail, tenant)

    def _reject(self, reason: str, detail: str, tenant: str) -> dict[str, Any]:
        self.metrics.rejected(reason)
        message_id, now_s = uuid.uuid4().hex, time.time()
        self.results.open(message_id, tenant, [_rejected_action(reason, detail)], now_s)
        return self.results.get(message_id, tenant, now_s) or {}


def _envelope(message_id: str, actions: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "protocol_version": PROTOCOL_VERSION,
        "message_id": message_id,
        "actions": actions,
    }


def _lowered(hint: AgentHint, wire: str, tenant: str, *, manage_only: bool) -> dict[str, Any]:
    return lower(hint, message_id=wire, now_s=time.time(), tenant=tenant, manage_only=manage_only)


def _is_parallel(sampling_params: object) -> bool:
    """Whether more than one answer is asked for: upstream runs a warm-up of the prefix first."""
    items = sampling_params if isinstance(sampling_params, list) else [sampling_params]
    counts = [item.get("n") for item in items if isinstance(item, dict)]
    return any(isinstance(n, int) and n > 1 for n in counts)


def _marked(kv_hints: Any) -> Any:
    """Tell the scheduler that the envelope comes with several requests, a warm-up first."""
    if isinstance(kv_hints, list):
        return [_marked(item) for item in kv_hints]
    if not kv_hints:
        return kv_hints
    envelope = decode_kv_hints_envelope(kv_hints)
    mark = KvHintAction(
        action_id="", action_type=PARALLEL_ACTION, action_version=PROTOCOL_VERSION, payload={}
    )
    return msgspec.structs.replace(envelope, actions=[*envelope.actions, mark])


def _fitting(obj: Any) -> Any:
    """The request's `kv_hints`, but nothing for an empty list, and for a list of envelopes
    on a single request something that is rejected."""
    hints = obj.kv_hints
    if not isinstance(hints, list) or not hints:
        return hints or None
    ids = obj.input_ids
    batch = isinstance(obj.text, list) or (bool(ids) and isinstance(ids[0], list))
    return hints if batch else {"kv_hints": "a list, for a single request"}


def _known(actions: Any, status: str, reason: str = "") -> list[dict[str, Any]]:
    return [
        {
            "action_id": action.action_id,
            "action_type": action.action_type,
            "status": status,
            "reason": reason,
        }
        for action in actions
    ]


def _rejected_action(reason: str, detail: str) -> dict[str, Any]:
    return {
        "action_id": HINT_ACTION,
        "action_type": HINT_ACTION,
        "status": "rejected",
        "reason": reason,
        "detail": detail,
    }


def _shown(result: Any) -> dict[str, Any]:
    return {
        "action_id": result.action_id,
        "action_type": result.action_type,
        "status": result.status,
        "reason": result.reason,
        **result.detail,
    }
