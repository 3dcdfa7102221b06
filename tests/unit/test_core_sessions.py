"""The session table: lineage, generations, late work, ageing, bounds, depth and speed."""

import json
import random
import time

import pytest

from sam.core.events import Event, EventKind, EventLog, decode_event, encode_event
from sam.core.lineage import SessionState as S
from sam.core.sessions import SessionKey, SessionLimits, SessionRef, SessionTable


def key(session_id, tenant="t"):
    return SessionKey(tenant, session_id)


def table(**limits):
    return SessionTable(SessionLimits(**limits))


def family(links, **limits):
    """A table with `child: parent` bound in order at time 0."""
    made = table(**limits)
    for child, parent in links.items():
        made.bind(key(child), parent, 0.0)
    return made


def run(t, session_id, rid="r", time_s=0.0, reason="stop", tool=None):
    generation = t.request_queued(key(session_id), rid, time_s)
    assert t.request_finished(key(session_id), rid, generation, time_s, reason, tool)
    return generation


def ids(keys):
    return [k.session_id for k in keys]


def refs(found):
    return [(r.key.session_id, r.generation) for r in found]


# -- states --------------------------------------------------------------------------


def test_life_of_a_session():
    t = table()
    session = t.bind(key("a"), None, 1.0)
    assert (session.state, session.generation, session.live) == (S.IDLE, 1, True)
    assert t.request_queued(key("a"), "r1", 2.0) == 1
    assert session.state is S.RUNNING
    assert t.request_finished(key("a"), "r1", 1, 3.0, "tool_calls", "grep")
    assert (session.state, session.waiting_tool, session.tool_name) == (S.IDLE, True, "grep")
    assert t.mark_offloaded(key("a"), 4.0)
    assert session.state is S.OFFLOADED and session.waiting_tool
    assert t.mark_resuming(key("a"), 5.0, lease_s=10.0)
    assert session.state is S.RESUMING
    t.request_queued(key("a"), "r2", 6.0)
    assert session.state is S.RUNNING and not session.waiting_tool
    assert t.expire(100.0) == []
    assert session.state is S.RUNNING
    assert refs(t.end(key("a"), 101.0)) == [("a", 1)]
    assert session.state is S.ENDED and not session.live


def test_overlapping_requests_run_until_the_last_one_is_done():
    t = table()
    t.request_queued(key("a"), "r1", 0.0)
    t.request_queued(key("a"), "r2", 0.0)
    t.request_finished(key("a"), "r1", 1, 1.0, "tool_calls", "x")
    assert t.get(key("a")).state is S.RUNNING and not t.get(key("a")).waiting_tool
    t.request_finished(key("a"), "r2", 1, 2.0, "stop")
    assert t.get(key("a")).state is S.IDLE and not t.get(key("a")).waiting_tool


def test_abort_in_the_queue_does_not_run_for_ever():
    t = table()
    generation = t.request_queued(key("a"), "r1", 0.0)
    assert t.request_aborted(key("a"), "r1", generation, 1.0)
    assert t.get(key("a")).state is S.IDLE
    assert not t.request_aborted(key("a"), "r1", generation, 1.0)
    assert t.counters["late_aborts"] == 1
    run(t, "a", "r2", 2.0)


def test_requeue_of_a_retracted_request_is_idempotent():
    t = table()
    assert t.request_queued(key("a"), "r", 0.0) == t.request_queued(key("a"), "r", 1.0) == 1
    assert t.get(key("a")).n_running == 1


def test_lease_runs_out_to_the_former_state():
    for offloaded in (False, True):
        t = table()
        t.bind(key("a"), None, 0.0)
        if offloaded:
            t.mark_offloaded(key("a"), 0.0)
        t.mark_resuming(key("a"), 1.0, 10.0)
        t.mark_resuming(key("a"), 5.0, 2.0)
        t.expire(10.9)
        assert t.get(key("a")).state is S.RESUMING
        t.expire(11.0)
        assert t.get(key("a")).state is (S.OFFLOADED if offloaded else S.IDLE)
        assert t.counters["leases_expired"] == 1


def test_marks_are_no_ops_unless_resting():
    t = table()
    t.bind(key("child"), "named", 0.0)
    t.request_queued(key("busy"), "r", 0.0)
    run(t, "gone")
    t.end(key("gone"), 0.0)
    for session_id in ("unknown", "named", "busy", "gone"):
        assert not t.mark_offloaded(key(session_id), 1.0)
        assert not t.mark_resuming(key(session_id), 1.0, 5.0)
    assert t.get(key("unknown")) is None and t.get(key("gone")).state is S.ENDED


