"""Tier commands on a session's branches: evict, offload, prefetch, as resumable tasks.

Owns the moves of chosen nodes between tiers. A task does what it can when it is made, the
rest in `poll`; it never blocks, never touches a node in use, and never decides who should
move. Outcomes count tokens freed (evict), backed up or demoted (offload), loaded (prefetch).
"""

from __future__ import annotations

from typing import Any

import msgspec

from sam.core.actions import ActionStatus, TierTokens
from sam.core.sessions import SessionKey, SessionRef
from sam.srt.mem_cache.ownership import path_up


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Final or interim result of a task."""

    status: ActionStatus
    tokens: TierTokens = TierTokens()
    reason: str = ""
    span: tuple[int, int] | None = None


def done(*, device: int = 0, host: int = 0, reason: str = "") -> Outcome:
    return Outcome(
        status=ActionStatus.DONE, tokens=TierTokens(device=device, host=host), reason=reason
    )


def add_tokens(parts: list[TierTokens]) -> TierTokens:
    """Sum per tier."""
    return TierTokens(
        device=sum(p.device for p in parts),
        host=sum(p.host for p in parts),
        pool=sum(p.pool for p in parts),
    )


def not_done(status: ActionStatus, reason: str) -> Outcome:
    return Outcome(status=status, reason=reason)


NODES_PER_POLL = 256
"""Nodes that one evict looks at between two steps of the scheduler, where steps come anyway:
without a host tier there are none on an idle server."""


class EvictTask:
    """Free what only ended sessions used, deepest node first, on device and host.

    One session after the other, nodes in use later. `draining`: the requests that still run
    for an ended generation, and for which id: their KV joins through `absorb` when they end.
    """

    def __init__(self, cache: Any, refs: list[SessionRef], draining: dict[str, SessionKey]) -> None:
        self._cache = cache
        self.keys = dict.fromkeys(ref.key for ref in refs)
        self.draining = draining
        self._unreleased = dict.fromkeys(refs)
        self._refs: dict[SessionRef, None] = {}
        self._todo: list[Any] = []
        self._left_ids: set[int] = set()
        self._in_use: list[Any] = []
        self._cancelled = False
        self._freed = [0, 0]
        self._n_freed = 0

    def absorb(self, ref: SessionRef) -> None:
        """Release the tags of one ended generation: its private nodes are to be freed."""
        self._refs[ref] = None
        self._todo += self._cache.tree_core.tags.release(ref)[::-1]

    def cancel(self, key: SessionKey) -> None:
        """The session is used again: keep what was not freed yet."""
        tags = self._cache.tree_core.tags
        for ref in [ref for ref in self._unreleased if ref.key == key]:
            del self._unreleased[ref]
            self._keep(tags.release(ref))
        for ref in [ref for ref in self._refs if ref.key == key]:
            self._keep(tags.released_nodes(ref))
            del self._refs[ref]
        for rid in [rid for rid, of_key in self.draining.items() if of_key == key]:
            self._cancelled = True
            del self.draining[rid]
        self.keys.pop(key, None)

    def _keep(self, nodes: list[Any]) -> None:
        self._cancelled |= bool(nodes)
        self._cache.tree_core.tags.unrelease(nodes)

    def poll(self) -> Outcome | None:
        """Free what can be freed now; the outcome once nothing is left to wait for."""
        if not self._todo and not self._unreleased and self._nothing_changed():
            return None
        with self._cache.one_free():
            finished = self._free_some()
        if not finished or self._left_ids or self.draining:
            return None
        return self._outcome()

    def _nothing_changed(self) -> bool:
        """Whether all that was found in use still is: polls come with every step of the
        scheduler, and another round looks at every node that is to go."""
        core = self._cache.tree_core
        return bool(self._in_use) and all(
            core.find_node(node.id) is node and core.tags.is_released(node) and core.is_locked(node)
            for node in self._in_use
        )

    def _free_some(self) -> bool:
        """False if there is more to look at in the next step."""
        n_left = NODES_PER_POLL if self._cache.has_host_tier() else -1
        if self._in_use:
            self._start_round()
        while self._todo or self._next():
            if n_left == 0:
                return False
            if self._todo:
                n_left -= 1
                self._try(self._todo.pop())
        return True

    def _start_round(self) -> None:
        self._in_use, self._left_ids = [], set()
        tags, path_end = self._cache.tree_core.tags, self._cache.tree_core.path_end
        nodes = [node for ref in self._refs for node in tags.released_nodes(ref)]
        self._todo = sorted(nodes, key=path_end)

    def _next(self) -> bool:
        """The next session's nodes; at the end heads that were split off meanwhile."""
        for ref in self._unreleased:
            del self._unreleased[ref]
            self.absorb(ref)
            return True
        tags = self._cache.tree_core.tags
        heads = [n for ref in self._refs for n in tags.released_nodes(ref) if not n.children]
        self._todo = [node for node in heads if node.id not in self._left_ids]
        return bool(self._todo)

    def _try(self, node: Any) -> None:
        core = self._cache.tree_core
        if core.find_node(node.id) is not node or self._drop(node):
            return
        if core.is_locked(node):
            self._in_use.append(node)
            self._left_ids.add(node.id)
        elif any(child.id in self._left_ids for child in node.children.values()):
            self._left_ids.add(node.id)

    def _drop(self, node: Any) -> bool:
        """Drop a node, and above it what a session that ended before had to leave because of
        it; nodes of the sessions at hand have their own turn."""
        core, first = self._cache.tree_core, node
        while core.find_node(node.id) is node and core.tags.is_released(node):
            if node is not first and core.tags.released_by(node) in self._refs:
                break
            parent, result = node.parent, core.drop_leaf(node)
            self._cache.drain(result)
            if not result.dropped:
                break
            self._n_freed += 1
            self._freed[0] += result.device_tokens
            self._freed[1] += result.host_tokens
            node = parent
        return node is not first

    def _outcome(self) -> Outcome:
        device, host = self._freed
        if not self._cancelled:
            return done(device=device, host=host)
        status = ActionStatus.CLIPPED if device or host else ActionStatus.DROPPED
        return Outcome(status=status, tokens=TierTokens(device=device, host=host), reason="resumed")


