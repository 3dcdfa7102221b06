"""Records of the session table and the orders in which they may be dropped.

Owns storage, the bounds, and the generation floor. Keeps four insertion-ordered maps per
client and overall (all, named, resting, ended) in step with every change of state, so
that the oldest of each is found in O(1), and the client that holds most in O(log n). A client
is one tenant, or several that one caller may have invented. Must never decide which state a
session enters or when it ages out: that is `sam.core.sessions`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import islice

import msgspec

from sam.core.lineage import (
    RESTING_STATES,
    Session,
    SessionKey,
    SessionRef,
    SessionState,
    detach,
)


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the table. Records with requests may exceed them, nothing else."""

    max_sessions: int = 10_000
    max_per_tenant: int = 5_000
    max_named: int = 10_000
    idle_timeout_s: float = 3_600.0


DEFAULT_LIMITS = SessionLimits()
_MIN_BEFORE_COMPACTION = 64


class SessionOrder:
    """Records of one scope (a tenant, or all) by what may be dropped, oldest first."""

    __slots__ = ("ended", "named", "nodes", "resting")

    def __init__(self) -> None:
        self.nodes: dict[SessionKey, Session] = {}
        # Not dict: finding the first key of a dict is O(keys deleted before it).
        self.named: OrderedDict[SessionKey, Session] = OrderedDict()
        self.resting: OrderedDict[SessionKey, Session] = OrderedDict()
        self.ended: OrderedDict[SessionKey, Session] = OrderedDict()

    @property
    def n_sessions(self) -> int:
        return len(self.nodes) - len(self.named)

    def oldest_droppable(self, keep: Session) -> Session | None:
        for group in (self.ended, self.resting):
            for node in islice(group.values(), 2):
                if node is not keep:
                    return node
        return None


class Largest:
    """Which of several names has the largest size; of equal ones the first by name."""

    def __init__(self, size_of: Callable[[str], int]) -> None:
        self._size_of = size_of
        self._heap: list[tuple[int, str]] = []
        self._n_after_compaction = 0

    def changed(self, name: str) -> None:
        """To be told of each change of a size. O(log n)."""
        heappush(self._heap, (-self._size_of(name), name))
        if len(self._heap) > 2 * self._n_after_compaction + _MIN_BEFORE_COMPACTION:
            names = {name for _, name in self._heap}
            self._heap = [(-n, name) for name in names if (n := self._size_of(name))]
            heapify(self._heap)
            self._n_after_compaction = len(self._heap)

    def name(self) -> str | None:
        """The largest; None if all are empty."""
        while self._heap:
            size, name = self._heap[0]
            if size and self._size_of(name) == -size:
                return name
            heappop(self._heap)
        return None


