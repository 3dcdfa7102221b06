"""How much may wait on its way to the scheduler, in all and of one client."""

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import GenerateReqInput
from test_ingress_parts import MANAGE_EVICT, Server, actions_of, body_of, caller, chat, envelope

from sam.srt.entrypoints.admission import Admission, HintRate


def fill(server, tenant, n):
    own = envelope("session.evict", session_id="s")
    taken = [
        server.ingress.submit_envelope({**own, "message_id": f"m{i}"}, tenant) for i in range(n)
    ]
    return [(reply["actions"][0]["status"], reply["actions"][0]["reason"]) for reply in taken]


ACCEPTED, OVERLOADED = ("accepted", ""), ("dropped", "overloaded")
LIMITED = ("dropped", "rate_limited")


def test_too_much_at_once_is_dropped_not_queued():
    server = Server(max_in_flight_actions=20, max_in_flight_actions_per_tenant=20)
    assert fill(server, "t", 21) == [ACCEPTED] * 20 + [OVERLOADED]
    assert len(server.sent) == 20
    server.ingress.on_results(server.sent[0].message_id, [])
    own = envelope("session.evict", session_id="s", message_id="later")
    again = server.ingress.submit_envelope(own, "t")
    assert again["actions"][0]["status"] == "accepted"


def test_one_client_cannot_drop_the_hints_of_another():
    server = Server(max_in_flight_actions=20)
    assert fill(server, "key-a/ns-1", 8) == [ACCEPTED] * 8
    assert fill(server, "key-a/ns-2", 4) == [ACCEPTED] * 2 + [OVERLOADED] * 2
    assert fill(server, "key-b", 9) == [ACCEPTED] * 9
    assert fill(server, "anonymous/ns-1", 2) == [ACCEPTED, OVERLOADED]


def test_what_is_given_back_can_be_taken_again():
    bound = Admission(total=3, per_client=2)
    assert bound.take("m", "a", 1) and bound.take("m", "a", 1) and not bound.take("n", "a", 1)
    assert bound.take("n", "b", 1) and not bound.take("o", "c", 1)
    bound.give_back("m")
    bound.give_back("m")
    bound.give_back("unknown")
    assert bound.n == 1 and bound.take("o", "a", 2) and not bound.take("p", "b", 1)


def test_memory_is_bounded():
    server = Server(max_hint_results=50)
    hint = {"session_id": "s", "context_management": MANAGE_EVICT}
    for i, half in enumerate(["Bearer a"] * 100 + ["Bearer b"] * 100):
        server.openai(chat(hint | {"session_id": f"s{i}"}, messages=[]), caller(half))
        assert len(server.ingress.results) == min(i + 1, 25 if i < 100 else i - 74, 50)
    assert len(server.sent) == 200


@pytest.mark.parametrize("bound", [1, 4])
def test_one_message_id_used_again_does_not_widen_the_bound(bound):
    server = Server(max_in_flight_actions=2 * bound)
    own = envelope("session.evict", session_id="s")

    def again():
        own["actions"][0]["action_id"] += "x"
        return server.ingress.submit_envelope(own, "t")["actions"][-1]["status"]

    assert [again() for _ in range(bound + 1)] == ["accepted"] * bound + ["dropped"]
    server.ingress.on_results(server.sent[0].message_id, [])
    assert [again() for _ in range(2)] == ["accepted", "dropped"]
    for one in server.sent:
        server.ingress.on_results(one.message_id, [])
    assert server.ingress.dispatch._in_flight.n == 0 and not server.ingress.dispatch._sent


def test_a_rate_refills_with_time_and_a_message_may_overdraw_it():
    rate = HintRate(per_s=10.0, burst=20.0)
    assert rate.take("a", 19, 0.0) and rate.take("a", 67, 0.0)
    assert not rate.take("a", 1, 6.5) and rate.take("b", 1, 6.5)
    assert rate.take("a", 1, 6.75) and rate.take("a", 0, 6.75)
    assert [rate.take("a", 20, t) for t in (100.0, 50.0, 100.0, 101.0)] == [
        True, False, False, True,
    ]  # fmt: skip


