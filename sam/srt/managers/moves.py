"""What an action on a session starts: the task that moves KV, or why nothing is moved.

Owns the leases of prefetched sessions, what is retained, and which request last moved a
session's branch. Must never report, nor wait: it returns a task, an outcome or `WAIT`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sam.core.actions import ActionKind, ActionStatus, SessionAction
from sam.core.sessions import Session, SessionKey, SessionRef, SessionState, SessionTable
from sam.core.tracker import RetentionTracker
from sam.srt.managers.bindings import Binding
from sam.srt.managers.retained import RetainedTokens
from sam.srt.mem_cache.spans import Span, resolve_span, token_ids_of
from sam.srt.mem_cache.tier_tasks import (
    EvictTask,
    OffloadTask,
    Outcome,
    PrefetchBudget,
    PrefetchTask,
    SpanEvictTask,
    TaskGroup,
    done,
    not_done,
)

if TYPE_CHECKING:
    from sam.config import SamConfig

WAIT = object()
"""The action is to be started again when the session's requests are over."""


class SessionMoves:
    """See the module. `requests`: those in the queue or running, by id. `pool`: the
    `SessionPool` that the moves reach as well, if there is one."""

    pool: Any = None

    def __init__(
        self,
        cache: Any,
        config: SamConfig,
        table: SessionTable,
        retention: RetentionTracker,
        requests: Mapping[str, Binding],
    ) -> None:
        self._cache = cache
        self._config = config
        self._table = table
        self._retention = retention
        self._requests = requests
        self.leased: dict[SessionKey, None] = {}
        self.retained = RetainedTokens(cache)
        self.tagged_at: dict[SessionRef, float] = {}
        self.bound_at: dict[SessionKey, float] = {}

    def forget(self, ref: SessionRef) -> None:
        """This life of the session is over."""
        self.leased.pop(ref.key, None)
        self.retained.drop(ref.key)
        self.tagged_at.pop(ref, None)
        self.bound_at.pop(ref.key, None)

    def is_overtaken(self, action: SessionAction) -> bool:
        """Whether a newer request of the session came before the action: it is about a past
        that this request goes on from."""
        return self.bound_at.get(action.key, action.time_s) > action.time_s

    def check_lease(self, key: SessionKey) -> None:
        """Drop the session's lease if it is not about to resume any more."""
        session = self._table.get(key)
        resuming = session is not None and session.state is SessionState.RESUMING
        if key in self.leased and not resuming:
            del self.leased[key]
            self._retention.resuming(key, False)

    def start_evict(self, action: SessionAction) -> Any:
        session = self._table.get(action.key)
        if session is None and self.pool is not None and self.pool.attached:
            return self.pool.evict_unknown(action.key)
        if session is None:
            return not_done(ActionStatus.MISSING, "unknown_session")
        if session.shared:
            return not_done(ActionStatus.REJECTED, "shared_session")
        refs = self._table.end(action.key, action.time_s, cascade=action.scope == "subtree")
        if not refs:
            return not_done(ActionStatus.MISSING, "not_live")
        for ref in refs:
            self.forget(ref)
            self._retention.ended(ref.key, action.time_s, left_as=ref)
        ended = {(ref.key, ref.generation) for ref in refs}
        running = self._requests.items()
        draining = {rid: b.key for rid, b in running if (b.key, b.generation) in ended}
        task = EvictTask if self.pool is None else self.pool.evict_task
        return task(self._cache, refs, draining)

    def start_move(self, action: SessionAction) -> Any:
        """Offload or prefetch of one session, or of a subtree where the scope says so."""
        session = self._table.get(action.key)
        targets = [session] if session is not None else []
        if action.scope == "subtree":
            targets = [self._table.get(key) for key in self._table.subtree(action.key)]
        live = [target for target in targets if target.live]
        if not live:
            pool = self.pool
            if action.kind is ActionKind.PREFETCH and pool is not None and pool.attached:
                if not any(target.generation for target in targets):
                    return self._fetch_unknown(action)
            status = ActionStatus.DROPPED if targets else ActionStatus.MISSING
            return not_done(status, "not_live" if targets else "unknown_session")
        budget = PrefetchBudget(self._cache)
        if len(live) == 1:
            return self._move_one(live[0], action, budget)
        moves = [self._move_one(session, action, budget) for session in live]
        later = not_done(ActionStatus.DEFERRED, "running")
        group = TaskGroup([later if move is WAIT else move for move in moves])
        group.again = WAIT in moves
        return group

    def _move_one(self, session: Session, action: SessionAction, budget: PrefetchBudget) -> Any:
        key, ref = session.key, session.ref
        if session.shared:
            return not_done(ActionStatus.REJECTED, "shared_session")
        if action.kind is ActionKind.PREFETCH:
            if not self._lease(session, action.time_s):
                return not_done(ActionStatus.DROPPED, "already_running")
            if self.pool is None:
                return PrefetchTask(self._cache, ref, budget)
            return self.pool.prefetch_task(key, ref, budget)
        if not self._table.mark_offloaded(key, action.time_s):
            return WAIT if key == action.key else not_done(ActionStatus.DROPPED, "running")
        self.leased.pop(key, None)
        self._retention.offloaded(key)
        offload = OffloadTask if self.pool is None else self.pool.offload_task
        return offload(self._cache, ref, release_now=action.release == "now")

    def _fetch_unknown(self, action: SessionAction) -> Any:
        """A session that another server, or this one before a restart, left in the pool."""
        key = action.key

        def opened() -> SessionRef | None:
            session = self._table.bind(key, None, action.time_s)
            self._retention.idle(key, self._table.now_s)
            return session.ref if self._lease(session, action.time_s) else None

        return self.pool.prefetch_task(key, None, PrefetchBudget(self._cache), opened)

    def start_span(self, action: SessionAction) -> Any:
        """A move of a token range. One that a newer request of the session overtook is about
        what that request left."""
        refused = self._refused(action)
        if refused is not None:
            return refused
        session = self._table.get(action.key)
        mine = [b for b in self._requests.values() if b.key == action.key]
        overtaken = any(b.time_s > action.time_s for b in mine)
        if session.n_running and not overtaken:
            return WAIT
        ref, tags = session.ref, self._cache.tree_core.tags
        ends = tags.branch_ends(ref)
        if self.tagged_at.get(ref, 0.0) > action.time_s:
            current = tags.current(ref)
            ends = [end for end in ends if end is not current]
        span = resolve_span(self._cache, action, ends, token_ids_of(action))
        return span if isinstance(span, Outcome) else self._move_span(session, action, span)

    def _move_span(self, session: Session, action: SessionAction, span: Span) -> Any:
        ref, clipped = session.ref, span.clipped
        if action.kind is ActionKind.PREFETCH:
            if not self._lease(session, action.time_s):
                return not_done(ActionStatus.DROPPED, "already_running")
            return PrefetchTask(self._cache, ref, PrefetchBudget(self._cache), span)
        ends_at = self._cache.tree_core.path_end(span.ends[0])
        if span.end < ends_at:
            clipped, span = clipped or "what_follows_too", span._replace(end=ends_at)
        if action.kind is ActionKind.EVICT:
            self._retention.left(ref, self._table.now_s)
            overtaken = self.tagged_at.get(ref, 0.0) > action.time_s
            in_pool = self.pool is not None and not overtaken
            task = self.pool.span_evict_task if in_pool else SpanEvictTask
            return task(self._cache, ref, span, clipped)
        self._retention.offloaded_tail(ref.key, self._table.now_s)
        release_now = action.release == "now"
        return OffloadTask(self._cache, ref, release_now=release_now, span=span, clipped=clipped)

    def _lease(self, session: Session, time_s: float) -> bool:
        """The session is about to resume; False if it runs."""
        key = session.key
        if not self._table.mark_resuming(key, time_s, self._config.prefetch_lease_s):
            return False
        self.leased[key] = None
        self._retention.resuming(key)
        return True

    def _refused(self, action: SessionAction) -> Outcome | None:
        """Why nothing can be done for the session, if so."""
        session = self._table.get(action.key)
        if session is None:
            return not_done(ActionStatus.MISSING, "unknown_session")
        if session.shared:
            return not_done(ActionStatus.REJECTED, "shared_session")
        if not session.live:
            return not_done(ActionStatus.DROPPED, "not_live")
        return None

    def expect(self, action: SessionAction) -> Outcome:
        refused = self._refused(action)
        if refused is not None:
            return refused
        why = self._retention.expect(action.key, action.time_s, action.expected_idle_s)
        return not_done(ActionStatus.DROPPED, why) if why else done()

    def retain(self, action: SessionAction) -> Outcome:
        """Keep softly for a while, within the tenant's share of the device pool."""
        refused = self._refused(action)
        if refused is not None:
            return refused
        session, ttl_s = self._table.get(action.key), action.ttl_s
        if ttl_s <= 0:
            self.retained.drop(action.key)
        elif not self.retained.take(session.ref):
            ttl_s = 0.0
        self._retention.retain(action.key, action.time_s, ttl_s)
        if ttl_s < action.ttl_s:
            return not_done(ActionStatus.DROPPED, "over_share")
        return done()

    def turn_over(self, key: SessionKey) -> None:
        """The session's branch has grown: if it is retained, that may be too much by now."""
        if key in self.retained and not self.retained.take(self._table.get(key).ref):
            self._retention.retain(key, self._table.now_s, 0.0)