# -- lineage -------------------------------------------------------------------------


def test_self_parent_and_absent_parent_are_roots():
    t = family({"a": "a", "b": None})
    assert ids(t.roots()) == ["a", "b"]


def test_absent_parent_keeps_lineage_and_self_parent_cuts_it():
    t = family({"b": "a"})
    t.bind(key("b"), None, 1.0)
    run(t, "b")
    assert t.parent(key("b")) == key("a")
    t.bind(key("b"), "b", 2.0)
    assert t.parent(key("b")) is None and t.get(key("a")) is None


def test_a_parent_seen_only_by_name():
    t = family({"b": "team", "c": "team", "d": "c"})
    assert t.get(key("team")).state is S.NAMED and len(t) == 3
    assert ids(t.subtree(key("team"))) == ["team", "b", "c", "d"]
    assert refs(t.end(key("team"), 1.0)) == [("b", 1), ("d", 1), ("c", 1)]
    assert t.bind(key("team"), None, 2.0).generation == 1
    assert ids(t.children(key("team"))) == ["b", "c"]


def test_late_parent_and_reparenting():
    t = family({"b": None, "p": None, "q": None})
    t.bind(key("b"), "p", 1.0)
    assert t.counters["reparented"] == 0
    t.bind(key("b"), "q", 2.0)
    assert t.parent(key("b")) == key("q") and t.children(key("p")) == []
    assert t.counters["reparented"] == 1


def test_cycles_are_refused_and_lineage_kept():
    t = family({"b": "a", "c": "b", "d": "c"})
    t.bind(key("a"), "d", 1.0)
    t.bind(key("b"), "d", 1.0)
    assert t.counters["cycles_refused"] == 2
    assert ids(t.subtree(key("a"))) == ["a", "b", "c", "d"]
    assert t.parent(key("b")) == key("a")


def test_pre_order_and_end_order():
    t = family({"r": None, "a": "r", "b": "r", "a1": "a", "b1": "b", "a2": "a"})
    assert ids(t.subtree(key("r"))) == ["r", "a", "a1", "a2", "b", "b1"]
    ended = t.end(key("r"), 1.0)
    assert ids(r.key for r in ended) == ["a1", "a2", "a", "b1", "b", "r"]
    assert t.end(key("r"), 1.0) == []


def test_end_without_cascade():
    t = family({"r": None, "a": "r"})
    assert refs(t.end(key("r"), 1.0, cascade=False)) == [("r", 1)]
    assert t.get(key("a")).state is S.IDLE
    assert refs(t.end(key("r"), 2.0)) == [("a", 1)]


def test_tenants_never_meet():
    t = table()
    t.bind(key("x", "t1"), "p", 0.0)
    t.bind(key("x", "t2"), "p", 0.0)
    t.bind(key("p", "t1"), None, 0.0)
    assert t.end(key("p", "t1"), 1.0) == [
        SessionRef(key("x", "t1"), 1),
        SessionRef(key("p", "t1"), 1),
    ]
    assert t.get(key("x", "t2")).live
    assert t.end(key("p", "t3"), 1.0) == []


def test_the_shared_session_is_unowned():
    t = table(idle_timeout_s=10.0)
    shared = t.bind(key("default_session"), "boss", 0.0)
    assert shared.shared and shared.parent is None and t.get(key("boss")) is None
    t.bind(key("a"), "default_session", 0.0)
    assert t.parent(key("a")) is None
    assert t.end(key("default_session"), 1.0) == []
    assert not t.mark_offloaded(key("default_session"), 1.0)
    assert not t.mark_resuming(key("default_session"), 1.0, 5.0)
    assert shared.live and t.counters["shared_refused"] == 3
    assert ids(r.key for r in t.expire(20.0)) == ["default_session", "a"]


# -- generations ---------------------------------------------------------------------


