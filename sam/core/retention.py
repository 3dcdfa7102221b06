"""How soon a cache node may go: the first, simple eviction order.

Owns the order between nodes. Must never know the tree, the tiers' sizes or a clock: the
caller brings the states of a node's live users and the node's last access.

Evict the *smallest* key first: nodes that only ended sessions used; then branches that a
live session left (superseded); then nodes of offloaded sessions with a host copy
(dropping those loses nothing); then everything else, unowned or idle, in plain LRU order;
then what is about to resume or runs. A node's class is that of its live user who needs it
soonest. With no sessions every node has the same class, and the order is exactly LRU.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from sam.core.lineage import SessionState


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
