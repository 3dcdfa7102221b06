"""The eviction orders of both tiers over one tree core's nodes.

Owns one `LeafOrder` per tier, the message time of accesses, and the replacement of both
when the tree is another one. Must never decide what a session is worth: that comes in
through `set_user`, as a `RetentionTracker` tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from sam.core.leaf_order import LeafOrder, LeafView
from sam.core.policies import DEFAULT_POLICY, create_leaves
from sam.core.recency import AccessClock
from sam.core.retention import NextUse, Standing
from sam.srt.mem_cache.ownership import OwnershipTags


def _nothing_is_stored(node_id: int) -> bool:
    """Host memory is the last tier that the tree knows of."""
    return False


class TierOrders:
    """See the module. `when` names the attribute that holds a node's last access.

    `is_device_leaf`, `is_host_leaf`: whether a node may leave that tier now. `is_stored`,
    by id: whether a pool below the host has the node; it may change while the node is locked.
    """

    is_stored: Callable[[int], bool] = staticmethod(_nothing_is_stored)

    def __init__(
        self,
        tags: OwnershipTags,
        is_device_leaf: Callable[[Any], bool],
        is_host_leaf: Callable[[Any], bool],
        when: str,
    ) -> None:
        self.policy = DEFAULT_POLICY
        self.clock = AccessClock()
        self.now_s = 0.0
        self._tags = tags
        self._leaf_tests = (is_device_leaf, is_host_leaf)
        self._when_of = attrgetter(when)
        self._trust_ends, self._use_lru = True, False
        self._on_victim: Callable[[str, LeafOrder, Any], None] | None = None
        self.bind({})

    def bind(self, nodes: Mapping[int, Any]) -> None:
        """From now on the nodes are these; no leaf is queued, users stay."""
        users = self.device.standings() if hasattr(self, "device") else []
        self._nodes = nodes
        is_device_leaf, is_host_leaf = self._leaf_tests
        self.device = self._create(nodes, is_device_leaf, attrgetter("backuped"))
        self.host = self._create(nodes, is_host_leaf, lambda node: self.is_stored(node.id))
        self._each("trust_ends", self._trust_ends)
        self._each("use_lru", self._use_lru)
        self.host.share_users(self.device)
        self.on_victim = self._on_victim
        for name, standing in users:
            self.set_user(name, standing)

    @property
    def on_victim(self) -> Callable[[str, LeafOrder, Any], None] | None:
        """Called with tier, its order and each leaf that is chosen to go; it must not raise."""
        return self._on_victim

    @on_victim.setter
    def on_victim(self, call: Callable[[str, LeafOrder, Any], None] | None) -> None:
        self._on_victim = call
        for tier, order in (("device", self.device), ("host", self.host)):
            order.on_victim = None if call is None else partial(call, tier, order)

    def use_policy(self, policy: str) -> None:
        """Choose the policy. Raises ValueError naming the choices."""
        self.policy = policy
        self.bind(self._nodes)

    def advance(self, time_s: float, tick: int) -> None:
        """A message came; accesses after `tick` are at its time or later."""
        if time_s > self.now_s:
            self.now_s = time_s
            self.clock.mark(tick, time_s)

    def key_of(self, node: Any) -> NextUse:
        """The node's key on the tier that it would leave next; the largest goes first."""
        return (self.host if node.evicted else self.device).key_of(node, self.now_s)

    # -- as a RetentionTracker sees it --------------------------------------------

    def set_user(self, name: Hashable, standing: Standing) -> None:
        self.device.set_user(name, standing)
        self.host.update_user(name, standing)

    def drop_user(self, name: Hashable) -> None:
        self.device.drop_user(name)
        self.host.drop_user(name)

    @property
    def trust_ends(self) -> bool:
        return self._trust_ends

    @trust_ends.setter
    def trust_ends(self, trust: bool) -> None:
        self._trust_ends = trust
        self._each("trust_ends", trust)

    @property
    def use_lru(self) -> bool:
        return self._use_lru

    @use_lru.setter
    def use_lru(self, use: bool) -> None:
        self._use_lru = use
        self._each("use_lru", use)

    # -- inside -------------------------------------------------------------------

    def _each(self, name: str, value: bool) -> None:
        setattr(self.device, name, value)
        setattr(self.host, name, value)

    def _create(
        self,
        nodes: Mapping[int, Any],
        is_leaf: Callable[[Any], bool],
        backed_of: Callable[[Any], bool],
    ) -> LeafOrder:
        view = LeafView(
            nodes=nodes,
            is_leaf=is_leaf,
            users_of=self._tags.users_of,
            when_of=self._when_of,
            time_of=self.clock.time_of,
            backed_of=backed_of,
        )
        return create_leaves(self.policy, view)
