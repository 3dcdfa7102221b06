"""Block hashes, one request a line: Mooncake's traces and those of `kvcache-simulator`.

Owns the reading of `{timestamp?, input_length, output_length?, hash_ids, block_size?}`.
`timestamp` is in milliseconds; without it requests come one second apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sam.sim.trace import Trace, TraceError
from sam.sim.traces.hashed import Request, trace_of

ABOUT = "one request a line: hash_ids, input_length, timestamp in ms (kvcache-simulator's too)"
DEFAULT_BLOCK_TOKENS = 512


class _Record(msgspec.Struct):
    hash_ids: list[int | str]
    input_length: int
    output_length: int = 0
    timestamp: float | None = None
    block_size: int | None = None


def matches(record: dict[str, Any]) -> bool:
    return "hash_ids" in record and "input_length" in record


def read(records: Any, where: str) -> Trace:
    sizes: set[int] = set()
    requests = list(_requests(records, sizes, where))
    if len(sizes) > 1:
        raise TraceError(f"{where}: several block sizes: {sorted(sizes)}")
    return trace_of(requests, sizes.pop() if sizes else DEFAULT_BLOCK_TOKENS, where)


def _requests(records: Any, sizes: set[int], where: str) -> Iterator[Request]:
    for order, (number, record) in enumerate(records):
        try:
            raw = msgspec.convert(record, _Record)
        except msgspec.ValidationError as error:
            raise TraceError(f"{where}: line {number}: {error}") from error
        if raw.input_length < 1 or (raw.block_size is not None and raw.block_size < 1):
            raise TraceError(f"{where}: line {number}: lengths must be positive")
        if raw.block_size is not None:
            sizes.add(raw.block_size)
        yield Request(
            blocks=raw.hash_ids,
            input_tokens=raw.input_length,
            output_tokens=raw.output_length,
            time_s=float(order) if raw.timestamp is None else raw.timestamp / 1000.0,
        )
