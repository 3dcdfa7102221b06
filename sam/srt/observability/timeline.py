"""What happened to sessions lately: the page's memory on the scheduler's side.

Owns a ring of events, the newest ones of each session, which sessions changed, and counts by
time. Reads a clock, for people to see: nothing it holds may decide anything, and ranks may
differ in it. Each record is O(1); all of it is bounded. Must never fail a request: callers
guard what is fed from requests.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable
from itertools import islice
from typing import Any

import msgspec

from sam.core.actions import ActionKind, SessionAction
from sam.core.events import Event, EventKind, EventLog
from sam.core.lineage import Session, SessionKey, SessionRef, SessionState
from sam.core.retention import NextUseRank
from sam.srt.observability.timeline_series import TimeSeries

MAX_EVENTS = 2_048
MAX_STORIES = 2_048
EVENTS_PER_STORY = 64
MAX_CHANGED = 4_096
MAX_NAMED_USERS = 4
"""A victim with more users counts as shared: it is in no single session's story."""
MERGE_S = 2.0
"""Evictions of a session within so many seconds are one event."""
RANKS = ("plain", "shared", *(rank.name.lower() for rank in NextUseRank))
"""What an evicted node counts as: no session's, many sessions', or its next use's rank."""

_KINDS = {
    SessionState.RUNNING: EventKind.QUEUED,
    SessionState.OFFLOADED: EventKind.OFFLOADED,
    SessionState.RESUMING: EventKind.RESUMING,
    SessionState.ENDED: EventKind.ENDED,
    SessionState.NAMED: EventKind.DROPPED,
}
_TIER_FIELDS = {"device": "device_tokens", "host": "host_tokens"}
_COUNTED = {(tier, rank): f"evicted_{tier}_{rank}" for tier in _TIER_FIELDS for rank in RANKS}


class _Eviction:
    """Tokens of one session that left one tier within a moment; becomes an event when read."""

    __slots__ = ("kind", "n_tokens", "t", "tier")

    def __init__(self, t: float, kind: EventKind, tier: str, n_tokens: int) -> None:
        self.t = t
        self.kind = kind
        self.tier = tier
        self.n_tokens = n_tokens

    def event(self, key: SessionKey) -> Event:
        tokens = {_TIER_FIELDS[self.tier]: self.n_tokens}
        return Event(
            t=self.t, kind=self.kind, tenant=key.tenant, session_id=key.session_id, **tokens
        )


