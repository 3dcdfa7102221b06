"""The session forest: records, parent links, walks.

Owns which session hangs below which. Lineage comes only from `parent_session_id`,
within one tenant. Every walk is iterative (trees may be thousands deep) and in a
deterministic order: children in the order in which they were attached. Must never
decide about states, recency or capacity.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

SHARED_SESSION_IDS = ("default_session",)
"""Ids that clients without an id of their own send: many clients share each.

A shared session is tracked for what runs, but it is *unowned*: it is always a lone
root, never somebody's parent, and no hint can end, offload or prefetch it.
"""


class SessionKey(NamedTuple):
    """Owner identity: tenant (API key, cache salt, extra key) and opaque session id."""

    tenant: str
    session_id: str


class SessionRef(NamedTuple):
    """One life of a session: what tier work and ownership tags carry."""

    key: SessionKey
    generation: int


class SessionState(StrEnum):
    """Resource state. NAMED: known only as somebody's parent, or dropped for capacity."""

    NAMED = "named"
    RUNNING = "running"
    RESUMING = "resuming"
    IDLE = "idle"
    OFFLOADED = "offloaded"
    ENDED = "ended"


RESTING_STATES = (SessionState.RESUMING, SessionState.IDLE, SessionState.OFFLOADED)
LIVE_STATES = (SessionState.RUNNING, *RESTING_STATES)


class Session:
    """One record of the table; read-only outside `sam.core`.

    `generation` counts the lives of the id (0 while NAMED and never bound).
    `requests` maps the id of each queued or running request to its generation:
    requests of older generations drain there after an end. Times are message times in
    seconds.
    """

    __slots__ = (
        "children",
        "generation",
        "key",
        "last_active_s",
        "lease_until_s",
        "n_running",
        "parent",
        "requests",
        "state",
        "state_before_lease",
        "tool_name",
        "waiting_tool",
    )

    def __init__(self, key: SessionKey) -> None:
        self.key = key
        self.parent: Session | None = None
        self.children: dict[SessionKey, Session] = {}
        self.state = SessionState.NAMED
        self.state_before_lease = SessionState.IDLE
        self.generation = 0
        self.requests: dict[str, int] = {}
        self.n_running = 0
        self.waiting_tool = False
        self.tool_name: str | None = None
        self.last_active_s = 0.0
        self.lease_until_s: float | None = None

    @property
    def ref(self) -> SessionRef:
        return SessionRef(self.key, self.generation)

    @property
    def live(self) -> bool:
        """Bound and not ended: its tags count."""
        return self.state in LIVE_STATES

    @property
    def shared(self) -> bool:
        """Used by unrelated clients: its nodes must be treated as unowned."""
        return self.key.session_id in SHARED_SESSION_IDS

    @property
    def n_draining(self) -> int:
        """Requests of ended generations that have not finished yet."""
        return len(self.requests) - self.n_running

    def __repr__(self) -> str:
        return f"Session({self.key!r}, gen={self.generation}, {self.state.value})"


def attach(child: Session, parent: Session) -> None:
    """Hang a parentless `child` below `parent`, last among its children."""
    child.parent = parent
    parent.children[child.key] = child


def detach(child: Session) -> Session | None:
    """Make `child` a root with its subtree kept; return the former parent."""
    parent = child.parent
    if parent is not None:
        del parent.children[child.key]
        child.parent = None
    return parent


def would_cycle(child: Session, parent: Session) -> bool:
    """Whether `parent` is `child` or below it. O(depth of parent), O(1) for a leaf child."""
    if not child.children:
        return child is parent
    node: Session | None = parent
    while node is not None:
        if node is child:
            return True
        node = node.parent
    return False


def pre_order(root: Session) -> list[Session]:
    """`root`, then each child's subtree in attach order."""
    order: list[Session] = []
    stack = [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(node.children.values()))
    return order


def post_order(root: Session) -> list[Session]:
    """Children before parents, siblings in attach order."""
    order: list[Session] = []
    stack = [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children.values())
    order.reverse()
    return order


def depth_of(node: Session, known: dict[SessionKey, int]) -> int:
    """Edges up to the root. `known` memoises over one page of a report."""
    path = []
    up: Session | None = node
    while up is not None and up.key not in known:
        path.append(up)
        up = up.parent
    depth = -1 if up is None else known[up.key]
    for below in reversed(path):
        depth += 1
        known[below.key] = depth
    return depth