def test_over_a_long_time_no_client_has_more_than_its_rate():
    rate = HintRate(per_s=10.0, burst=20.0)
    taken = sum(67 for i in range(100_000) if rate.take("a", 67, i / 100))
    assert 10_000 <= taken <= 10_000 + 20 + 67


def test_a_rate_of_zero_is_no_bound_and_holds_nothing():
    rate = HintRate(per_s=0.0, burst=0.0)
    assert all(rate.take("a", 1000, 0.0) for _ in range(100)) and not len(rate)


def test_what_is_known_of_rates_is_bounded():
    rate = HintRate(per_s=1.0, burst=1.0)
    assert all(rate.take(f"client-{i}", 1, 0.0) for i in range(10_000))
    assert len(rate) == 4_096 and not rate.take("client-9999", 1, 0.0)


def test_hints_beyond_a_clients_rate_are_dropped_and_counted():
    server = Server(hint_rate_per_s=0.001, hint_burst=3)
    assert fill(server, "key-a/ns-1", 5) == [ACCEPTED] * 3 + [LIMITED] * 2
    assert fill(server, "key-a/ns-2", 1) == [LIMITED]
    assert fill(server, "key-b", 1) == [ACCEPTED]
    hint = {"session_id": "s", "context_management": MANAGE_EVICT}
    for _ in range(4):
        reply = server.openai(chat(hint, messages=[]), caller())
    (action,) = body_of(reply)["kv_hints"]["actions"]
    assert reply.status_code == 200 and (action["status"], action["reason"]) == LIMITED
    assert len(server.sent) == 3 + 1 + 3
    counted = server.ingress.metrics.snapshot()
    assert counted["rejected_by_reason"] == {"rate_limited": 4}
    assert counted["accepted_actions"] == 7


def test_an_inference_beyond_the_rate_is_bound_and_served_without_its_edits():
    server = Server(hint_rate_per_s=0.001, hint_burst=1)
    hint = {"session_id": "s", "expected_idle_s": 3.0, "context_management": {
        "edits": [{"type": "offload", "target": "session"}]}}  # fmt: skip
    carried = [actions_of(server.openai(chat(hint), caller()).kv_hints) for _ in range(3)]
    kinds = [[action.kind.value for action in actions] for actions in carried]
    bind = "session.bind"
    assert kinds == [[bind, "session.expect", "session.demote"], [bind], [bind]]
    assert server.ingress.metrics.snapshot()["rejected_by_reason"] == {"rate_limited": 2}


def test_only_the_first_bind_of_an_inference_is_free():
    server = Server(hint_rate_per_s=0.001, hint_burst=60)
    own = envelope(*["session.bind"] * 60, session_id="t")
    for free, left in ((1, 60), (1, 0)):
        obj = server.openai(chat({"session_id": "s"}, kv_hints=own), caller())
        sent = actions_of(obj.kv_hints)
        assert [action.key.session_id for action in sent] == ["s"] * free + ["t"] * left
    own = envelope("session.bind", "session.bind", session_id="t", message_id="m-2")
    obj = GenerateReqInput(text="x", kv_hints=own)
    server.generate(obj, caller())
    assert len(actions_of(obj.kv_hints)) == 1
    assert server.shown(obj)["actions"][1]["reason"] == "rate_limited"


@pytest.mark.parametrize("rate, burst, at_once", [(500.0, 0, 1000), (0.1, 0, 1), (5.0, 7, 7)])
def test_the_burst_is_two_seconds_unless_set(rate, burst, at_once):
    server = Server(hint_rate_per_s=rate, hint_burst=burst)
    assert server.ingress.config.burst() == at_once