class SpanEvictTask(EvictTask):
    """Free what of a span only this session uses; what hangs below goes as well."""

    def __init__(self, cache: Any, ref: SessionRef, span: Any, clipped: str) -> None:
        self._span = span
        self._clipped = clipped
        super().__init__(cache, [ref], {})

    def absorb(self, ref: SessionRef) -> None:
        tags, path_end = self._cache.tree_core.tags, self._cache.tree_core.path_end
        self._refs[ref] = None
        self._todo += sorted(tags.cut(ref, self._span.top, self._span.ends), key=path_end)

    def _outcome(self) -> Outcome:
        outcome, span = super()._outcome(), self._span
        if self._clipped and outcome.status is ActionStatus.DONE:
            fields = {"status": ActionStatus.CLIPPED, "reason": self._clipped}
            outcome = msgspec.structs.replace(outcome, **fields)
        return msgspec.structs.replace(outcome, span=(span.start, span.end))


class OffloadTask:
    """Make sure that the session's current branch has host copies, root to leaf.

    With a `span` only what lies below its top leaves the device, and goes first.

    With `release_now` the device copies that nobody else needs go at once, as soon as the
    copies have landed, those of branches that the session left too: they hang below what
    is to go. Otherwise they go first under pressure (their retention class).
    """

    def __init__(
        self,
        cache: Any,
        ref: SessionRef,
        *,
        release_now: bool,
        span: Any = None,
        clipped: str = "",
    ) -> None:
        self._cache = cache
        self._span = span
        self.ref = ref
        self.keys = {ref.key: None}
        self._release_now = release_now
        self._in_flight: dict[int, int] = {}
        self._started: set[int] = set()
        self._waiting: list[Any] = []
        self._backed_up = 0
        self._clipped = clipped
        tags = cache.tree_core.tags
        leaf = tags.current(ref)
        leaves = tags.branch_ends(ref) if release_now else [leaf] if leaf is not None else []
        if span is not None:
            leaves = span.ends
            tags.split_tail(ref, span.top)
        if leaves and not cache.has_host_tier():
            self._clipped = "no_host_tier"
        else:
            self._waiting = leaves[::-1]
            self._back_up()

    def _back_up(self) -> None:
        """Start copies, root to leaf, as many as may be under way at once."""
        core = self._cache.tree_core
        while self._waiting:
            leaf = self._waiting[-1]
            if core.find_node(leaf.id) is leaf and not self._back_up_branch(leaf):
                return
            self._waiting.pop()

    def _back_up_branch(self, leaf: Any) -> bool:
        """False if the rest has to wait, or the host is full."""
        for node in path_up(leaf):
            if node.write_through_pending_id is not None:
                self._in_flight.setdefault(node.write_through_pending_id, 0)
        limit = self._cache.config.max_offload_in_flight_tokens
        core = self._cache.tree_core
        for node_id in core.unbacked_chain(leaf):
            if sum(self._in_flight.values()) >= limit:
                return False
            if not self._cache.can_lock(core.tokens_of(core.find_node(node_id))[0]):
                return False
            lost_again = node_id in self._started
            n_tokens = 0 if lost_again else self._cache.back_up_node(node_id)
            if n_tokens == 0:
                self._clipped = "host_full"
                self._waiting.clear()
                return False
            self._started.add(node_id)
            self._backed_up += n_tokens
            self._in_flight[node_id] = n_tokens
        return True

    def cancel(self, key: SessionKey) -> None:
        """The session is used again: host copies are no harm, device copies stay."""
        if self._release_now:
            self._release_now, self._clipped = False, self._clipped or "resumed"

    def poll(self) -> Outcome | None:
        writing = self._cache.ongoing_write_through
        self._in_flight = {i: n for i, n in self._in_flight.items() if i in writing}
        self._back_up()
        if self._in_flight or self._waiting:
            return None
        with self._cache.one_free():
            freed = self._demote() if self._release_now else 0
        tokens = TierTokens(device=freed, host=self._backed_up)
        status = ActionStatus.CLIPPED if self._clipped else ActionStatus.DONE
        span = None if self._span is None else (self._span.start, self._span.end)
        return Outcome(status=status, tokens=tokens, reason=self._clipped, span=span)

    def _demote(self) -> int:
        """Drop device copies of the session's private part, leaf first; tokens freed."""
        core = self._cache.tree_core
        private = core.tags.private_ids(self.ref)
        freed = 0
        top_end = -1 if self._span is None else core.path_end(self._span.top)
        for node in core.tags.branch_nodes(self.ref):
            if node.id not in private or node.evicted or core.path_end(node) <= top_end:
                continue
            if self._cache.can_demote(node):
                freed += self._cache.demote_node(node)
            elif core.is_locked(node):
                self._clipped = self._clipped or "in_use"
        return freed