def test_late_finish_of_an_old_generation_changes_nothing():
    t = table()
    old = t.request_queued(key("a"), "r1", 0.0)
    assert refs(t.end(key("a"), 1.0)) == [("a", 1)]
    assert t.get(key("a")).n_draining == 1
    new = t.request_queued(key("a"), "r2", 2.0)
    assert (old, new) == (1, 2) and t.counters["reopened"] == 1
    assert not t.request_finished(key("a"), "r1", old, 3.0, "tool_calls")
    assert t.counters["late_finishes"] == 1
    assert t.get(key("a")).state is S.RUNNING and t.get(key("a")).n_draining == 0
    assert t.request_finished(key("a"), "r2", new, 4.0, "stop")


def test_late_finish_does_not_reopen():
    t = table()
    generation = t.request_queued(key("a"), "r1", 0.0)
    t.end(key("a"), 1.0)
    assert t.request_queued(key("a"), "r1", 2.0) == generation
    assert t.get(key("a")).state is S.ENDED
    assert not t.request_finished(key("a"), "r1", generation, 3.0, "stop")
    assert t.get(key("a")).state is S.ENDED


@pytest.mark.parametrize("stamp", [("x", "r1", 1), ("a", "nope", 1), ("a", "r1", 7)])
def test_finishes_that_match_nothing(stamp):
    t = table()
    t.request_queued(key("a"), "r1", 0.0)
    session_id, rid, generation = stamp
    assert not t.request_finished(key(session_id), rid, generation, 1.0, "stop")
    assert t.get(key("a")).state is S.RUNNING and t.get(key("x")) is None


def test_reuse_after_every_end_like_a_compressor():
    t = family({"main": "main"})
    for i in range(1, 6):
        assert t.bind(key("main:compressor"), "main", i).generation == i
        assert run(t, "main:compressor", f"r{i}", i) == i
        assert refs(t.end(key("main:compressor"), i)) == [("main:compressor", i)]
    assert t.get(key("main")).live and t.counters["reopened"] == 4


def test_a_forgotten_id_never_repeats_a_generation():
    t = table(max_sessions=1, max_per_tenant=1)
    seen = set()
    for i in range(20):
        ref = t.bind(key("ab"[i % 2]), None, i).ref
        assert ref not in seen
        seen.add(ref)


def test_draining_requests_of_a_dropped_record_are_forgotten():
    t = table(max_per_tenant=1)
    generation = t.request_queued(key("a"), "r", 0.0)
    t.end(key("a"), 0.0)
    t.bind(key("child"), "a", 0.0)
    assert t.take_dropped() == [] and t.counters["over_capacity"] == 1
    t.bind(key("a"), None, 1.0)
    t.bind(key("child2"), "a", 1.0)
    assert refs(t.take_dropped()) == [("child", 1), ("a", 2)]
    assert t.get(key("a")).state is S.NAMED and t.get(key("a")).n_draining == 0
    assert not t.request_finished(key("a"), "r", generation, 2.0, "stop")


# -- time ----------------------------------------------------------------------------


def test_time_only_moves_forward():
    t = table(idle_timeout_s=10.0)
    assert t.advance(5.0) == 5.0 and t.advance(3.0) == 5.0
    t.bind(key("a"), None, 1.0)
    assert t.get(key("a")).last_active_s == 5.0


def test_idle_ageing():
    t = table(idle_timeout_s=10.0)
    for i, session_id in enumerate("abcd"):
        t.bind(key(session_id), None, float(i))
    t.request_queued(key("b"), "r", 4.0)
    t.mark_offloaded(key("c"), 4.0)
    t.bind(key("a"), None, 5.0)
    assert t.expire(12.0) == []
    assert refs(t.expire(100.0, limit=1)) == [("c", 1)]
    assert refs(t.expire(100.0)) == [("d", 1), ("a", 1)]
    assert t.get(key("b")).state is S.RUNNING
    t.request_finished(key("b"), "r", 1, 101.0, "stop")
    assert t.expire(111.0) == [] and refs(t.expire(111.1)) == [("b", 1)]
    assert t.counters["expired"] == 4


def test_ageing_is_alone():
    t = family({"root": None, "kid": "root"}, idle_timeout_s=10.0)
    run(t, "kid", time_s=9.0)
    assert refs(t.expire(11.0)) == [("root", 1)]
    assert t.get(key("kid")).live and t.parent(key("kid")) == key("root")


# -- bounds --------------------------------------------------------------------------


