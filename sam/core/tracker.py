"""From what happens to sessions to what their nodes are worth.

Owns, per session, the current idle time (since when, which label, which hint) and tells
every order what the session counts as. Must never see a node, a tier or a clock. It
tells all orders alike, so device, host and simulated orders agree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

import msgspec

from sam.core.gaps import LABEL_OTHER, GapEstimator
from sam.core.guard import EndTrust, HintTrust
from sam.core.retention import NextUseRank, Standing

_MIN_BEFORE_COMPACTION = 64
_MAX_HINTS = 32
"""Of one idle time: what comes after that many is not listened to, for each has to be judged."""
_PROMISED = Standing(NextUseRank.QUEUED, float("inf"))
"""Somebody says that a request will come: not before those that have."""
_RUNNING = Standing(NextUseRank.RUNNING)
_SUPERSEDED = Standing(NextUseRank.SUPERSEDED)


class OrderSink(Protocol):
    """What an order has to take: `EvictionOrder` and `GhostPair` do."""

    trust_ends: bool

    def set_user(self, user: Hashable, standing: Standing) -> None: ...

    def drop_user(self, user: Hashable) -> None: ...


class LeftBranches(NamedTuple):
    """User id of all branches that a session left: its SUPERSEDED nodes."""

    session: Hashable


class OffloadedTail(NamedTuple):
    """User id of the part of its branch that a session had offloaded."""

    session: Hashable
    part: str = "tail"


class _Idle(msgspec.Struct, eq=False, gc=False):
    """What is known of a session's idle time, also of the one to come.

    `hint`: given at, expected, in seconds; `replaced`: those before it in this idle time.
    `sent_s`: message time of the newest request; `queued_s`: of the one that waits longest.
    """

    since_s: float
    label: str = LABEL_OTHER
    gap_s: float = 0.0
    hint: tuple[float, float] | None = None
    replaced: tuple[tuple[float, float], ...] = ()
    sent_s: float = float("-inf")
    queued_s: float | None = None
    retained_until_s: float | None = None
    resting: bool = False
    resuming: bool = False
    learns: bool = True
    offloaded: bool = False
    ended: bool = False
    has_left: bool = False
    has_tail: bool = False
    hints: HintTrust | None = None

    def hint_s(self) -> float | None:
        """The hint, counted from the start of the idle time."""
        if self.hint is None:
            return None
        given_s, expected_s = self.hint
        return max(given_s - self.since_s, 0.0) + expected_s

    def hints_said(self) -> list[tuple[float, float]]:
        """All of this idle time: (age, how much longer from then on), by age."""
        said: list[tuple[float, float]] = []
        for given_s, expected_s in [*self.replaced, *filter(None, [self.hint])]:
            before_s = said[-1][0] if said else 0.0
            said.append((max(given_s - self.since_s, before_s), expected_s))
        return said


class RetentionTracker:
    """Sessions to standings. A session is any id that its caller uses in orders, too.

    Times are message times in seconds. Calls about a session not seen before make it
    known, except `expect`, `offloaded`, `resuming` and `forget`. Every call is O(orders *
    leaves of the session * log n).
    """

    def __init__(
        self,
        orders: Iterable[OrderSink] = (),
        gaps: GapEstimator | None = None,
        end_trust: EndTrust | None = None,
    ) -> None:
        self.gaps = GapEstimator() if gaps is None else gaps
        self.end_trust = EndTrust() if end_trust is None else end_trust
        self._orders: list[OrderSink] = list(orders)
        self._sessions: dict[Hashable, _Idle] = {}
        self._retained: list[tuple[float, int, Hashable]] = []
        self._n_retained_made = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: Hashable) -> bool:
        return session in self._sessions

    def attach(self, order: OrderSink) -> None:
        """One more order to tell, before any session is known."""
        assert not self._sessions
        self._orders.append(order)

    # -- the life of a session ----------------------------------------------------

    def queued(self, session: Hashable, time_s: float, sent_s: float | None = None) -> None:
        """A request arrived. If the session was idle or ended, it returned: gaps learn.

        `sent_s`: the request's own message time, where others were newer. A hint given before
        it was for the idle time that ends here.
        """
        idle = self._known(session, time_s)
        idle.sent_s = max(idle.sent_s, time_s if sent_s is None else sent_s)
        idle.resuming = False
        if idle.resting:
            if idle.learns:
                self.gaps.observe(session, idle.label, time_s - idle.since_s)
                self._judge_hint(idle, time_s - idle.since_s)
            idle.resting = False
        idle.replaced = ()
        if idle.ended:
            idle.ended = False
            if idle.has_left:
                self._tell(LeftBranches(session), _SUPERSEDED)
            self._trust(self.end_trust.returned())
        idle.offloaded = False
        if idle.hint is not None and idle.hint[0] < idle.sent_s:
            idle.hint = None
        if idle.queued_s is None:
            idle.queued_s = time_s
        standing = Standing(NextUseRank.QUEUED, idle.queued_s)
        self._tell(session, standing)
        if idle.has_tail:
            self._tell(OffloadedTail(session), standing)

    def running(self, session: Hashable, time_s: float) -> None:
        """A request of the session runs: the engine locks what it uses."""
        idle = self._known(session, time_s)
        if idle.resting or idle.ended:
            self.queued(session, time_s)
        idle.queued_s = None
        self._tell(session, _RUNNING)

    def idle(
        self,
        session: Hashable,
        time_s: float,
        label: str = LABEL_OTHER,
        *,
        learns: bool = True,
    ) -> None:
        """The session's last request finished; `label` from `sam.core.gaps.label_of`.

        The estimate is made here and stands until the session returns. Without `learns`
        the return teaches nothing: it is no answer to anybody.
        """
        idle = self._known(session, time_s)
        if idle.ended:
            return
        idle.since_s, idle.label, idle.resting = time_s, label, True
        idle.queued_s = None
        idle.learns, idle.replaced = learns, ()
        idle.gap_s = self.gaps.gap_s(session, label)
        self._tell(session, self._standing(idle))
        if idle.has_tail:
            tail = Standing(NextUseRank.OFFLOADED, time_s, idle.gap_s)
            self._tell(OffloadedTail(session), tail)

    def expect(self, session: Hashable, time_s: float, expected_idle_s: float) -> str:
        """The client's estimate of the time from the end of this answer to its next request.

        While a request is queued or runs, it is for the idle time to come; else it counts
        from `time_s` on. No-op for an unknown or ended session, for one that a newer request
        than the hint has come from, and beyond `_MAX_HINTS` of one idle time: returns why,
        else nothing.
        """
        idle = self._sessions.get(session)
        if idle is None or idle.ended:
            return "not_live"
        if time_s < idle.sent_s:
            return "overtaken"
        if idle.resting and idle.hint is not None:
            if len(idle.replaced) == _MAX_HINTS - 1:
                return "too_many_hints"
            idle.replaced += (idle.hint,)
        idle.hint = (time_s, max(expected_idle_s, 0.0))
        if idle.resting:
            self._tell(session, self._standing(idle))
        return ""

    def relabel(self, session: Hashable, label: str) -> None:
        """More is known of why the session rests. No-op if it does not."""
        idle = self._sessions.get(session)
        if idle is not None and idle.resting and not idle.ended:
            idle.label, idle.gap_s = label, self.gaps.gap_s(session, label)
            self._tell(session, self._standing(idle))

    def retain(self, session: Hashable, time_s: float, ttl_s: float) -> None:
        """While it rests it counts as about to be queued, until `ttl_s` have passed; a later
        call replaces an earlier one, `ttl_s` 0 ends it. No-op for an unknown or ended one."""
        idle = self._sessions.get(session)
        if idle is None or idle.ended:
            return
        idle.retained_until_s = time_s + ttl_s if ttl_s > 0 else None
        if ttl_s > 0:
            self._n_retained_made += 1
            heappush(self._retained, (time_s + ttl_s, self._n_retained_made, session))
            if len(self._retained) > 2 * len(self._sessions) + _MIN_BEFORE_COMPACTION:
                self._compact()
        if idle.resting:
            self._tell(session, self._standing(idle))

    def _compact(self) -> None:
        """Drop what later calls replaced, and sessions that are not known any more."""
        known = self._sessions
        self._retained = [
            entry
            for entry in self._retained
            if entry[2] in known and known[entry[2]].retained_until_s == entry[0]
        ]
        heapify(self._retained)

    def advance(self, now_s: float) -> list[Hashable]:
        """Time moved on; returns sessions that are not retained any more."""
        over = []
        while self._retained and self._retained[0][0] <= now_s:
            until_s, _, session = heappop(self._retained)
            idle = self._sessions.get(session)
            if idle is None or idle.retained_until_s != until_s:
                continue
            idle.retained_until_s = None
            over.append(session)
            if idle.resting and not idle.ended:
                self._tell(session, self._standing(idle))
        return over

    def offloaded(self, session: Hashable, offloaded: bool = True) -> None:
        """Nodes of an idle session with a host copy may go early. No-op if not idle."""
        idle = self._sessions.get(session)
        if idle is not None and idle.resting and not idle.ended:
            idle.offloaded, idle.resuming = offloaded, False
            self._tell(session, self._standing(idle))

    def resuming(self, session: Hashable, resuming: bool = True) -> None:
        """A prefetch says that the session will soon be queued; False: its lease ran out.

        No return yet: the idle time goes on, and comes back with False. No-op if not idle.
        """
        idle = self._sessions.get(session)
        if idle is not None and idle.resting and not idle.ended:
            idle.resuming = resuming
            self._tell(session, self._standing(idle))

    def ended(self, session: Hashable, time_s: float, left_as: Hashable | None = None) -> None:
        """No longer needed. It stays known until `forget`, to notice a return.

        `left_as`: the user under which what it leaves behind counts from now on, whether
        the session comes back or not, until `drop_left`.
        """
        idle = self._known(session, time_s)
        if not idle.ended:
            self._end(session, idle, time_s)
        if left_as is not None:
            self._tell(left_as, self._standing(idle))

    def _end(self, session: Hashable, idle: _Idle, time_s: float) -> None:
        if not idle.resting:
            idle.since_s, idle.label, idle.resting = time_s, LABEL_OTHER, True
            idle.gap_s = self.gaps.gap_s(session, idle.label)
        idle.ended, idle.offloaded, idle.hint, idle.replaced = True, False, None, ()
        idle.retained_until_s, idle.resuming, idle.queued_s = None, False, None
        standing = self._standing(idle)
        self._tell(session, standing)
        if idle.has_left:
            self._tell(LeftBranches(session), standing)
        self._trust(self.end_trust.ended())

    def expired(self, session: Hashable, time_s: float, left_as: Hashable) -> None:
        """Nobody said that it ended, but it is given up: what it leaves counts as ended
        under `left_as`. To be followed by `forget`: a return is no broken promise."""
        idle = self._sessions.get(session)
        label = LABEL_OTHER if idle is None else idle.label
        since_s = idle.since_s if idle is not None and idle.resting else time_s
        gap_s = self.gaps.gap_s(session, label)
        self._tell(left_as, Standing(NextUseRank.ENDED, since_s, gap_s))

    def left(self, left_as: Hashable, time_s: float) -> None:
        """An ended life still computes: that counts as ended, too."""
        gap_s = self.gaps.gap_s(None, LABEL_OTHER)
        self._tell(left_as, Standing(NextUseRank.ENDED, time_s, gap_s))

    def drop_left(self, left_as: Hashable) -> None:
        """Nothing counts under `left_as` any more. No-op if nothing did."""
        for order in self._orders:
            order.drop_user(left_as)

    def forget(self, session: Hashable) -> None:
        """The caller's table dropped it: its nodes become unowned, its gaps unknown."""
        idle = self._sessions.pop(session, None)
        self.gaps.forget(session)
        for order in self._orders:
            order.drop_user(session)
            if idle is not None and idle.has_left:
                order.drop_user(LeftBranches(session))
            if idle is not None and idle.has_tail:
                order.drop_user(OffloadedTail(session))

    # -- users of nodes -----------------------------------------------------------

    def left_branches(self, session: Hashable) -> LeftBranches:
        """User id for nodes that the session left, known to all orders from now on.

        Raises KeyError for an unknown session.
        """
        idle = self._sessions[session]
        user = LeftBranches(session)
        if not idle.has_left:
            idle.has_left = True
            self._tell(user, self._standing(idle) if idle.ended else _SUPERSEDED)
        return user

    def offloaded_tail(self, session: Hashable, time_s: float) -> OffloadedTail:
        """User id for nodes of the session that it had offloaded, counted from now on.

        Raises KeyError for an unknown session.
        """
        idle = self._sessions[session]
        idle.has_tail = True
        user = OffloadedTail(session)
        gap_s = self.gaps.gap_s(session, idle.label)
        self._tell(user, Standing(NextUseRank.OFFLOADED, time_s, gap_s))
        return user

    # -- inside -------------------------------------------------------------------

    def _known(self, session: Hashable, time_s: float) -> _Idle:
        idle = self._sessions.get(session)
        if idle is None:
            idle = self._sessions[session] = _Idle(time_s)
        return idle

    def _standing(self, idle: _Idle) -> Standing:
        rank = NextUseRank.OFFLOADED if idle.offloaded else NextUseRank.IDLE
        if idle.ended:
            rank = NextUseRank.ENDED
        elif idle.retained_until_s is not None or idle.resuming:
            return _PROMISED
        trusted = idle.hints is None or idle.hints.trusted
        return Standing(rank, idle.since_s, idle.gap_s, idle.hint_s() if trusted else None)

    def _judge_hint(self, idle: _Idle, gap_s: float) -> None:
        said = idle.hints_said()
        if said:
            if idle.hints is None:
                idle.hints = HintTrust()
            idle.hints.returned(gap_s, said, idle.gap_s)

    def _tell(self, user: Hashable, standing: Standing) -> None:
        for order in self._orders:
            order.set_user(user, standing)

    def _trust(self, trusted: bool) -> None:
        for order in self._orders:
            order.trust_ends = trusted