class Timeline:
    """See the module. `clock` gives wall time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.epoch = uuid.uuid4().hex[:12]
        self.events = EventLog(MAX_EVENTS)
        self.series = TimeSeries()
        self.seq = 0
        self.watched_until_s = 0.0
        self._stories: OrderedDict[SessionKey, deque[Event | _Eviction]] = OrderedDict()
        self._changed: OrderedDict[SessionKey, int] = OrderedDict()

    # -- what is told -------------------------------------------------------------

    def state_changed(self, session: Session, old: SessionState) -> None:
        """A session's state was set; as `SessionTable.watch` tells it."""
        new = session.state
        self.touch(session.key)
        if new is old or (new is SessionState.IDLE and old is SessionState.RUNNING):
            return
        opened = old in (SessionState.NAMED, SessionState.ENDED) and new is SessionState.IDLE
        kind = EventKind.OPENED if opened else _KINDS.get(new, EventKind.IDLE)
        self._add(session.key, kind, generation=session.generation)

    def turn_over(
        self, key: SessionKey, req: Any, finish_reason: str | None, aborted: bool
    ) -> None:
        """A request of the session ended; `req` is SGLang's, or None where it never ran."""
        kind = EventKind.ABORTED if aborted else EventKind.FINISHED
        tokens = {} if req is None else _tokens_of(req)
        self._add(key, kind, reason=finish_reason or "", **tokens)

    def waiting_tool(self, key: SessionKey, tool_name: str | None) -> None:
        self._add(key, EventKind.WAITING_TOOL, reason=tool_name or "")

    def hint(self, action: SessionAction, outcome: Any) -> None:
        """An action got its outcome, the last one or one in between."""
        if action.kind is ActionKind.BIND:
            return
        tokens = outcome.tokens
        self._add(
            action.key,
            EventKind.HINT,
            action=action.kind.value.removeprefix("session."),
            status=outcome.status.value,
            reason=outcome.reason,
            device_tokens=tokens.device,
            host_tokens=tokens.host,
            pool_tokens=tokens.pool,
        )

    def request_over(self, req: Any) -> None:
        """Any request ended, with a session or without: what it took from which tier."""
        tokens = _tokens_of(req)
        self.series.add(
            self.clock(),
            requests=1,
            prompt=tokens["input_tokens"],
            hit_device=tokens["device_tokens"],
            hit_host=tokens["host_tokens"],
            hit_pool=tokens["pool_tokens"],
        )

    def victim(
        self, tier: str, n_tokens: int, rank: str, users: Collection[Hashable], moved: bool
    ) -> None:
        """Memory ran short: a node leaves the tier. `moved`: a copy of it stays below."""
        now_s = self.clock()
        self.series.add_one(now_s, _COUNTED[tier, rank], n_tokens)
        if len(users) > MAX_NAMED_USERS:
            return
        kind = EventKind.DEMOTED_TOKENS if moved else EventKind.EVICTED_TOKENS
        last = None
        for user in users:
            key = key_of_user(user)
            if key != last:
                self._evicted(key, kind, tier, n_tokens, now_s)
            last = key

    def touch(self, key: SessionKey) -> None:
        """What is known of the session is not what it was."""
        self.seq += 1
        self._changed[key] = self.seq
        self._changed.move_to_end(key)
        if len(self._changed) > MAX_CHANGED:
            self._changed.popitem(last=False)

    # -- what is asked ------------------------------------------------------------

    def changed_since(self, seq: int, limit: int) -> list[SessionKey]:
        """Sessions that changed after `seq`, the newest first, at most `limit`."""
        keys = []
        for key, changed in islice(reversed(self._changed.items()), limit):
            if changed <= seq:
                break
            keys.append(key)
        return keys

    def story(self, key: SessionKey) -> list[Event]:
        """The newest events of a session, oldest first."""
        story = self._stories.get(key, ())
        return [each.event(key) if isinstance(each, _Eviction) else each for each in story]

    # -- inside -------------------------------------------------------------------

    def _add(self, key: SessionKey, kind: EventKind, **fields: Any) -> None:
        event = Event(
            t=self.clock(), kind=kind, tenant=key.tenant, session_id=key.session_id, **fields
        )
        self.events.append(event)
        self._story(key).append(event)
        self.touch(key)

    def _story(self, key: SessionKey) -> deque[Event | _Eviction]:
        story = self._stories.get(key)
        if story is None:
            story = self._stories[key] = deque(maxlen=EVENTS_PER_STORY)
            if len(self._stories) > MAX_STORIES:
                self._stories.popitem(last=False)
        else:
            self._stories.move_to_end(key)
        return story

    def _evicted(
        self, key: SessionKey, kind: EventKind, tier: str, n_tokens: int, now_s: float
    ) -> None:
        """Into the session's story only: a pool under pressure evicts all the time."""
        story = self._story(key)
        last = story[-1] if story else None
        if (
            type(last) is _Eviction
            and last.kind is kind
            and last.tier == tier
            and now_s - last.t < MERGE_S
        ):
            last.n_tokens += n_tokens
        else:
            story.append(_Eviction(now_s, kind, tier, n_tokens))
        self.touch(key)


def key_of_user(user: Any) -> SessionKey:
    """The session of a user of nodes: it, one life of it, or the branches that it left."""
    if isinstance(user, SessionRef):
        return user.key
    return user if isinstance(user, SessionKey) else user.session


def _tokens_of(req: Any) -> dict[str, int]:
    return {
        "input_tokens": len(req.origin_input_ids),
        "output_tokens": len(req.output_ids),
        "cached_tokens": req.cached_tokens,
        "device_tokens": req.cached_tokens_device,
        "host_tokens": req.cached_tokens_host,
        "pool_tokens": req.cached_tokens_storage,
    }


def as_dicts(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Events as plain data, without what is empty."""
    return [msgspec.to_builtins(event) for event in events]
