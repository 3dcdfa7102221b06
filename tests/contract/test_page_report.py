"""What the scheduler tells the page is what the cache and the sessions are, and is bounded."""

import pytest

pytest.importorskip("sglang")

from sam.core.sessions import SessionKey
from sam.srt.mem_cache.inspect import sessions_report
from sam.srt.observability import page_report as module
from sam.srt.observability.page_report import page_report


def tokens(record):
    return {tier: [each["private"], each["shared"]] for tier, each in record["tokens"].items()}


def test_it_agrees_with_the_inspection(make_rig):
    rig = make_rig(tokens=512)
    for i in range(4):
        rig.run(list(range(60)) + [1_000 * (i + 1) + j for j in range(40)], session=f"s{i}")
    rig.hint("evict", "s3")
    report = page_report(rig.cache, {"sweep": 100})
    shown = {record["id"]: record for record in report["sessions"]}
    for record in sessions_report(rig.cache, 0, 100)["sessions"]:
        mine = shown.pop(record["session_id"])
        assert mine["tokens"] == tokens(record), record["session_id"]
        assert (mine["state"], mine["life"]) == (record["state"], record["generation"])
    assert not shown and report["device_total"] == 512
    kinds = [event["kind"] for event in report["events"] if event["session_id"] == "s3"]
    assert kinds[0] == "opened" and {"queued", "finished", "ended", "hint"} <= set(kinds)


def test_evictions_are_counted_by_state_to_the_token(make_rig):
    rig = make_rig(tokens=256, hicache=False)
    page_report(rig.cache, {})
    for i in range(12):
        session = f"s{i}" if i % 2 else None
        rig.run([1_000 * (i + 1) + j for j in range(90)], session=session)
    report = page_report(rig.cache, {"watch": [["anonymous", "s1"], [rig_tenant(rig), "s1"]]})
    buckets = report["series"]
    counted = {name: sum(b.get(name, 0) for b in buckets) for b in buckets for name in b}
    evicted = {name: n for name, n in counted.items() if name.startswith("evicted_device_")}
    assert evicted["evicted_device_idle"] > 0 and evicted["evicted_device_plain"] > 0
    assert counted["requests"] == 12 and counted["prompt"] == 12 * 90
    last = buckets[-1]
    held = last["device_evictable"] + last["device_protected"]
    assert last["device_total"] == 256 == last["device_free"] + held
    stories = {tuple(each["key"]): each["events"] for each in report["stories"]}
    lost = [e for e in stories[rig_tenant(rig), "s1"] if e["kind"] == "evicted_tokens"]
    assert sum(event["device_tokens"] for event in lost) > 0


def test_victims_cost_nothing_while_nobody_looks(make_rig):
    rig = make_rig(tokens=256, hicache=False)
    orders, timeline = rig.cache.tree_core.orders, rig.cache.hints.timeline
    assert orders.on_victim is None
    page_report(rig.cache, {})
    assert orders.on_victim is not None
    rig.run(list(range(30)), session="s")
    assert orders.on_victim is not None
    timeline.watched_until_s = timeline.clock() - 1.0
    rig.run(list(range(30)), session="s")
    assert orders.on_victim is None


def rig_tenant(rig):
    return rig.cache.hints.table.page(0, 1)[0].key.tenant


def test_only_what_changed_and_a_stretch_of_the_rest(make_rig):
    rig = make_rig(tokens=2_048)
    for i in range(8):
        rig.run([1_000 * (i + 1) + j for j in range(30)], session=f"s{i}")
    first = page_report(rig.cache, {"sweep": 100})
    assert first["sweep_next"] == 0
    known = {"epoch": first["epoch"], "seq": first["seq"], "sweep": 2, "sweep_at": 0}
    rig.run([9_000 + j for j in range(30)], session="s7")
    second = page_report(rig.cache, known)
    assert [record["id"] for record in second["sessions"]] == ["s7", "s0", "s1"]
    assert second["n_changed"] == 1 and second["sweep_next"] == 2
    again = page_report(rig.cache, {**known, "epoch": "another"})
    assert len(again["sessions"]) == 8


def test_one_answer_looks_at_so_many_nodes(make_rig, monkeypatch):
    rig = make_rig(tokens=2_048)
    for i in range(10):
        rig.run([1_000 * (i + 1) + j for j in range(30)], session=f"s{i}")
    monkeypatch.setattr(module, "MAX_NODES", 8)
    at, seen, n_answers = 0, set(), 0
    first = page_report(rig.cache, {})
    known = {"epoch": first["epoch"], "seq": first["seq"], "sweep": 100}
    while True:
        report = page_report(rig.cache, {**known, "sweep_at": at})
        assert 0 < len(report["sessions"]) <= 8
        seen |= {record["id"] for record in report["sessions"]}
        at, n_answers = report["sweep_next"], n_answers + 1
        if at == 0:
            break
    assert len(seen) == 10 and n_answers > 1


def test_what_the_table_forgot_is_gone(make_rig):
    rig = make_rig(tokens=512)
    rig.run(list(range(40)), session="s")
    first = page_report(rig.cache, {"sweep": 100})
    table = rig.cache.hints.table
    (session,) = table.page(0, 10)
    table.end(session.key, 5.0)
    table._store._drop_oldest(table._store.all, keep=None)
    known = {"epoch": first["epoch"], "seq": first["seq"], "sweep": 100}
    report = page_report(rig.cache, known)
    assert report["gone"] == [list(SessionKey(session.key.tenant, "s"))]
    assert report["sessions"] == []
