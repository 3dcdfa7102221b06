"""What the scheduler tells the page: changes since the last look, within a bounded time.

Owns the report's shape and its bounds. Must never change anything, nor look at every session
or node: what did not change comes round bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang.srt.managers.kv_hints import KvHintResult

from sam.core.lineage import Session, SessionKey
from sam.srt.mem_cache import inspect
from sam.srt.mem_cache.inspect import pool_tokens, session_tokens, summary
from sam.srt.observability.timeline import as_dicts
from sam.srt.observability.timeline_report import note_levels, watch_victims

MAX_NODES = 6_000
"""Tree nodes that one report looks at, for the tokens of sessions."""
MAX_SESSIONS = 600
MAX_WATCHED = 8
MAX_NEW_EVENTS = 200


def answer_query(cache: Any, action: Any) -> Any:
    """`KvHintResult` whose detail is the report of the page, or another of `inspect`."""
    if action.payload.get("what") != "page":
        return inspect.answer_query(cache, action)
    return KvHintResult(
        action_id=action.action_id,
        action_type=action.action_type,
        status="done",
        detail=page_report(cache, action.payload),
    )


def page_report(cache: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a query of the page.

    `payload`: `seq`, `event` and `bucket_s` are where the last answer ended; `sweep_at` and
    `sweep` a stretch of all sessions in order of first appearance; `watch` lists
    [tenant, session id] whose stories are asked for. Of the answer's `sessions` the first
    `n_changed` are those that changed.
    """
    timeline, table = cache.hints.timeline, cache.hints.table
    now_s = timeline.clock()
    watch_victims(cache, now_s)
    note_levels(cache, now_s)
    same = payload.get("epoch") == timeline.epoch
    seq = int(payload.get("seq", 0)) if same else 0
    changed = timeline.changed_since(seq, MAX_SESSIONS)
    sweep_at = int(payload.get("sweep_at", 0)) if same else 0
    n_sweep = min(max(int(payload.get("sweep", 0)), 1), MAX_SESSIONS)
    sweep = table.page(sweep_at, n_sweep)
    found = [(key, table.get(key)) for key in changed]
    records = _Records(cache)
    records.add((session for _, session in found if session is not None), MAX_NODES // 2)
    n_changed = len(records.found)
    n_swept = records.add(sweep, MAX_NODES)
    number_of_event = int(payload.get("event", 0)) if same else 0
    first, events = timeline.events.since(
        max(number_of_event, timeline.events.n_appended - MAX_NEW_EVENTS),
        MAX_NEW_EVENTS,
    )
    return {
        "epoch": timeline.epoch,
        "seq": timeline.seq,
        "now_s": now_s,
        "n_sessions": len(table),
        "sessions": list(records.found.values()),
        "n_changed": n_changed,
        "gone": [list(key) for key, session in found if session is None],
        "sweep_next": 0 if n_swept == len(sweep) < n_sweep else sweep_at + n_swept,
        "first_event": first,
        "events": as_dicts(events),
        "series": timeline.series.since(float(payload.get("bucket_s", 0.0)) if same else 0.0),
        "stories": [
            {"key": list(key), "events": as_dicts(timeline.story(SessionKey(*key)))}
            for key in payload.get("watch", ())[:MAX_WATCHED]
        ],
        "summary": summary(cache),
        "device_total": cache.token_to_kv_pool_allocator.size,
    }


class _Records:
    """Records of sessions, until too many nodes were looked at."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._n_nodes = 0
        self.found: dict[SessionKey, dict[str, Any]] = {}

    def add(self, sessions: Iterable[Session], max_nodes: int) -> int:
        """How many of them were dealt with; `max_nodes` counts from the start of the report."""
        n_done = 0
        for session in sessions:
            if self._n_nodes > max_nodes:
                break
            if session.key not in self.found:
                self.found[session.key] = self._record(session)
            n_done += 1
        return n_done

    def _record(self, session: Session) -> dict[str, Any]:
        key, parent = session.key, session.parent
        nodes = self._cache.tree_core.tags.branch_nodes(session.ref)
        self._n_nodes += len(nodes) + 1
        tokens = session_tokens(self._cache, session.ref, nodes)
        tokens["pool"] = pool_tokens(self._cache, key)
        return {
            "tenant": key.tenant,
            "id": key.session_id,
            "parent": None if parent is None else parent.key.session_id,
            "state": session.state.value,
            "tool": (session.tool_name or "") if session.waiting_tool else None,
            "life": session.generation,
            "since_s": round(session.last_active_s, 3),
            "running": session.n_running,
            "tokens": {tier: [each["private"], each["shared"]] for tier, each in tokens.items()},
        }
