"""How soon a cache node may go: standings of sessions, next-use keys.

Owns the recommended policy's key (source: the project's policy notes): in how many seconds
a node is likely to be used again. The largest is evicted first; a node has the smallest
key among its users. Must never know the tree, the tiers' sizes or a clock: the caller
brings standings, last accesses and the time. The structures that find the largest key
live in `sam.core.leaf_order` and `sam.core.next_use`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import msgspec

DEFAULT_PLAIN_GAP_S = 200.0


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

    `use_in_s` is the expected time to the next use (IDLE, OFFLOADED), the age (ENDED), minus
    the time in the queue (QUEUED: who came last is served last; infinite for who is only
    promised), or 0 for the ranks that know no order inside.
    """

    rank: int
    use_in_s: float


class Standing(msgspec.Struct, frozen=True, gc=False):
    """What a user of nodes (a session, or the branches it left) counts as, until changed.

    `since_s` is when it became idle, its last access if ENDED, its arrival if QUEUED. `gap_s`
    is the estimate g of its idle time, fixed when the idle time starts; an ENDED one needs it
    for the time in which ends are not trusted. `hint_s` is the client's own estimate, from
    `since_s` on. OFFLOADED is an idle session whose nodes may go early where a host copy exists.
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
    return NextUse(rank, standing.since_s - now_s if rank is NextUseRank.QUEUED else 0.0)


def plain_next_use(
    last_access_s: float, now_s: float, plain_gap_s: float = DEFAULT_PLAIN_GAP_S
) -> NextUse:
    """Key of a node that nobody owns: idle since its last access, with label `plain`."""
    return NextUse(NextUseRank.IDLE, now_s - last_access_s + plain_gap_s)
