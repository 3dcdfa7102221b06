"""How much may wait on its way to the scheduler, in all and of one client."""

import pytest

pytest.importorskip("sglang")

from test_ingress_parts import MANAGE_EVICT, Server, caller, chat, envelope

from sam.srt.entrypoints.admission import Admission


def fill(server, tenant, n):
    own = envelope("session.evict", session_id="s")
    taken = [
        server.ingress.submit_envelope({**own, "message_id": f"m{i}"}, tenant) for i in range(n)
    ]
    return [(reply["actions"][0]["status"], reply["actions"][0]["reason"]) for reply in taken]


ACCEPTED, OVERLOADED = ("accepted", ""), ("dropped", "overloaded")


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
