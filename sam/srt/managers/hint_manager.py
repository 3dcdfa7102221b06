"""Scheduler-side session management: binds requests, executes hint actions, reports.

Owns the session table and the running tier tasks of one scheduler rank. Must never read a
clock (time comes in message time stamps), so that all ranks decide alike; must never let a
hint fail or delay a request. Tree and tiers are reached through the cache only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from sam.core.actions import (
    ActionKind,
    ActionResult,
    ActionStatus,
    SessionAction,
    parse_envelope,
)
from sam.core.gaps import LABEL_OTHER, label_of
from sam.core.sessions import SessionKey, SessionRef, SessionState, SessionTable
from sam.core.tracker import RetentionTracker
from sam.core.validation import HintError
from sam.srt.entrypoints.tenant import client_of
from sam.srt.managers.bindings import Binding, binding_of, unknown_action
from sam.srt.managers.moves import WAIT, SessionMoves
from sam.srt.mem_cache.tier_tasks import EvictTask, Outcome, TaskGroup, done, not_done
from sam.srt.observability.timeline import Timeline

if TYPE_CHECKING:
    from sam.config import SamConfig
    from sam.srt.observability.metrics import SchedulerMetrics

_EXPIRE_PER_MESSAGE = 8


class _Ticket:
    """One action under way: where its outcome has to be reported."""

    __slots__ = ("action", "envelope_id", "route", "task")

    def __init__(self, action: SessionAction, envelope_id: str, route: Any, task: Any) -> None:
        self.action = action
        self.envelope_id = envelope_id
        self.route = route
        self.task = task


class HintManager:
    """See the module. `cache` is the SessionRadixCache it serves."""

    def __init__(self, cache: Any, config: SamConfig) -> None:
        self._cache = cache
        self._config = config
        self.table = SessionTable(config.session_limits(), client_of)
        self.retention = RetentionTracker()
        self.timeline = Timeline()
        self.table.watch(self.timeline.state_changed)
        self.requests: dict[str, Binding] = {}
        self.moves = SessionMoves(cache, config, self.table, self.retention, self.requests)
        self._tickets: list[_Ticket] = []
        self._after_run: dict[SessionKey, list[_Ticket]] = {}
        self._open_envelopes: dict[str, int] = {}
        self._n_leases_expired = 0
        self._seen: OrderedDict[tuple[str, str, str], ActionResult] = OrderedDict()
        self.action_counts: dict[tuple[str, str], int] = {}
        self.metrics: SchedulerMetrics | None = None

    @property
    def n_pending(self) -> int:
        return len(self._tickets) + sum(len(t) for t in self._after_run.values())

    def attach(self, tree_core: Any) -> None:
        """The cache has its tree: what sessions are worth goes into its orders."""
        self.retention.attach(tree_core.orders)
        tree_core.tags.on_left = lambda ref: self.retention.left_branches(ref.key)
        tree_core.tags.on_freed = self.retention.drop_left

    # -- requests -----------------------------------------------------------------

    def request_queued(self, req: Any) -> None:
        """A request entered the queue; one without a session costs two attribute reads."""
        if req.rid in self.requests:
            return
        binding = binding_of(req)
        if binding is None:
            return
        opened = self._open_envelopes
        opened[binding.envelope_id] = opened.get(binding.envelope_id, 0) + 1
        key = binding.key
        if key is None:
            self.requests[req.rid] = binding
            return
        self._cancel(key)
        binding.bound = self._record(binding.bind, binding.envelope_id, self._bind(binding.bind))
        binding.generation = self.table.request_queued(key, req.rid, binding.time_s)
        self.requests[req.rid] = binding
        self.moves.bound_at[key] = max(self.moves.bound_at.get(key, 0.0), binding.time_s)
        self._advance(binding.time_s)
        if not self.table.get(key).shared:
            self.retention.queued(key, self.table.now_s, binding.time_s)
        self._after_bind(key, binding.time_s)

    def busy_sessions(self) -> list[tuple[SessionRef, SessionState]]:
        """Sessions that resume, then those with requests; O(their number)."""
        bound = (binding.key for binding in self.requests.values())
        keys = dict.fromkeys([*self.moves.leased, *(key for key in bound if key is not None)])
        sessions = [s for key in keys if (s := self.table.get(key)) is not None]
        return [
            (session.ref, state)
            for state in (SessionState.RESUMING, SessionState.RUNNING)
            for session in sessions
            if session.state is state
        ]

    def branch_ref(self, rid: str) -> tuple[SessionRef, bool] | None:
        """Whom to tag with what this request computed, and whether that life is over."""
        binding = self.requests.get(rid)
        if binding is None or binding.key is None:
            return None
        session = self.table.get(binding.key)
        if session is None or session.shared:
            return None
        ref = SessionRef(binding.key, binding.generation)
        ended = session.ref != ref or not session.live
        if ended:
            self.retention.left(ref, self.table.now_s)
        else:
            self.moves.tagged_at[ref] = binding.time_s
        return ref, ended

    def request_released(
        self, rid: str, *, finish_reason: str | None, aborted: bool, req: Any = None
    ) -> None:
        """The request is over (its KV is in the tree by now, if it got that far)."""
        binding = self.requests.pop(rid, None)
        if binding is None:
            return
        if req is not None:
            binding.add_tokens(req)
        if binding.key is not None:
            self._session_released(rid, binding, finish_reason, aborted)
            self.timeline.turn_over(binding.key, req, finish_reason, aborted)
            self._remember(binding, req, aborted)
        self._open_envelopes[binding.envelope_id] -= 1
        if not self._open_envelopes[binding.envelope_id]:
            del self._open_envelopes[binding.envelope_id]
            results = [self._execute(a, binding.envelope_id, binding.route) for a in binding.edits]
            results = self._newest(binding.edits, binding.envelope_id, results)
            results = [*binding.rejections, *binding.bound_results(), *results]
            self._report(binding.envelope_id, results, binding.route)
        if binding.key is not None:
            self._run_waiting(binding.key)
        self.poll()

    def _session_released(
        self, rid: str, binding: Binding, finish_reason: str | None, aborted: bool
    ) -> None:
        key, now_s = binding.key, self.table.now_s
        if aborted:
            counts = self.table.request_aborted(key, rid, binding.generation, now_s)
        else:
            counts = self.table.request_finished(key, rid, binding.generation, now_s, finish_reason)
        self._drain(rid, SessionRef(key, binding.generation))
        if counts and not self.table.get(key).n_running and not self.table.get(key).shared:
            label = LABEL_OTHER if aborted else label_of(finish_reason)
            self.retention.idle(key, now_s, label, learns=not binding.is_warmup)
        if counts:
            self.moves.turn_over(key)

    def _remember(self, binding: Binding, req: Any, aborted: bool) -> None:
        """What the session's branch is now, for the pool."""
        if self.moves.pool is None or req is None or aborted:
            return
        session = self.table.get(binding.key)
        current = session is not None and session.live and not session.shared
        if current and session.generation == binding.generation:
            self.moves.pool.remember(binding.key, req, binding.time_s)

    def _run_waiting(self, key: SessionKey) -> None:
        """Moves that waited for the session's requests."""
        session = self.table.get(key)
        if session is not None and session.n_running:
            return
        for ticket in self._after_run.pop(key, []):
            result = self._execute(ticket.action, ticket.envelope_id, ticket.route, again=True)
            self._report(ticket.envelope_id, [result], ticket.route)

    # -- hints without a request --------------------------------------------------

    def apply(self, envelope: Any, route: Any) -> list[ActionResult]:
        """Execute the actions of an envelope that came without a request."""
        try:
            entries = parse_envelope(envelope)
        except HintError as error:
            return [_rejected("", "", str(error.reason))]
        results = []
        for raw, (action, rejection) in zip(envelope.actions, entries, strict=True):
            if rejection is not None:
                results.append(self._count(rejection))
            elif action is None:
                results.append(unknown_action(raw.action_id, raw.action_type))
            else:
                results.append(self._execute(action, envelope.message_id, route))
        return self._newest([action for action, _ in entries], envelope.message_id, results)

    def answered(self, payload: dict[str, Any]) -> None:
        """An answer called a tool: that is what the session waits for, if it rests."""
        key = SessionKey(payload["tenant"], payload["session_id"])
        tool_name = payload.get("tool_name")
        self._advance(payload["time_s"])
        if self.table.mark_waiting_tool(key, tool_name):
            self.retention.relabel(key, label_of(payload["finish_reason"], tool_name))
            self.timeline.waiting_tool(key, tool_name)

    def poll(self) -> None:
        """Move tasks on; called after every event that may have freed a lock."""
        if not self._tickets:
            return
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            outcome = self._poll_task(ticket.task)
            if outcome is None:
                self._tickets.append(ticket)
            else:
                self._settle(ticket, outcome)

    def _poll_task(self, task: Any) -> Outcome | None:
        """A task that fails is over; the others go on."""
        try:
            return task.poll()
        except Exception as error:
            self._cache.hint_failed(error)
            return not_done(ActionStatus.DROPPED, "internal_error")

    def tree_was_reset(self) -> None:
        """All nodes are gone: sessions survive as empty, tasks end."""
        self.moves.retained.tree_was_reset()
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            self._settle(ticket, not_done(ActionStatus.DROPPED, "cache_flushed"))

    # -- one action ---------------------------------------------------------------

    def _execute(
        self, action: SessionAction, envelope_id: str, route: Any, *, again: bool = False
    ) -> ActionResult:
        self._advance(action.time_s)
        seen = self._seen.get((action.key.tenant, envelope_id, action.action_id))
        if seen is not None and not again:
            return seen
        try:
            started = self._start(action)
        except Exception as error:
            self._cache.hint_failed(error)
            started = not_done(ActionStatus.DROPPED, "internal_error")
        if started is WAIT or (isinstance(started, TaskGroup) and started.again):
            self._wait(_Ticket(action, envelope_id, route, None))
        if started is WAIT:
            outcome = not_done(ActionStatus.DEFERRED, "running")
        elif isinstance(started, Outcome):
            outcome = started
        else:
            outcome = self._poll_task(started)
            if outcome is None:
                self._tickets.append(_Ticket(action, envelope_id, route, started))
                outcome = not_done(ActionStatus.DEFERRED, "in_use")
        self._age(action.time_s)
        return self._record(action, envelope_id, outcome)

    def _wait(self, ticket: _Ticket) -> None:
        """Start the action again when the session's requests are over. It takes the place of
        an equal one that waits already: a client that repeats itself holds one place."""
        waiting = self._after_run.setdefault(ticket.action.key, [])
        for other in [t for t in waiting if t.action.does_the_same(ticket.action)]:
            waiting.remove(other)
            self._settle(other, not_done(ActionStatus.DROPPED, "repeated"))
        waiting.append(ticket)

    def _start(self, action: SessionAction) -> Any:
        """The task of an action, its outcome where no task is needed, or WAIT."""
        if action.kind is ActionKind.BIND:
            outcome = self._bind(action)
            self._after_bind(action.key, action.time_s)
            return outcome
        if action.kind is ActionKind.EXPECT:
            return self.moves.expect(action)
        if action.kind is ActionKind.RETAIN:
            return self.moves.retain(action)
        if action.target not in ("session", "tokens"):
            return not_done(ActionStatus.REJECTED, "unsupported_target")
        if self._too_many_pending(action.key.tenant):
            return not_done(ActionStatus.DROPPED, "too_many_pending")
        if action.target == "tokens":
            return self.moves.start_span(action)
        if self.moves.is_overtaken(action):
            return not_done(ActionStatus.DROPPED, "overtaken")
        if action.kind is not ActionKind.EVICT:
            return self.moves.start_move(action)
        task = self.moves.start_evict(action)
        for key in () if isinstance(task, Outcome) else task.keys:
            self._drop_waiting(key, "ended")
        return task

    # -- inside -------------------------------------------------------------------

    def _too_many_pending(self, tenant: str) -> bool:
        """All clients together may have so many actions under way, each at most half."""
        limit = self._config.max_pending_actions
        if self.n_pending < limit // 2:
            return False
        client = client_of(tenant)
        tickets = [*self._tickets, *(t for of_key in self._after_run.values() for t in of_key)]
        own = sum(client_of(ticket.action.key.tenant) == client for ticket in tickets)
        return self.n_pending >= limit or own >= (limit + 1) // 2

    def _bind(self, action: SessionAction) -> Outcome:
        n_refused = self.table.counters["cycles_refused"]
        session = self.table.bind(action.key, action.parent_session_id, action.time_s)
        refused = self.table.counters["cycles_refused"] > n_refused
        reason = "cycle_refused" if refused else "shared_session" if session.shared else ""
        return done(reason=reason)

    def _after_bind(self, key: SessionKey, time_s: float) -> None:
        for ref in self.table.take_dropped():
            self._let_go(ref)
        self.moves.check_lease(key)
        self._age(time_s)

    def _advance(self, time_s: float) -> None:
        now_s = self.table.advance(time_s)
        self._cache.tree_core.tell_time(now_s)
        for key in self.retention.advance(now_s):
            self.moves.retained.drop(key)

    def _age(self, time_s: float) -> None:
        """End idle sessions by message time; their KV goes first under pressure."""
        for ref in self.table.expire(time_s, _EXPIRE_PER_MESSAGE):
            self._let_go(ref)
        n_expired = self.table.counters["leases_expired"]
        if n_expired == self._n_leases_expired:
            return
        self._n_leases_expired = n_expired
        for key in list(self.moves.leased):
            self.moves.check_lease(key)

    def _let_go(self, ref: SessionRef) -> None:
        """A session aged out or was pushed out: what it leaves goes first under pressure."""
        self.moves.forget(ref)
        tags = self._cache.tree_core.tags
        if tags.branch_ends(ref):
            self.retention.expired(ref.key, self.table.now_s, left_as=ref)
            tags.release(ref)
        self.retention.forget(ref.key)
        if self.moves.pool is not None:
            self.moves.pool.reclaim([ref.key])

    def _drain(self, rid: str, ref: SessionRef) -> None:
        """A request ended; if its session's generation is over, its KV goes as well."""
        for ticket in self._tickets:
            if isinstance(ticket.task, EvictTask) and rid in ticket.task.draining:
                del ticket.task.draining[rid]
                ticket.task.absorb(ref)
        session = self.table.get(ref.key)
        if session is None or session.ref != ref or not session.live:
            tags = self._cache.tree_core.tags
            tags.unrelease(tags.release(ref))

    def _cancel(self, key: SessionKey) -> None:
        """A new request of the session arrived: what was to leave stays."""
        for ticket in self._tickets:
            if key in ticket.task.keys:
                ticket.task.cancel(key)
        self._drop_waiting(key, "resumed")
        if self.moves.pool is not None:
            self.moves.pool.backlog.lives(key)

    def _drop_waiting(self, key: SessionKey, reason: str) -> None:
        for ticket in self._after_run.pop(key, []):
            self._settle(ticket, not_done(ActionStatus.DROPPED, reason))

    def _settle(self, ticket: _Ticket, outcome: Outcome) -> None:
        result = self._record(ticket.action, ticket.envelope_id, outcome)
        self._report(ticket.envelope_id, [result], ticket.route)

    def _record(self, action: SessionAction, envelope_id: str, outcome: Outcome) -> ActionResult:
        result = ActionResult(
            action_id=action.action_id,
            action_type=action.kind.value,
            status=outcome.status,
            tokens=outcome.tokens,
            reason=outcome.reason,
            span=outcome.span,
        )
        self.timeline.hint(action, outcome)
        self._seen[(action.key.tenant, envelope_id, action.action_id)] = result
        if len(self._seen) > self._config.max_remembered_actions:
            self._seen.popitem(last=False)
        return self._count(result)

    def _newest(
        self,
        actions: list[SessionAction | None],
        envelope_id: str,
        results: list[ActionResult],
    ) -> list[ActionResult]:
        """Results by what is known now: a later action may have dropped an earlier one."""
        return [
            result
            if action is None
            else self._seen.get((action.key.tenant, envelope_id, action.action_id), result)
            for action, result in zip(actions, results, strict=True)
        ]

    def _count(self, result: ActionResult) -> ActionResult:
        counted = (result.action_type, result.status.value)
        self.action_counts[counted] = self.action_counts.get(counted, 0) + 1
        if self.metrics is not None:
            self.metrics.observe(result)
            core = self._cache.tree_core
            self.metrics.gauges(
                len(self.table), self.n_pending, core.n_mismatches, core.orders.use_lru
            )
        return result

    def _report(self, envelope_id: str, results: list[ActionResult], route: Any) -> None:
        if results and route is not None:
            self._cache.send_results(envelope_id, results, route)


def _rejected(action_id: str, action_type: str, reason: str) -> ActionResult:
    return ActionResult(
        action_id=action_id,
        action_type=action_type,
        status=ActionStatus.REJECTED,
        reason=reason,
    )
