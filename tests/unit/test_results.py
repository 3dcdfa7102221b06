"""HintResults: outcomes by message, bounded in number and time, for their owner only."""

import pytest

from sam.srt.entrypoints.results import MAX_ACTIONS_PER_MESSAGE, HintResults, wire_id


def action(action_id, status="accepted", **more):
    return {"action_id": action_id, "action_type": "session.evict", "status": status, **more}


@pytest.fixture
def results():
    return HintResults(capacity=3, ttl_s=10.0)


def statuses(results, message_id, tenant="t", now_s=0.0):
    known = results.get(message_id, tenant, now_s)
    return known and {a["action_id"]: a["status"] for a in known["actions"]}


def test_open_then_update(results):
    results.open("m", "t", [action("a"), action("b")], 0.0)
    assert statuses(results, "m") == {"a": "accepted", "b": "accepted"}
    results.update("t:m", [action("b", "deferred")], 1.0)
    results.update("t:m", [action("b", "done")], 2.0)
    assert statuses(results, "m", "t", 2.0) == {"a": "accepted", "b": "done"}
    assert results.get("m", "t", 2.0)["message_id"] == "m"


def test_another_tenant_sees_nothing(results):
    results.open("m", "t", [action("a")], 0.0)
    assert results.get("m", "other", 0.0) is None
    assert results.get_wire(wire_id("t", "m"), 0.0) == results.get("m", "t", 0.0)


def test_another_tenant_cannot_take_a_message_over(results):
    results.open("m", "t", [action("a", "done")], 0.0)
    results.open("m", "other", [action("x")], 0.0)
    assert statuses(results, "m", "other") == {"x": "accepted"}
    assert statuses(results, "m", "t") == {"a": "done"}


def test_a_retry_keeps_what_is_known(results):
    results.open("m", "t", [action("a")], 0.0)
    results.update("t:m", [action("a", "done")], 1.0)
    results.open("m", "t", [action("a"), action("b")], 2.0)
    assert statuses(results, "m", "t", 2.0) == {"a": "done", "b": "accepted"}


def test_a_rank_that_found_nothing_does_not_hide_one_that_did(results):
    results.open("m", "t", [action("a")], 0.0)
    results.update("t:m", [action("a", "missing")], 0.0)
    results.update("t:m", [action("a", "done")], 0.0)
    results.update("t:m", [action("a", "missing")], 0.0)
    assert statuses(results, "m") == {"a": "done"}


def test_a_final_outcome_does_not_open_again(results):
    results.open("m", "t", [action("a")], 0.0)
    results.update("t:m", [action("a", "done")], 0.0)
    results.update("t:m", [action("a", "deferred")], 0.0)
    assert statuses(results, "m") == {"a": "done"}


def test_unknown_messages_are_not_invented(results):
    results.update("t:m", [action("a", "done")], 0.0)
    assert results.get("m", "t", 0.0) is None and len(results) == 0


def test_bounded_in_number_and_time(results):
    tenants = ["key-a", "key-b", "key-a", "key-b", "key-a"]
    for i, tenant in enumerate(tenants):
        results.open(f"m{i}", tenant, [action("a")], float(i))
    assert len(results) == 3 and results.get("m1", "key-b", 4.0) is None
    results.update("key-a:m2", [action("a", "done")], 9.0)
    assert results.get("m3", "key-b", 13.5) is None
    assert statuses(results, "m2", "key-a", 13.5) == {"a": "done"}
    assert results.get("m2", "key-a", 19.5) is None and len(results) == 0


@pytest.mark.parametrize("per_message", [1, 16])
def test_one_client_fills_at_most_half(per_message):
    """Of messages, and of actions; a client's namespaces count together."""
    results = HintResults(capacity=20, ttl_s=10.0)
    results.open("kept", "key-b", [action("a", "done")], 0.0)
    many = [action(f"a{i}") for i in range(per_message)]
    for i in range(200):
        results.open(f"m{i}", f"key-a/ns-{i % 3}", many, 1.0)
    assert statuses(results, "kept", "key-b", 1.0) == {"a": "done"}
    assert len(results) == 1 + {1: 10, 16: 2}[per_message]
    assert statuses(results, "m199", "key-a/ns-1", 1.0).keys() == {a["action_id"] for a in many}
    results.get("m199", "key-a/ns-1", 20.0)
    assert len(results) == 0 and not results._of_client and not results._n_actions
    assert results._total_actions == 0


def test_one_message_holds_so_many_actions_and_the_newest():
    results = HintResults(capacity=4_096, ttl_s=10.0)
    for i in range(1_000):
        results.open("m", "t", [action(f"a{i}"), action("again")], 0.0)
        results.update("t:m", [action(f"b{i}", "done")], 0.0)
    known = statuses(results, "m")
    assert len(known) == MAX_ACTIONS_PER_MESSAGE
    assert {"a999", "b999", "again"} <= known.keys() and "a0" not in known
