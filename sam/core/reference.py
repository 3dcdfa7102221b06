"""The naive session table: the oracle that `sam.core.sessions` is tested against.

Owns a second, independent statement of the same rules: one flat list of records, every
question answered by scanning it. Must never be used in a server, and must never share
code with the table beyond plain value types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sam.core.lineage import SHARED_SESSION_IDS, SessionKey, SessionRef
from sam.core.session_store import DEFAULT_LIMITS
from sam.core.sessions import COUNTER_NAMES, SessionLimits

_RESTING = ("idle", "offloaded", "resuming")
_LIVE = ("running", *_RESTING)


@dataclass
class _Record:
    key: SessionKey
    named_order: int
    state: str = "named"
    generation: int = 0
    parent: SessionKey | None = None
    attach_order: int = 0
    rest_order: int = 0
    end_order: int = 0
    last_active_s: float = 0.0
    requests: list[tuple[str, int]] = field(default_factory=list)
    waiting_tool: bool = False
    tool_name: str | None = None
    lease_until_s: float | None = None
    before_lease: str = "idle"

    def current(self) -> list[tuple[str, int]]:
        if self.state != "running":
            return []
        return [r for r in self.requests if r[1] == self.generation]


class ReferenceTable:
    """Same calls and answers as SessionTable, in O(n) or worse each."""

    def __init__(
        self, limits: SessionLimits = DEFAULT_LIMITS, client_of: Callable[[str], str] = str
    ) -> None:
        self.limits = limits
        self.client_of = client_of
        self.now_s = 0.0
        self.records: list[_Record] = []
        self.counters = {name: 0 for name in COUNTER_NAMES}
        self.dropped: list[SessionRef] = []
        self.floor = 0
        self.ticks = 0

    # -- looking things up --------------------------------------------------------

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def find(self, key: SessionKey) -> _Record | None:
        for record in self.records:
            if record.key == key:
                return record
        return None

    def known(self, key: SessionKey) -> _Record:
        record = self.find(key)
        assert record is not None
        return record

    def kids(self, key: SessionKey) -> list[_Record]:
        kids = [r for r in self.records if r.parent == key]
        return sorted(kids, key=lambda r: r.attach_order)

    def ancestors(self, key: SessionKey) -> list[SessionKey]:
        up = []
        record = self.find(key)
        while record is not None and record.parent is not None:
            up.append(record.parent)
            record = self.find(record.parent)
        return up

    def walk(self, key: SessionKey, children_first: bool) -> list[_Record]:
        record = self.find(key)
        if record is None:
            return []
        below = [r for kid in self.kids(key) for r in self.walk(kid.key, children_first)]
        return [*below, record] if children_first else [record, *below]

    # -- the calls ----------------------------------------------------------------

    def bind(self, key: SessionKey, parent_session_id: str | None, time_s: float) -> SessionRef:
        self.now_s = max(self.now_s, time_s)
        record = self.find_or_name(key)
        if record.state not in _LIVE:
            self.open(record)
        record.last_active_s = self.now_s
        record.rest_order = self.tick()
        self.learn_parent(record, parent_session_id)
        self.keep_bounds(key)
        return SessionRef(record.key, record.generation)

    def request_queued(self, key: SessionKey, rid: str, time_s: float) -> int:
        self.now_s = max(self.now_s, time_s)
        record = self.find(key)
        for known, generation in record.requests if record else []:
            if known == rid:
                return generation
        self.bind(key, None, time_s)
        record = self.known(key)
        record.state, record.lease_until_s = "running", None
        record.requests.append((rid, record.generation))
        record.waiting_tool, record.tool_name = False, None
        return record.generation

    def request_finished(
        self,
        key: SessionKey,
        rid: str,
        generation: int,
        time_s: float,
        finish_reason: str | None,
        tool_name: str | None = None,
    ) -> bool:
        if not self.retire(key, rid, generation, time_s):
            self.counters["late_finishes"] += 1
            return False
        record = self.known(key)
        if record.state == "idle" and finish_reason == "tool_calls":
            record.waiting_tool, record.tool_name = True, tool_name
        return True

    def request_aborted(
        self, key: SessionKey, rid: str, generation: int, time_s: float
    ) -> bool:
        if self.retire(key, rid, generation, time_s):
            return True
        self.counters["late_aborts"] += 1
        return False

    def end(self, key: SessionKey, time_s: float, cascade: bool = True) -> list[SessionRef]:
        self.now_s = max(self.now_s, time_s)
        record = self.find(key)
        if record is None:
            return []
        if key.session_id in SHARED_SESSION_IDS:
            self.counters["shared_refused"] += 1
            return []
        victims = self.walk(key, children_first=True) if cascade else [record]
        victims = [r for r in victims if r.state in _LIVE]
        for victim in victims:
            self.close(victim)
        self.counters["ended"] += len(victims)
        return [SessionRef(r.key, r.generation) for r in victims]

    def mark_offloaded(self, key: SessionKey, time_s: float) -> bool:
        self.now_s = max(self.now_s, time_s)
        if not self.may_mark(key):
            return False
        record = self.known(key)
        record.state, record.lease_until_s = "offloaded", None
        return True

    def mark_resuming(self, key: SessionKey, time_s: float, lease_s: float) -> bool:
        self.now_s = max(self.now_s, time_s)
        if not self.may_mark(key):
            return False
        record = self.known(key)
        if record.state != "resuming":
            record.before_lease, record.state = record.state, "resuming"
        record.last_active_s = self.now_s
        record.rest_order = self.tick()
        until_s = self.now_s + min(max(lease_s, 0.0), self.limits.idle_timeout_s)
        record.lease_until_s = max(until_s, record.lease_until_s or 0.0)
        return True

    def expire(self, time_s: float, limit: int | None = None) -> list[SessionRef]:
        self.now_s = max(self.now_s, time_s)
        for record in self.records:
            if record.lease_until_s is not None and record.lease_until_s <= self.now_s:
                record.state, record.lease_until_s = record.before_lease, None
                self.counters["leases_expired"] += 1
        timeout_s = self.limits.idle_timeout_s
        aged = [
            r
            for r in sorted(self.records, key=lambda r: r.rest_order)
            if r.state in _RESTING and self.now_s - r.last_active_s > timeout_s
        ][:limit]
        for record in aged:
            self.close(record)
        self.counters["expired"] += len(aged)
        return [SessionRef(r.key, r.generation) for r in aged]

    def take_dropped(self) -> list[SessionRef]:
        dropped, self.dropped = self.dropped, []
        return dropped

    # -- the rules ----------------------------------------------------------------

    def find_or_name(self, key: SessionKey) -> _Record:
        record = self.find(key)
        if record is None:
            record = _Record(key=key, named_order=self.tick())
            self.records.append(record)
        return record

    def may_mark(self, key: SessionKey) -> bool:
        record = self.find(key)
        if record is None or record.state not in _RESTING:
            return False
        if key.session_id in SHARED_SESSION_IDS:
            self.counters["shared_refused"] += 1
            return False
        return True

    def open(self, record: _Record) -> None:
        if record.state == "ended":
            self.counters["reopened"] += 1
            record.generation += 1
        else:
            self.counters["opened"] += 1
            record.generation = max(record.generation, self.floor) + 1
        record.state = "idle"
        record.waiting_tool, record.tool_name = False, None

    def close(self, record: _Record) -> None:
        record.state, record.lease_until_s = "ended", None
        record.end_order = self.tick()

    def retire(self, key: SessionKey, rid: str, generation: int, time_s: float) -> bool:
        self.now_s = max(self.now_s, time_s)
        record = self.find(key)
        if record is None or (rid, generation) not in record.requests:
            return False
        was_current = (rid, generation) in record.current()
        record.requests.remove((rid, generation))
        if record.state == "ended" and not record.requests:
            record.end_order = self.tick()
        if not was_current:
            return False
        record.last_active_s = self.now_s
        if not record.current():
            record.state = "idle"
            record.rest_order = self.tick()
        return True

    def learn_parent(self, record: _Record, parent_session_id: str | None) -> None:
        own_id = record.key.session_id
        if parent_session_id is None or own_id in SHARED_SESSION_IDS:
            return
        parent: SessionKey | None = SessionKey(record.key.tenant, parent_session_id)
        if parent_session_id == own_id or parent_session_id in SHARED_SESSION_IDS:
            parent = None
        if parent == record.parent:
            return
        if parent is not None and record.key in self.ancestors(parent):
            self.counters["cycles_refused"] += 1
            return
        if record.parent is not None:
            self.counters["reparented"] += 1
        if parent is not None:
            self.find_or_name(parent)
        record.parent, record.attach_order = parent, self.tick()
        self.sweep()

    def sweep(self) -> None:
        """Forget placeholders that nothing hangs below, until none is left."""
        while True:
            useless = [r for r in self.records if r.state == "named" and not self.kids(r.key)]
            if not useless:
                return
            self.records = [r for r in self.records if r not in useless]

    def keep_bounds(self, opened: SessionKey) -> None:
        limits, client = self.limits, self.client_of(opened.tenant)
        while self.count(client) > limits.max_per_tenant:
            if not self.drop_one(opened, client):
                break
        while self.count(None) > limits.max_sessions:
            largest = min(self.clients(), key=lambda c: (-self.count(c), c))
            if not self.drop_one(opened, largest) and not self.drop_one(opened, None):
                break
        too_many = self.count(client) > limits.max_per_tenant
        if too_many or self.count(None) > limits.max_sessions:
            self.counters["over_capacity"] += 1
        while len(self.named(client)) > limits.max_per_tenant:
            self.drop_named(self.named(client)[0])
        while len(self.named(None)) > limits.max_named:
            largest = min(self.clients(), key=lambda c: (-len(self.named(c)), c))
            self.drop_named(self.named(largest)[0])

    def clients(self) -> set[str]:
        return {self.client_of(r.key.tenant) for r in self.records}

    def of(self, client: str | None) -> list[_Record]:
        return [r for r in self.records if client in (None, self.client_of(r.key.tenant))]

    def count(self, client: str | None) -> int:
        return len([r for r in self.of(client) if r.state != "named"])

    def named(self, client: str | None) -> list[_Record]:
        named = [r for r in self.of(client) if r.state == "named"]
        return sorted(named, key=lambda r: r.named_order)

    def drop_one(self, opened: SessionKey, client: str | None) -> bool:
        others = [r for r in self.of(client) if r.key != opened]
        drained = [r for r in others if r.state == "ended" and not r.requests]
        resting = [r for r in others if r.state in _RESTING]
        order = sorted(drained, key=lambda r: r.end_order)
        order += sorted(resting, key=lambda r: r.rest_order)
        if not order:
            return False
        victim = order[0]
        self.counters["dropped_capacity"] += 1
        self.dropped.append(SessionRef(victim.key, victim.generation))
        self.floor = max(self.floor, victim.generation)
        victim.state, victim.named_order = "named", self.tick()
        victim.requests, victim.lease_until_s = [], None
        victim.waiting_tool, victim.tool_name = False, None
        self.sweep()
        return True

    def drop_named(self, named: _Record) -> None:
        self.counters["dropped_named"] += 1
        for kid in self.kids(named.key):
            kid.parent = None
        self.sweep()

    # -- views --------------------------------------------------------------------

    def subtree(self, key: SessionKey) -> list[SessionKey]:
        return [r.key for r in self.walk(key, children_first=False)]

    def roots(self, tenant: str | None = None) -> list[SessionKey]:
        mine = [r for r in self.records if tenant in (None, r.key.tenant)]
        return [r.key for r in mine if r.parent is None]

    def snapshot(
        self, offset: int = 0, limit: int = 100, tenant: str | None = None
    ) -> list[dict[str, object]]:
        mine = [r for r in self.records if tenant in (None, r.key.tenant)]
        return [self.describe(r) for r in mine[offset:][:limit]]

    def describe(self, record: _Record) -> dict[str, object]:
        idle_s = self.now_s - record.last_active_s
        n_running = len(record.current())
        return {
            "session_id": record.key.session_id,
            "tenant": record.key.tenant,
            "parent_session_id": record.parent.session_id if record.parent else None,
            "generation": record.generation,
            "state": record.state,
            "waiting_tool": record.waiting_tool,
            "tool_name": record.tool_name,
            "depth": len(self.ancestors(record.key)),
            "n_children": len(self.kids(record.key)),
            "idle_s": 0.0 if record.state in ("running", "named") else idle_s,
            "n_running": n_running,
            "n_draining": len(record.requests) - n_running,
        }