def test_ended_go_before_idle_and_running_never():
    t = table(max_per_tenant=4)
    for session_id in "abcd":
        t.bind(key(session_id), None, 0.0)
    t.request_queued(key("a"), "r", 0.0)
    t.end(key("d"), 0.0)
    t.bind(key("e"), None, 1.0)
    t.bind(key("f"), None, 1.0)
    assert refs(t.take_dropped()) == [("d", 1), ("b", 1)]
    assert t.take_dropped() == [] and t.get(key("a")).state is S.RUNNING


def test_a_tenant_inventing_ids_pushes_out_its_own():
    t = table(max_sessions=100, max_per_tenant=80)
    for i in range(20):
        t.bind(key(f"g{i}", "good"), None, float(i))
    for i in range(10_000):
        t.bind(key(f"x{i}", "bad"), f"p{i}", 100.0 + i)
    assert all(t.get(key(f"g{i}", "good")).live for i in range(20))
    assert len(t) == 100
    assert {r.key.tenant for r in t.take_dropped()} == {"bad"}
    assert len(t.snapshot(0, 1000)) <= 180


def test_over_the_overall_bound_a_greedy_opener_pays_first():
    t = table(max_sessions=10, max_per_tenant=10)
    for i in range(4):
        t.bind(key(f"g{i}", "good"), None, 0.0)
    for i in range(50):
        t.bind(key(f"x{i}", "bad"), None, 1.0)
    assert len(t.snapshot(0, 99, tenant="good")) == 4 and len(t) == 10


def test_whoever_opens_the_client_that_holds_most_pays():
    t = table(max_sessions=10, max_per_tenant=10)
    t.bind(key("old", "small"), None, 0.0)
    for i in range(9):
        t.bind(key(f"x{i}", "large"), None, 1.0)
    for i in range(4):
        t.bind(key(f"n{i}", "new"), None, 2.0)
    assert refs(t.take_dropped()) == [("x0", 1), ("x1", 1), ("x2", 1), ("x3", 1)]
    assert t.get(key("old", "small")).live and len(t) == 10


def test_a_client_with_many_tenants_is_one_client():
    limits = SessionLimits(max_sessions=10, max_per_tenant=10)
    t = SessionTable(limits, lambda tenant: tenant.partition("/")[0])
    for i in range(4):
        t.bind(key(f"g{i}", "good"), None, 0.0)
    for i in range(50):
        t.bind(key("s", f"bad/{i}"), None, 1.0)
    assert all(t.get(key(f"g{i}", "good")).live for i in range(4)) and len(t) == 10
    assert [r["tenant"] for r in t.snapshot(tenant="bad/49")] == ["bad/49"]
    assert t.roots("bad/48") == [key("s", "bad/48")] and t.roots("bad/1") == []


def test_a_client_inventing_parents_forgets_its_own():
    t = table(max_named=4, max_per_tenant=4)
    for i in range(2):
        t.bind(key(f"g{i}", "good"), f"gp{i}", 0.0)
    for i in range(20):
        t.bind(key(f"x{i % 3}", "bad"), f"p{i}", 1.0)
    assert t.parent(key("g0", "good")) == key("gp0", "good")
    assert t.parent(key("g1", "good")) == key("gp1", "good")


def test_running_sessions_may_exceed_the_bound():
    t = table(max_sessions=2, max_per_tenant=2)
    for i in range(5):
        t.request_queued(key(f"s{i}"), "r", 0.0)
    assert len(t) == 5 and t.take_dropped() == [] and t.counters["over_capacity"] == 3


def test_a_dropped_parent_stays_by_name_until_nobody_needs_it():
    t = table(max_per_tenant=2)
    t.bind(key("root"), None, 0.0)
    t.bind(key("kid"), "root", 1.0)
    t.bind(key("other"), None, 2.0)
    assert refs(t.take_dropped()) == [("root", 1)]
    assert t.get(key("root")).state is S.NAMED and t.parent(key("kid")) == key("root")
    t.bind(key("more"), None, 3.0)
    assert refs(t.take_dropped()) == [("kid", 1)]
    assert t.get(key("kid")) is None and t.get(key("root")) is None


def test_placeholders_are_bounded():
    t = table(max_named=3)
    for i in range(10):
        t.bind(key(f"kid{i}"), f"p{i}", 0.0)
    named = [r["session_id"] for r in t.snapshot(0, 99) if r["state"] == "named"]
    assert named == ["p7", "p8", "p9"] and t.counters["dropped_named"] == 7
    assert t.parent(key("kid0")) is None and len(t) == 10


