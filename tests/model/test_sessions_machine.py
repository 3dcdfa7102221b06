"""SessionTable against the naive reference: same calls, same answers, after every step."""

import os

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sam.core.reference import ReferenceTable
from sam.core.sessions import SessionKey, SessionLimits, SessionTable

IDS = ["a", "b", "c", "d", "e", "f", "g", "default_session"]
KEYS = st.builds(
    SessionKey, st.sampled_from(["t0", "t0", "t0", "t1", "t1/x", "t2"]), st.sampled_from(IDS)
)
PARENTS = st.one_of(st.none(), st.sampled_from(IDS))
TIGHT_BOUNDS = st.fixed_dictionaries(
    {
        "max_sessions": st.integers(2, 12),
        "max_per_tenant": st.integers(1, 8),
        "max_named": st.integers(1, 4),
    }
)
ONE_TREE = st.sampled_from(IDS[:6])
STEPS_S = st.sampled_from([-3.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 4.0, 11.0, 40.0])
RIDS = st.sampled_from(["r0", "r1", "r2", "r3"])
REASONS = st.sampled_from([None, "stop", "length", "tool_calls"])


def check_orders(table):
    """Invariants of the store that no observable shows."""
    store = table._store
    per_client = list(store._clients.values())
    for name in ("nodes", "named", "resting", "ended"):
        overall = getattr(store.all, name)
        assert len(overall) == sum(len(getattr(o, name)) for o in per_client)
    resting = [s.last_active_s for s in store.all.resting.values()]
    assert resting == sorted(resting)
    for session in store.all.nodes.values():
        assert session.parent is None or session.parent.children[session.key] is session
        assert session.n_draining >= 0
        assert (session.state == "running") == (session.n_running > 0)
        assert (session.lease_until_s is not None) == (session.state == "resuming")
    for size, largest in (
        (lambda o: o.n_sessions, store._most_sessions), (lambda o: len(o.named), store._most_named)
    ):  # fmt: skip
        sizes = [size(o) for o in per_client]
        name = largest.name()
        assert max(sizes, default=0) == (0 if name is None else size(store._clients[name]))
        assert len(largest._heap) <= 2 * len(per_client) + 65
    assert len(table._leases) <= 2 * len(store.all.nodes) + 65


def client_of(tenant):
    return tenant.partition("/")[0]


class SessionsMachine(RuleBasedStateMachine):
    @initialize(bounds=st.one_of(st.just({}), TIGHT_BOUNDS))
    def start(self, bounds):
        limits = SessionLimits(idle_timeout_s=30.0, **bounds)
        self.table = SessionTable(limits, client_of)
        self.reference = ReferenceTable(limits, client_of)
        self.time_s = 0.0
        self.queued = []

    def both(self, name, *args, **kwargs):
        mine = getattr(self.table, name)(*args, **kwargs)
        theirs = getattr(self.reference, name)(*args, **kwargs)
        mine = getattr(mine, "ref", mine)
        assert mine == theirs, name
        return mine

    def now(self, step_s):
        self.time_s = max(0.0, self.time_s + step_s)
        return self.time_s

    @rule(key=KEYS, parent=PARENTS, step_s=STEPS_S)
    def bind(self, key, parent, step_s):
        self.both("bind", key, parent, self.now(step_s))

    @rule(child=ONE_TREE, parent=ONE_TREE)
    def grow_one_tree(self, child, parent):
        self.both("bind", SessionKey("t0", child), parent, self.time_s)

    @rule(key=KEYS, rid=RIDS, step_s=STEPS_S)
    def queue(self, key, rid, step_s):
        generation = self.both("request_queued", key, rid, self.now(step_s))
        self.queued.append((key, rid, generation))

    @rule(data=st.data(), reason=REASONS, step_s=STEPS_S, aborts=st.booleans())
    def finish(self, data, reason, step_s, aborts):
        if not self.queued:
            return
        i = data.draw(st.integers(0, len(self.queued) - 1))
        request = self.queued[i] if data.draw(st.booleans()) else self.queued.pop(i)
        if aborts:
            self.both("request_aborted", *request, self.now(step_s))
        else:
            self.both("request_finished", *request, self.now(step_s), reason, "grep")

    @rule(key=KEYS, rid=RIDS, generation=st.integers(0, 3), step_s=STEPS_S)
    def finish_nonsense(self, key, rid, generation, step_s):
        self.both("request_finished", key, rid, generation, self.now(step_s), "stop")

    @rule(key=KEYS, step_s=STEPS_S, cascade=st.booleans())
    def end(self, key, step_s, cascade):
        self.both("end", key, self.now(step_s), cascade)

    @rule(key=KEYS, step_s=STEPS_S)
    def offload(self, key, step_s):
        self.both("mark_offloaded", key, self.now(step_s))

    @rule(key=KEYS, step_s=STEPS_S, lease_s=st.sampled_from([-1.0, 0.0, 5.0, 20.0, 90.0]))
    def resume(self, key, step_s, lease_s):
        self.both("mark_resuming", key, self.now(step_s), lease_s)

    @rule(step_s=STEPS_S, limit=st.sampled_from([None, 0, 1, 2]))
    def expire(self, step_s, limit):
        self.both("expire", self.now(step_s), limit)

    @rule()
    def take_dropped(self):
        self.both("take_dropped")

    @rule(
        offset=st.integers(0, 9),
        limit=st.integers(0, 5),
        tenant=st.sampled_from([None, "t0", "x"]),
    )
    def page(self, offset, limit, tenant):
        self.both("snapshot", offset, limit, tenant)

    @invariant()
    def everything_observable_agrees(self):
        if not hasattr(self, "table"):
            return
        assert self.table.now_s == self.reference.now_s
        assert list(self.table.counters.items()) == list(self.reference.counters.items())
        records = self.both("snapshot", 0, 1000)
        assert len(self.table) == self.reference.count(None)
        self.both("roots")
        self.both("roots", "t0")
        for record in records:
            key = SessionKey(record["tenant"], record["session_id"])
            self.both("subtree", key)
            assert self.table.children(key) == [r.key for r in self.reference.kids(key)]
            assert self.table.parent(key) == self.reference.find(key).parent
        check_orders(self.table)


SessionsMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("SAM_MODEL_EXAMPLES", "200")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSessionsMachine = SessionsMachine.TestCase
