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
    """Only what the ingress touches: `send_kv_hints`, `rid_to_state`, `enable_metrics`.

    `handler`: the real OpenAIServingChat, where the ranges of chat requests matter.
    """

    def __init__(self, *, handler=None, **config):
        self.sent = []
        self.handler = handler
        self.manager = SimpleNamespace(
            send_kv_hints=self.sent.append,
            server_args=SimpleNamespace(radix_cache_backend="sam"),
            enable_metrics=False,
            rid_to_state={},
        )
        self.ingress = AgentHintIngress(self.manager, SamConfig(**config))

    def openai(self, request, raw=None):
        """Reply of a management request, or the GenerateReqInput of an inference.

        Source: `OpenAIServingBase.handle_request`,
        `OpenAIServingChat._convert_to_internal_request`.
        """

        async def run():
            reply = await self.ingress.intercept_openai_request(self.handler, request, raw)
            if reply is not None:
                await self.ingress.dispatch.join()
                return reply
            obj = self._converted(request)
            assert await self._generate(obj, raw) is None
            return obj

        return asyncio.run(run())

    def _converted(self, request):
        if self.handler is not None:
            return self.handler._convert_to_internal_request(request)[0]
        return GenerateReqInput(
            text="prompt",
            sampling_params={"n": request.n},
            session_id=request.session_id,
            extra_key=request.extra_key,
            cache_salt=request.cache_salt,
            kv_hints=request.kv_hints,
            agent_hint=request.agent_hint,
        )

    def generate(self, obj, raw=None):
        """Source: `TokenizerManager.generate_request`, up to normalization."""
        return asyncio.run(self._generate(obj, raw))

    async def _generate(self, obj, raw):
        reply = await self.ingress.intercept_generate_request(obj, raw)
        if reply is None:
            obj.normalize_batch_and_arguments()
            await self.ingress.dispatch.join()
        return reply

    def shown(self, obj):
        """What the response of a finished inference says about its hints."""
        meta_info = {}
        self.ingress.finish_request(obj, meta_info)
        return meta_info.get("kv_hints")

    def counts(self):
        return self.ingress.metrics.snapshot()


def caller(authorization=None, body=b"{}"):
    """What the ingress reads of a Starlette request."""

    async def read():
        return body

    headers = {"authorization": authorization} if authorization else {}
    return SimpleNamespace(headers=headers, body=read)


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
