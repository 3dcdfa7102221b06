"""Responses to requests that only manage: valid, empty, at once.

Owns their shapes, one per route, streaming and not. Must never carry generated text.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse

_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def generate_reply(message_id: str, kv_hints: dict[str, Any]) -> dict[str, Any]:
    """Output of `/generate` for a request without inference."""
    return {
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": message_id,
            "finish_reason": {"type": "stop"},
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "cached_tokens": 0,
            "kv_hints": kv_hints,
        },
    }


def openai_reply(
    *, chat: bool, stream: bool, model: str, message_id: str, kv_hints: dict[str, Any]
) -> Any:
    """A ChatCompletion or Completion with one empty choice, finish reason `stop`."""
    body: dict[str, Any] = {
        "id": message_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "logprobs": None, "finish_reason": "stop"}],
        "usage": _USAGE,
        "kv_hints": kv_hints,
    }
    choice = body["choices"][0]
    message = {"role": "assistant", "content": ""}
    if not chat:
        choice["text"] = ""
    elif stream:
        body["object"] = "chat.completion.chunk"
        choice["delta"] = message
    else:
        choice["message"] = message
    if not stream:
        return JSONResponse(body)
    return StreamingResponse(_events(body), media_type="text/event-stream")


async def _events(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield f"data: {json.dumps(body)}\n\n".encode()
    yield b"data: [DONE]\n\n"