def test_lease_records_are_bounded():
    t = table()
    t.bind(key("a"), None, 0.0)
    for i in range(10_000):
        t.mark_resuming(key("a"), float(i) / 1000, 60.0)
    assert len(t._leases) < 100


# -- reports, depth, speed -----------------------------------------------------------


def test_snapshot_pages_and_is_plain():
    t = family({"r": None, "a": "r", "b": "a"})
    run(t, "a", time_s=3.0, reason="tool_calls", tool="grep")
    t.advance(5.0)
    whole = json.loads(json.dumps(t.snapshot()))
    assert [r["session_id"] for r in whole] == ["r", "a", "b"]
    assert whole[1] == {
        "session_id": "a",
        "tenant": "t",
        "parent_session_id": "r",
        "generation": 1,
        "state": "idle",
        "waiting_tool": True,
        "tool_name": "grep",
        "depth": 1,
        "n_children": 1,
        "idle_s": 2.0,
        "n_running": 0,
        "n_draining": 0,
    }
    assert t.snapshot(1, 1) == [t.snapshot()[1]] and t.snapshot(9, 5) == []
    assert t.snapshot(tenant="nobody") == [] and t.snapshot(-5, -1) == []


@pytest.mark.parametrize("upwards", [False, True])
def test_ten_thousand_deep(upwards):
    n = 10_000
    t = table(max_sessions=n, max_per_tenant=n)
    order = range(n) if not upwards else range(n - 1, -1, -1)
    for i in order:
        t.bind(key(f"s{i}"), f"s{i - 1}" if i else None, 0.0)
    assert ids(t.subtree(key("s0"))) == [f"s{i}" for i in range(n)]
    t.bind(key("s0"), f"s{n - 1}", 0.0)
    assert t.counters["cycles_refused"] == 1
    assert max(r["depth"] for r in t.snapshot(0, n)) == n - 1
    ended = t.end(key("s0"), 1.0)
    assert ids(r.key for r in ended) == [f"s{i}" for i in range(n - 1, -1, -1)]


def test_calls_take_microseconds_at_ten_thousand_sessions():
    n, per_call_s = 10_000, 100e-6  # generous: ~5 us on an idle core
    t = table(max_sessions=n, max_per_tenant=n)
    started = time.perf_counter()
    for i in range(3 * n):
        session = key(f"s{i}")
        t.bind(session, f"s{i - i % 50}", float(i))
        generation = t.request_queued(session, "r", float(i))
        t.request_finished(session, "r", generation, float(i), "stop")
        t.mark_resuming(session, float(i), 5.0)
        t.expire(float(i))
    assert time.perf_counter() - started < 5 * 3 * n * per_call_s
    assert len(t) <= n


def test_replay_of_the_same_messages_gives_the_same_table():
    def replay():
        rng, t, log = random.Random(7), table(max_sessions=30, max_per_tenant=20), []
        for i in range(3_000):
            who = SessionKey(rng.choice(["t1", "t2"]), f"s{rng.randrange(40)}")
            call = rng.randrange(5)
            if call == 0:
                log.append(t.bind(who, f"s{rng.randrange(40)}", float(i)).ref)
            elif call == 1:
                log.append(t.request_queued(who, f"r{i}", float(i)))
            elif call == 2:
                log.append(t.end(who, float(i)))
            else:
                log.append(t.mark_resuming(who, float(i), 20.0))
            log.extend(t.take_dropped() + t.expire(float(i)))
        return log, t.snapshot(0, 999), t.counters

    assert replay() == replay()


# -- events -------------------------------------------------------------------------


def test_event_round_trip():
    event = Event(t=1.5, kind=EventKind.FINISHED, session_id="s", generation=2, cached_tokens=7)
    line = encode_event(event)
    assert b"\n" not in line and b"reason" not in line
    assert decode_event(line) == event
    assert decode_event(line[:-1] + b',"later":1}') == event


def test_event_log_is_a_ring():
    log = EventLog(capacity=3)
    events = [Event(t=float(i), kind=EventKind.QUEUED) for i in range(5)]
    assert [log.append(e) for e in events] == [0, 1, 2, 3, 4]
    assert (len(log), log.n_lost) == (3, 2)
    assert log.since(0) == (2, events[2:])
    assert log.since(3, limit=1) == (3, events[3:4])
    assert log.since(99) == (5, [])
    with pytest.raises(ValueError, match="capacity"):
        EventLog(capacity=0)
