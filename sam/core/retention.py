"""How soon a cache node may go: classes, standings of sessions, next-use keys.

Owns two statements of the order between nodes. The first, `RetentionClass`, is the simple
one: classes in a strict order, recency inside. The second, `NextUse`, is the recommended
policy (source: the project's policy notes): a key that says in how many seconds a node is
likely to be used again; the largest is evicted first, a node has the smallest key among
its users. Must never know the tree, the tiers' sizes or a clock: the caller brings
states, last accesses and the time. The structures that find the largest key live in
`sam.core.order` and `sam.core.next_use`.

By class, the *smallest* key goes first: nodes that only ended sessions used; then branches
that a live session left (superseded); then nodes of offloaded sessions with a host copy
(dropping those loses nothing); then everything else, unowned or idle, in plain LRU order;
then what is about to resume or runs. A node's class is that of its live user who needs it
soonest. With no sessions every node has the same class, and the order is exactly LRU.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import msgspec

from sam.core.lineage import SessionState

DEFAULT_PLAIN_GAP_S = 100.0


class RetentionClass(IntEnum):
    """Eviction classes, first to go first."""

    ENDED = 0
    SUPERSEDED = 1
    OFFLOADED = 2
    PLAIN = 3
    RESUMING = 4
    RUNNING = 5


class RetentionKey(NamedTuple):
    """Sorts nodes, smallest evicted first. `tie_break` is the caller's: smaller goes first."""

    retention_class: int
    last_access: float
    tie_break: int = 0


_CLASS_OF_STATE = {
    SessionState.OFFLOADED: RetentionClass.OFFLOADED,
    SessionState.IDLE: RetentionClass.PLAIN,
    SessionState.RESUMING: RetentionClass.RESUMING,
    SessionState.RUNNING: RetentionClass.RUNNING,
}


def class_of_state(state: SessionState) -> RetentionClass | None:
    """Class that a live session's current branch counts as; None if it is not live."""
    return _CLASS_OF_STATE.get(state)


def retention_class(
    states_of_live_users: Iterable[SessionState],
    any_ended_users: bool,
    host_backed: bool = True,
) -> int:
    """Class of a node from its users; shared sessions (`Session.shared`) are no users.

    SUPERSEDED is the caller's to give: it knows which branch a session left.
    An OFFLOADED user of a node without a host copy counts as idle. ENDED and NAMED
    states among the live users are ignored.
    """
    best: int | None = None
    for state in states_of_live_users:
        of_user = _CLASS_OF_STATE.get(state)
        if of_user is RetentionClass.OFFLOADED and not host_backed:
            of_user = RetentionClass.PLAIN
        if of_user is not None and (best is None or of_user > best):
            best = of_user
    if best is not None:
        return int(best)
    return int(RetentionClass.ENDED if any_ended_users else RetentionClass.PLAIN)


class NextUseRank(IntEnum):
    """Coarse part of a next-use key, the last to go first. A running session locks."""

    RUNNING = 0
    QUEUED = 1
    IDLE = 2
    OFFLOADED = 3
    SUPERSEDED = 4
    ENDED = 5


class NextUse(NamedTuple):
    """Key of a node: the largest is evicted first.

    `use_in_s` is the expected time to the next use (IDLE, OFFLOADED), the age (ENDED), or
    0 for the ranks that know no order inside.
    """

    rank: int
    use_in_s: float


class Standing(msgspec.Struct, frozen=True, gc=False):
    """What a user of nodes (a session, or the branches it left) counts as, until changed.

    `since_s` is when it became idle, or its last access if ENDED. `gap_s` is the estimate
    g of its idle time, fixed when the idle time starts; an ENDED one needs it for the time
    in which ends are not trusted. `hint_s` is the client's own estimate, from `since_s` on.
    OFFLOADED is an idle session whose nodes may go early where a host copy exists.
    """

    rank: NextUseRank
    since_s: float = 0.0
    gap_s: float = 0.0
    hint_s: float | None = None

    @property
    def late_at_s(self) -> float:
        """When a hinted session counts as overdue: then age / 2 exceeds hint - age."""
        return self.since_s + 2.0 * (self.hint_s or 0.0) / 3.0


def idle_use_in_s(standing: Standing, now_s: float) -> float:
    """R of an idle session: `age + g`, or `max(hint - age, age / 2) + 1` with a hint."""
    age_s = now_s - standing.since_s
    if standing.hint_s is None:
        return age_s + standing.gap_s
    return max(standing.hint_s - age_s, age_s / 2.0) + 1.0


def next_use(
    standing: Standing, now_s: float, *, backed: bool = False, trust_ends: bool = True
) -> NextUse:
    """Key that one user gives a node; `backed`: the node has a copy one tier down.

    While ends are not trusted, an ended session counts as idle.
    """
    rank = standing.rank
    if rank is NextUseRank.ENDED:
        if trust_ends:
            return NextUse(rank, now_s - standing.since_s)
        rank = NextUseRank.IDLE
    elif rank is NextUseRank.OFFLOADED and not backed:
        rank = NextUseRank.IDLE
    if rank is NextUseRank.IDLE or rank is NextUseRank.OFFLOADED:
        return NextUse(rank, idle_use_in_s(standing, now_s))
    return NextUse(rank, 0.0)


def plain_next_use(
    last_access_s: float, now_s: float, plain_gap_s: float = DEFAULT_PLAIN_GAP_S
) -> NextUse:
    """Key of a node that nobody owns: idle since its last access, with label `plain`."""
    return NextUse(NextUseRank.IDLE, now_s - last_access_s + plain_gap_s)
