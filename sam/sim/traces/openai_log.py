"""Request logs with the prompts in them: OpenAI bodies, SGLang's `--log-requests` in JSON.

Owns finding the prompt, the session and the times in a log record. Must never keep text:
prompts become hashes of blocks at once.

A record is a body, or holds one under `body`, `request` or `obj`; usage under `usage`,
`response.usage` or `out.meta_info`. Prompts are token ids where the log has them, else
text at four bytes a token: shares and growth are right, absolute token counts are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec

from sam.core.gaps import LABEL_OTHER, label_of
from sam.sim.trace import PAGE_TOKENS, Trace, TraceError
from sam.sim.traces.hashed import Request, trace_of

ABOUT = "request logs with prompts: OpenAI bodies, SGLang --log-requests in JSON (level 3)"
_BYTES_PER_TOKEN = 4
_PROMPTS = ("input_ids", "messages", "prompt", "text")
_RECEIVED = "request.received"
_encode = msgspec.json.Encoder(order="sorted").encode


def _body(record: dict[str, Any]) -> dict[str, Any]:
    for key in ("body", "request", "obj"):
        if isinstance(record.get(key), dict):
            return record[key]
    return record


def matches(record: dict[str, Any]) -> bool:
    if isinstance(record.get("records"), list) or "event" in record:
        return True
    body = _body(record)
    return any(body.get(key) for key in _PROMPTS) or "path" in record


def read(records: Any, where: str) -> Trace:
    """Raises TraceError where no record holds a prompt."""
    requests = [r for n, record in records for r in _requests(record, f"{where}: line {n}")]
    if not any(request.blocks for request in requests):
        raise TraceError(f"{where}: no prompts in it (SGLang: --log-requests-level 3)")
    requests.sort(key=lambda request: request.time_s)
    return trace_of(requests, PAGE_TOKENS, where)


def _requests(record: Any, where: str) -> Iterator[Request]:
    if isinstance(record, list):
        for one in record:
            yield from _requests(one, where)
    elif isinstance(record, dict) and isinstance(record.get("records"), list):
        yield from _requests(record["records"], where)
    elif isinstance(record, dict):
        request = _request(record, where)
        if request is not None:
            yield request


def _request(record: dict[str, Any], where: str) -> Request | None:
    """The request of a record, or the end of a session; None for everything else."""
    event = record.get("event")
    if isinstance(event, str) and event.startswith(_RECEIVED):
        return None  # logged again, with its answer, when it is finished
    body = _body(record)
    management = _management(body)
    if management is not None:
        ends = any(edit.get("target") == "session" for edit in management)
        session = _session(body)
        if not ends or session is None:
            return None
        time_s = _time_s(record, where)
        return Request(blocks=[], input_tokens=0, time_s=time_s, session=session, is_end=True)
    blocks, n_tokens = _blocks(body)
    if not blocks:
        return None
    usage, finish = _usage(record)
    return Request(
        blocks=blocks,
        input_tokens=n_tokens,
        output_tokens=int(usage.get("completion_tokens") or 0),
        time_s=_time_s(record, where),
        session=_session(body),
        label=label_of(finish) if finish else LABEL_OTHER,
    )


def _blocks(body: dict[str, Any]) -> tuple[list[bytes], int]:
    ids = body.get("input_ids")
    if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids):
        data, size = b"".join(i.to_bytes(4, "big", signed=True) for i in ids), 4 * PAGE_TOKENS
        n_tokens = len(ids)
    else:
        data, size = _text(body), _BYTES_PER_TOKEN * PAGE_TOKENS
        n_tokens = -(-len(data) // _BYTES_PER_TOKEN)
    starts = range(0, len(data), size)
    return [hashlib.blake2b(data[i : i + size], digest_size=8).digest() for i in starts], n_tokens


def _text(body: dict[str, Any]) -> bytes:
    """The prompt in its order: tools, then messages, one after the other."""
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        tools = body.get("tools") or []
        return b"\n".join(_encode(part) for part in [*tools, *messages])
    for key in ("prompt", "text"):
        if isinstance(body.get(key), str):
            return body[key].encode()
    return b""


def _session(body: dict[str, Any]) -> str | None:
    hint = body.get("agent_hint")
    if isinstance(hint, dict) and isinstance(hint.get("session_id"), str):
        return hint["session_id"]
    for key in ("session_id", "prompt_cache_key", "user"):
        if isinstance(body.get(key), str) and body[key]:
            return body[key]
    return None


def _management(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Evicts of a request that only manages; None for an inference."""
    hint = body.get("agent_hint")
    context = hint.get("context_management") if isinstance(hint, dict) else None
    if not isinstance(context, dict) or context.get("manage_request") is not True:
        return None
    edits = context.get("edits")
    found = edits if isinstance(edits, list) else []
    return [e for e in found if isinstance(e, dict) and e.get("type") == "evict"]


def _usage(record: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """(usage, finish reason) where the log has them."""
    out = record.get("out")
    if isinstance(out, dict) and isinstance(out.get("meta_info"), dict):
        meta = out["meta_info"]
        reason = meta.get("finish_reason")
        return meta, reason.get("type") if isinstance(reason, dict) else None
    response = record.get("response") if isinstance(record.get("response"), dict) else record
    usage = response.get("usage") if isinstance(response.get("usage"), dict) else {}
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    return usage, first.get("finish_reason") if isinstance(first, dict) else None


def _time_s(record: dict[str, Any], where: str) -> float:
    for key in ("timestamp", "t", "time", "created"):
        value = record.get(key)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError as error:
                raise TraceError(f"{where}: {key} {value!r} is no time") from error
    return 0.0
