"""Typed event records: what happened to sessions and their tokens, and when.

Owns the trace format (one JSON object a line) and a bounded in-memory log. Must never
read a clock, write a file, or hold more than its capacity.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from itertools import islice

import msgspec


class EventKind(StrEnum):
    """What happened. New kinds may be added; readers skip those they do not know."""

    OPENED = "opened"
    QUEUED = "queued"
    FINISHED = "finished"
    WAITING_TOOL = "waiting_tool"
    ABORTED = "aborted"
    IDLE = "idle"
    OFFLOADED = "offloaded"
    RESUMING = "resuming"
    ENDED = "ended"
    EXPIRED = "expired"
    DROPPED = "dropped"
    HINT = "hint"
    EVICTED_TOKENS = "evicted_tokens"
    DEMOTED_TOKENS = "demoted_tokens"
    LOADED_TOKENS = "loaded_tokens"


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event at time `t` (seconds). Token counts are zero where meaningless.

    A HINT has `action` and `status`; of FINISHED, the tokens per tier are the cached ones.
    """

    t: float
    kind: EventKind
    tenant: str = ""
    session_id: str = ""
    parent_session_id: str | None = None
    generation: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    pool_tokens: int = 0
    reason: str = ""
    action: str = ""
    status: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """One trace line, without the newline. Defaults are left out."""
    return _encoder.encode(event)


def decode_event(line: bytes | str) -> Event:
    """The event of one trace line; unknown fields are ignored.

    Raises msgspec.DecodeError (msgspec.ValidationError for wrong types or kinds).
    """
    return _decoder.decode(line)


class EventLog:
    """Ring of the newest `capacity` events, numbered from 0 without gaps."""

    def __init__(self, capacity: int = 4_096) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._events: deque[Event] = deque(maxlen=capacity)
        self.n_appended = 0

    def __len__(self) -> int:
        return len(self._events)

    @property
    def n_lost(self) -> int:
        """Events that were pushed out."""
        return self.n_appended - len(self._events)

    def append(self, event: Event) -> int:
        """Add an event and return its number."""
        self._events.append(event)
        self.n_appended += 1
        return self.n_appended - 1

    def since(self, number: int, limit: int | None = None) -> tuple[int, list[Event]]:
        """Events from `number` on that are still held, and the number of the first one."""
        first = min(max(number, self.n_lost), self.n_appended)
        start = first - self.n_lost
        stop = None if limit is None else start + max(limit, 0)
        return first, list(islice(self._events, start, stop))
