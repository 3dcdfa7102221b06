"""The session table: states, generations, ageing, bounds.

Owns the life of every session, in logical time (the newest message time stamp seen).
Must never read a clock, touch KV memory, or depend on hash order: all ranks replay the
same messages and must get the same table.

Rules that are not obvious from the signatures:

* A generation is one life of an id. An end closes it at once, also while its requests
  run; those then drain: their finishes are counted and change nothing.
* Only `bind` and `request_queued` open a session; every other call on an unknown, named
  or ended one is a no-op.
* Lineage: a self-parent makes a root; an absent parent leaves lineage as it is; a parent
  never seen becomes a NAMED placeholder, kept as long as something hangs below it; a new
  parent re-parents unless that closes a cycle.
* Ageing ends a session alone, without its subtree: everyone has an own clock.
* Over a bound the oldest drained ENDED record goes, then the oldest resting session,
  never one with requests of its current life: of the opener's client where that is over its
  own bound, then of the client that holds most. A client is a tenant, or what `client_of` makes
  of it. A dropped record with children stays as NAMED, so that lineage survives.
* An id that was forgotten never comes back with a generation it had before.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import islice

from sam.core.lineage import (
    LIVE_STATES,
    RESTING_STATES,
    SHARED_SESSION_IDS,
    Session,
    SessionKey,
    SessionRef,
    SessionState,
    attach,
    depth_of,
    detach,
    post_order,
    pre_order,
    would_cycle,
)
from sam.core.session_store import DEFAULT_LIMITS, SessionLimits, SessionStore

__all__ = [
    "COUNTER_NAMES",
    "LIVE_STATES",
    "RESTING_STATES",
    "SHARED_SESSION_IDS",
    "Session",
    "SessionKey",
    "SessionLimits",
    "SessionRef",
    "SessionState",
    "SessionTable",
]

TOOL_CALLS = "tool_calls"
COUNTER_NAMES = (
    "opened",
    "reopened",
    "ended",
    "expired",
    "dropped_capacity",
    "dropped_named",
    "over_capacity",
    "reparented",
    "cycles_refused",
    "late_finishes",
    "late_aborts",
    "leases_expired",
    "shared_refused",
)
_MIN_LEASES_BEFORE_COMPACTION = 64


class SessionTable:
    """All sessions of one scheduler. Every call is O(1) or O(log n) amortised, except
    walks over a subtree, re-parenting of a session with children (O(depth)), and reports.
    """

    def __init__(
        self, limits: SessionLimits = DEFAULT_LIMITS, client_of: Callable[[str], str] = str
    ) -> None:
        self.limits = limits
        self.now_s = 0.0
        self.counters: dict[str, int] = dict.fromkeys(COUNTER_NAMES, 0)
        self._store = SessionStore(limits, self.counters, client_of)
        self._leases: list[tuple[float, int, Session]] = []
        self._n_leases_made = 0

    # -- time ---------------------------------------------------------------------

    def advance(self, time_s: float) -> float:
        """Move logical time to `time_s` if that is newer; return logical time."""
        self.now_s = max(self.now_s, time_s)
        return self.now_s

    def expire(self, time_s: float, limit: int | None = None) -> list[SessionRef]:
        """End leases that ran out, then sessions idle for longer than the timeout.

        Returns what aged out, oldest first, at most `limit` per call. O(k log n).
        """
        now_s = self.advance(time_s)
        while self._leases and self._leases[0][0] <= now_s:
            until_s, _, session = heapq.heappop(self._leases)
            if session.lease_until_s == until_s:
                self._store.set_state(session, session.state_before_lease)
                self.counters["leases_expired"] += 1
        expired: list[SessionRef] = []
        while limit is None or len(expired) < limit:
            oldest = next(iter(self._store.all.resting.values()), None)
            if oldest is None or now_s - oldest.last_active_s <= self.limits.idle_timeout_s:
                break
            self._close(oldest)
            expired.append(oldest.ref)
        self.counters["expired"] += len(expired)
        return expired

    # -- life of a session --------------------------------------------------------

    def bind(self, key: SessionKey, parent_session_id: str | None, time_s: float) -> Session:
        """Open, re-open (next generation) or touch a session, and learn its lineage.

        Opening may push others out: collect them with `take_dropped`.
        """
        self.advance(time_s)
        session = self._store.node(key)
        if session.state in LIVE_STATES:
            self._touch(session)
        else:
            self._open(session)
        self._learn_parent(session, parent_session_id)
        self._store.enforce_bounds(session)
        return session

    def request_queued(self, key: SessionKey, rid: str, time_s: float) -> int:
        """A request of the session was queued; return the generation it belongs to.

        Opens or re-opens where needed and ends a lease. Idempotent per `rid`: a request
        that is already known (retracted, say) keeps its generation and resurrects nothing.
        """
        session = self._store.all.nodes.get(key)
        if session is not None and rid in session.requests:
            self.advance(time_s)
            return session.requests[rid]
        session = self.bind(key, None, time_s)
        session.requests[rid] = session.generation
        session.n_running += 1
        self._store.set_state(session, SessionState.RUNNING)
        session.waiting_tool, session.tool_name = False, None
        return session.generation

    def request_finished(
        self,
        key: SessionKey,
        rid: str,
        generation: int,
        time_s: float,
        finish_reason: str | None,
        tool_name: str | None = None,
    ) -> bool:
        """A request ended with an answer; False if it is unknown or of an old generation.

        After the last running one the session is IDLE, `waiting_tool` if that one
        finished with tool calls (`tool_name`: which, if known).
        """
        if not self._retire(key, rid, generation, time_s):
            self.counters["late_finishes"] += 1
            return False
        session = self._store.all.nodes[key]
        if not session.n_running:
            session.waiting_tool = finish_reason == TOOL_CALLS
            session.tool_name = tool_name if session.waiting_tool else None
        return True

    def request_aborted(
        self, key: SessionKey, rid: str, generation: int, time_s: float
    ) -> bool:
        """A request ended without an answer, queued or running; False as for finished."""
        if not self._retire(key, rid, generation, time_s):
            self.counters["late_aborts"] += 1
            return False
        return True

    def mark_waiting_tool(self, key: SessionKey, tool_name: str | None) -> bool:
        """The last answer called a tool; False (no-op) unless the session rests."""
        session = self._store.all.nodes.get(key)
        if session is None or session.state not in RESTING_STATES:
            return False
        session.waiting_tool, session.tool_name = True, tool_name
        return True

    def end(self, key: SessionKey, time_s: float, cascade: bool = True) -> list[SessionRef]:
        """End the session, by default with all below it; return what was live.

        Children come before parents, siblings in attach order. A key known only as a
        parent cascades too. Ending a shared id is refused.
        """
        self.advance(time_s)
        root = self._store.all.nodes.get(key)
        if root is None:
            return []
        if root.shared:
            self.counters["shared_refused"] += 1
            return []
        ended = []
        for session in post_order(root) if cascade else [root]:
            if session.state in LIVE_STATES:
                self._close(session)
                ended.append(session.ref)
        self.counters["ended"] += len(ended)
        return ended

    def mark_offloaded(self, key: SessionKey, time_s: float) -> bool:
        """IDLE or RESUMING becomes OFFLOADED; False (no-op) otherwise. Does not touch."""
        self.advance(time_s)
        session = self._resting(key)
        if session is None:
            return False
        self._store.set_state(session, SessionState.OFFLOADED)
        return True

    def mark_resuming(self, key: SessionKey, time_s: float, lease_s: float) -> bool:
        """A resting session becomes RESUMING for `lease_s` (at most the idle timeout).

        False (no-op) for a session that runs, ended or was never bound. Touches. A
        repetition extends the lease. When it runs out unused the former state returns.
        """
        self.advance(time_s)
        session = self._resting(key)
        if session is None:
            return False
        until_s = self.now_s + min(max(lease_s, 0.0), self.limits.idle_timeout_s)
        if session.state is not SessionState.RESUMING:
            before = session.state
            self._store.set_state(session, SessionState.RESUMING)
            session.state_before_lease = before
        self._touch(session)
        if session.lease_until_s is None or until_s > session.lease_until_s:
            session.lease_until_s = until_s
            self._push_lease(session, until_s)
        return True

    def take_dropped(self) -> list[SessionRef]:
        """Return, once, what bounds pushed out since the last call, in that order.

        Call it after `bind` and `request_queued` and drop the ownership tags.
        """
        dropped, self._store.dropped = self._store.dropped, []
        return dropped

    # -- views --------------------------------------------------------------------

    def __len__(self) -> int:
        """Bound sessions, ended records included, NAMED placeholders not."""
        return self._store.all.n_sessions

    def get(self, key: SessionKey) -> Session | None:
        """The record, also ENDED or NAMED (see `Session.live`), or None."""
        return self._store.all.nodes.get(key)

    def parent(self, key: SessionKey) -> SessionKey | None:
        session = self._store.all.nodes.get(key)
        return session.parent.key if session and session.parent else None

    def children(self, key: SessionKey) -> list[SessionKey]:
        """Direct children in attach order."""
        session = self._store.all.nodes.get(key)
        return list(session.children) if session else []

    def subtree(self, key: SessionKey) -> list[SessionKey]:
        """The key itself and all below it in pre-order, whatever their state; [] if unknown."""
        session = self._store.all.nodes.get(key)
        return [node.key for node in pre_order(session)] if session else []

    def watch(self, on_state: Callable[[Session, SessionState], None]) -> None:
        """Call it after each change of a session's state, with the state before."""
        self._store.on_state = on_state

    def page(self, offset: int, limit: int) -> list[Session]:
        """Records in order of first appearance, placeholders included."""
        return list(islice(self._store.all.nodes.values(), offset, offset + limit))

    def roots(self, tenant: str | None = None) -> list[SessionKey]:
        """Keys without a parent, in order of first appearance. O(n), for reports."""
        return [node.key for node in self._store.of_tenant(tenant) if node.parent is None]

    def snapshot(
        self, offset: int = 0, limit: int = 100, tenant: str | None = None
    ) -> list[dict[str, object]]:
        """One page of plain records in order of first appearance, for GET /sessions."""
        depths: dict[SessionKey, int] = {}
        first, nodes = max(offset, 0), self._store.of_tenant(tenant)
        page = islice(nodes, first, first + max(limit, 0))
        return [self._describe(session, depths) for session in page]

    # -- inside -------------------------------------------------------------------

    def _describe(self, session: Session, depths: dict[SessionKey, int]) -> dict[str, object]:
        busy = session.state in (SessionState.RUNNING, SessionState.NAMED)
        return {
            "session_id": session.key.session_id,
            "tenant": session.key.tenant,
            "parent_session_id": session.parent.key.session_id if session.parent else None,
            "generation": session.generation,
            "state": session.state.value,
            "waiting_tool": session.waiting_tool,
            "tool_name": session.tool_name,
            "depth": depth_of(session, depths),
            "n_children": len(session.children),
            "idle_s": 0.0 if busy else self.now_s - session.last_active_s,
            "n_running": session.n_running,
            "n_draining": session.n_draining,
        }

    def _open(self, session: Session) -> None:
        reopened = session.state is SessionState.ENDED
        self.counters["reopened" if reopened else "opened"] += 1
        floor = 0 if reopened else self._store.generation_floor
        session.generation = max(session.generation, floor) + 1
        session.n_running = 0
        session.waiting_tool, session.tool_name = False, None
        self._store.set_state(session, SessionState.IDLE)
        self._touch(session)

    def _close(self, session: Session) -> None:
        """Enter ENDED; what still runs drains from now on."""
        session.n_running = 0
        self._store.set_state(session, SessionState.ENDED)

    def _touch(self, session: Session) -> None:
        session.last_active_s = self.now_s
        if session.state in RESTING_STATES:
            self._store.refresh(session)

    def _retire(self, key: SessionKey, rid: str, generation: int, time_s: float) -> bool:
        """Forget a request; True if it belonged to the current life of the session."""
        self.advance(time_s)
        session = self._store.all.nodes.get(key)
        if session is None or session.requests.get(rid) != generation:
            return False
        del session.requests[rid]
        if session.state is SessionState.RUNNING and generation == session.generation:
            session.n_running -= 1
            session.last_active_s = self.now_s
            if not session.n_running:
                self._store.set_state(session, SessionState.IDLE)
            return True
        if session.state is SessionState.ENDED and not session.requests:
            self._store.drained(session)
        return False

    def _resting(self, key: SessionKey) -> Session | None:
        session = self._store.all.nodes.get(key)
        if session is None or session.state not in RESTING_STATES:
            return None
        if session.shared:
            self.counters["shared_refused"] += 1
            return None
        return session

    # -- leases -------------------------------------------------------------------

    def _push_lease(self, session: Session, until_s: float) -> None:
        self._n_leases_made += 1
        heapq.heappush(self._leases, (until_s, self._n_leases_made, session))
        bound = 2 * len(self._store.all.resting) + _MIN_LEASES_BEFORE_COMPACTION
        if len(self._leases) > bound:
            self._leases = [x for x in self._leases if x[2].lease_until_s == x[0]]
            heapq.heapify(self._leases)

    # -- lineage ------------------------------------------------------------------

    def _learn_parent(self, session: Session, parent_session_id: str | None) -> None:
        if parent_session_id is None or session.shared:
            return
        key = session.key
        if parent_session_id == key.session_id or parent_session_id in SHARED_SESSION_IDS:
            self._move(session, None)
            return
        parent_key = SessionKey(key.tenant, parent_session_id)
        parent = self._store.all.nodes.get(parent_key)
        if parent is not None and parent is session.parent:
            return
        if parent is not None and would_cycle(session, parent):
            self.counters["cycles_refused"] += 1
            return
        self._move(session, parent or self._store.node(parent_key))

    def _move(self, session: Session, parent: Session | None) -> None:
        if session.parent is parent:
            return
        former = detach(session)
        if former is not None:
            self.counters["reparented"] += 1
        if parent is not None:
            attach(session, parent)
        if former is not None:
            self._store.forget_unused(former)
