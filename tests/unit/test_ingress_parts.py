"""A server process around the real ingress, in miniature: what arrives, what is sent on."""

import asyncio
import json
from types import SimpleNamespace

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from sam.config import SamConfig
from sam.core.actions import parse_envelope
from sam.srt.entrypoints.ingress import AgentHintIngress

MANAGE_EVICT = {
    "manage_request": True,
    "edits": [{"type": "evict", "target": "session"}],
}


class Server:
    """Only what the ingress touches: `send_kv_hints`, `server_args`, `enable_metrics`."""

    def __init__(self, **config):
        self.sent = []
        manager = SimpleNamespace(
            send_kv_hints=self.sent.append,
            server_args=SimpleNamespace(radix_cache_backend="sam"),
            enable_metrics=False,
        )
        self.ingress = AgentHintIngress(manager, SamConfig(**config))

    def openai(self, request, raw=None):
        """Reply of a management request, or the GenerateReqInput of an inference.

        Source: `OpenAIServingBase.handle_request`,
        `OpenAIServingChat._convert_to_internal_request`.
        """
        reply = asyncio.run(self.ingress.intercept_openai_request(None, request, raw))
        if reply is not None:
            return reply
        obj = GenerateReqInput(
            text="prompt",
            sampling_params={"n": request.n},
            session_id=request.session_id,
            extra_key=request.extra_key,
            cache_salt=request.cache_salt,
            kv_hints=request.kv_hints,
            agent_hint=request.agent_hint,
        )
        assert self.generate(obj, raw) is None
        return obj

    def generate(self, obj, raw=None):
        """Source: `TokenizerManager.generate_request`, up to normalization."""
        reply = asyncio.run(self.ingress.intercept_generate_request(obj, raw))
        if reply is None:
            obj.normalize_batch_and_arguments()
        return reply

    def shown(self, obj):
        """What the response of a finished inference says about its hints."""
        meta_info = {}
        self.ingress.finish_request(obj, meta_info)
        return meta_info.get("kv_hints")

    def counts(self):
        return self.ingress.metrics.snapshot()


def caller(authorization=None):
    headers = {"authorization": authorization} if authorization else {}
    return SimpleNamespace(headers=headers)


def chat(hint=None, **fields):
    fields = {"messages": [{"role": "user", "content": "hi"}], "model": "m"} | fields
    return ChatCompletionRequest(agent_hint=hint, **fields)


def completion(hint=None, **fields):
    return CompletionRequest(**({"model": "m", "prompt": "hi", "agent_hint": hint} | fields))


def actions_of(envelope):
    """Decoded as the scheduler does."""
    entries = parse_envelope(envelope)
    assert all(rejection is None for _, rejection in entries)
    return [action for action, _ in entries]


def envelope(*types, message_id="m-1", **payload):
    actions = [
        {
            "action_id": f"c{i}",
            "action_type": action_type,
            "action_version": "0.1",
            "payload": dict(payload),
        }
        for i, action_type in enumerate(types)
    ]
    return {"protocol_version": "0.1", "message_id": message_id, "actions": actions}


def body_of(response):
    return json.loads(response.body)


def events_of(response):
    """Data lines of a server-sent event stream."""

    async def collect():
        return [part async for part in response.body_iterator]

    parts = asyncio.run(collect())
    raw = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    lines = [line for line in raw.decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]