class PrefetchBudget:
    """Device tokens that the prefetches of one action may take together.

    Asked for once, when the first of them has something to load.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._left: int | None = None

    def left(self) -> int:
        if self._left is None:
            self._left = self._cache.prefetch_budget_tokens()
        return self._left

    def take(self, n_tokens: int) -> None:
        self._left = self.left() - n_tokens


class PrefetchTask:
    """Load the session's current branch from host to device, ahead of its next request.

    Loads the longest root-first part that fits the budget.
    """

    def __init__(
        self, cache: Any, ref: SessionRef, budget: PrefetchBudget, span: Any = None
    ) -> None:
        self._cache = cache
        self.keys = {ref.key: None}
        self._span = None if span is None else (span.start, span.end)
        self._outcome = done(reason="already_on_device")
        self._node_id: int | None = None
        cache.tree_core.tags.rejoin(ref)
        leaf = cache.tree_core.tags.current(ref) if span is None else span.bottom
        missing = [node for node in path_up(leaf) if node.evicted]
        if missing:
            self._start(missing[::-1], budget)

    def _start(self, missing: list[Any], budget: PrefetchBudget) -> None:
        target, total = None, 0
        for node in missing:
            _, host = self._cache.tree_core.tokens_of(node)
            if not host or total + host > budget.left():
                break
            target, total = node, total + host
        if target is None or not self._cache.load_back(target.id, mem_quota=None):
            self._outcome = not_done(ActionStatus.DROPPED, "no_room")
            return
        budget.take(total)
        self._node_id = target.id
        clipped = target is not missing[-1]
        self._outcome = Outcome(
            status=ActionStatus.CLIPPED if clipped else ActionStatus.DONE,
            tokens=TierTokens(device=total),
            reason="budget" if clipped else "",
        )

    def cancel(self, key: SessionKey) -> None:
        """The session's request is here: it takes over what is in flight."""

    def poll(self) -> Outcome | None:
        if self._node_id is not None and self._node_id in self._cache.ongoing_load_back:
            return None
        return msgspec.structs.replace(self._outcome, span=self._span)


class TaskGroup:
    """Several moves under one action: done when all are, tokens added up. `again`: one of
    them is to be started again when the session's requests are over."""

    again = False

    def __init__(self, parts: list[Any]) -> None:
        self._tasks = [part for part in parts if not isinstance(part, Outcome)]
        self._outcomes = [part for part in parts if isinstance(part, Outcome)]
        self.keys = dict.fromkeys(key for task in self._tasks for key in task.keys)

    def cancel(self, key: SessionKey) -> None:
        for task in self._tasks:
            if key in task.keys:
                task.cancel(key)

    def poll(self) -> Outcome | None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            outcome = task.poll()
            if outcome is None:
                self._tasks.append(task)
            else:
                self._outcomes.append(outcome)
        if self._tasks:
            return None
        clipped = [o for o in self._outcomes if o.status is not ActionStatus.DONE]
        tokens = add_tokens([o.tokens for o in self._outcomes])
        return Outcome(
            status=ActionStatus.CLIPPED if clipped else ActionStatus.DONE,
            tokens=tokens,
            reason=clipped[0].reason if clipped else "",
        )