class SessionStore:
    """Sessions by key, overall and per client. See SessionTable for the rules it serves."""

    def __init__(
        self,
        limits: SessionLimits,
        counters: dict[str, int],
        client_of: Callable[[str], str],
    ) -> None:
        self.limits = limits
        self.all = SessionOrder()
        self.dropped: list[SessionRef] = []
        self.generation_floor = 0
        self.on_state: Callable[[Session, SessionState], None] | None = None
        self._counters = counters
        self._client_of = client_of
        self._clients: dict[str, SessionOrder] = {}
        self._most_sessions = Largest(lambda client: self._of(client).n_sessions)
        self._most_named = Largest(lambda client: len(self._of(client).named))

    def of_tenant(self, tenant: str | None) -> Iterable[Session]:
        """Its records, or all, in order of first appearance."""
        if tenant is None:
            return self.all.nodes.values()
        of_client = self._of(self._client_of(tenant)).nodes.values()
        return (session for session in of_client if session.key.tenant == tenant)

    def _of(self, client: str) -> SessionOrder:
        return self._clients.get(client) or SessionOrder()

    def _orders(self, session: Session) -> tuple[SessionOrder, SessionOrder]:
        return self.all, self._clients[self._client_of(session.key.tenant)]

    def _sizes_changed(self, session: Session) -> None:
        """The session became a placeholder, or none any more, or is no record any more."""
        client = self._client_of(session.key.tenant)
        self._most_sessions.changed(client)
        self._most_named.changed(client)

    def node(self, key: SessionKey) -> Session:
        """The record of `key`, new and NAMED if there was none."""
        session = self.all.nodes.get(key)
        if session is None:
            session = Session(key)
            self._clients.setdefault(self._client_of(key.tenant), SessionOrder())
            for order in self._orders(session):
                order.nodes[key] = session
                order.named[key] = session
            self._sizes_changed(session)
        return session

    def set_state(self, session: Session, state: SessionState) -> None:
        """Change state and keep every order in step; a place among the resting is kept."""
        if state is not SessionState.RESUMING:
            session.lease_until_s = None
        key, old = session.key, session.state
        session.state = state
        was_resting, is_resting = old in RESTING_STATES, state in RESTING_STATES
        for order in self._orders(session):
            if old is SessionState.NAMED:
                del order.named[key]
            elif old is SessionState.ENDED:
                order.ended.pop(key, None)
            elif was_resting and not is_resting:
                del order.resting[key]
            if state is SessionState.NAMED:
                order.named[key] = session
            elif state is SessionState.ENDED and not session.requests:
                order.ended[key] = session
            elif is_resting and not was_resting:
                order.resting[key] = session
        if (old is SessionState.NAMED) != (state is SessionState.NAMED):
            self._sizes_changed(session)
        if self.on_state is not None:
            self.on_state(session, old)

    def refresh(self, session: Session) -> None:
        """Make a resting session the youngest of its order."""
        for order in self._orders(session):
            order.resting.move_to_end(session.key)

    def drained(self, session: Session) -> None:
        """An ENDED session lost its last request: it may be dropped from now on."""
        for order in self._orders(session):
            order.ended[session.key] = session

    def enforce_bounds(self, opened: Session) -> None:
        """Drop what exceeds the bounds after `opened` was opened, never `opened` itself.

        Over its own bound the opener's client pays; over the overall one the client that
        holds most, so that nobody is pushed out of an equal share of the table.
        """
        client, limits = self._client_of(opened.key.tenant), self.limits
        own = self._clients[client]
        while own.n_sessions > limits.max_per_tenant:
            if not self._drop_oldest(own, opened):
                break
        while self.all.n_sessions > limits.max_sessions:
            largest = self._of(self._most_sessions.name() or client)
            if not self._drop_oldest(largest, opened) and not self._drop_oldest(self.all, opened):
                break
        over_own = own.n_sessions > limits.max_per_tenant
        if over_own or self.all.n_sessions > limits.max_sessions:
            self._counters["over_capacity"] += 1
        while len(own.named) > limits.max_per_tenant:
            self._drop_named(next(iter(own.named.values())))
        while len(self.all.named) > limits.max_named:
            largest = self._of(self._most_named.name() or client)
            self._drop_named(next(iter(largest.named.values())))

    def _drop_oldest(self, order: SessionOrder, keep: Session) -> bool:
        victim = order.oldest_droppable(keep)
        if victim is None:
            return False
        self._counters["dropped_capacity"] += 1
        self.dropped.append(victim.ref)
        self.generation_floor = max(self.generation_floor, victim.generation)
        victim.requests.clear()
        self.set_state(victim, SessionState.NAMED)
        victim.waiting_tool, victim.tool_name = False, None
        self.forget_unused(victim)
        return True

    def _drop_named(self, named: Session) -> None:
        """Forget a placeholder although something hangs below it: its children become roots."""
        self._counters["dropped_named"] += 1
        for child in list(named.children.values()):
            detach(child)
        self.forget_unused(named)

    def forget_unused(self, session: Session) -> None:
        """Remove a childless placeholder, and upwards all that it was the last child of."""
        node: Session | None = session
        while node is not None and node.state is SessionState.NAMED and not node.children:
            for order in self._orders(node):
                del order.nodes[node.key]
                del order.named[node.key]
            client = self._client_of(node.key.tenant)
            if not self._clients[client].nodes:
                del self._clients[client]
            self._sizes_changed(node)
            node = detach(node)
