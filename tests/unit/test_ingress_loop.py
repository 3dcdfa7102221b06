"""The loop that hands out all answers: nothing that a client sends may raise into it."""

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import GenerateReqInput
from test_ingress_parts import Server, caller, envelope

from sam.srt.observability.tracing import PARENT_ID, SESSION_ID, request_attributes


@pytest.mark.parametrize("payload", [{}, {"session_id": 7}, {"session_id": None}])
def test_a_bind_without_a_session_names_none_on_a_span(payload):
    own = envelope("session.bind")
    own["actions"][0]["payload"] = payload
    obj = GenerateReqInput(text="x", kv_hints=own)
    Server().generate(obj, caller())
    assert SESSION_ID not in request_attributes(obj.kv_hints, {"cached_tokens": 0})


def test_a_bind_names_its_session_and_parent():
    own = envelope("session.bind", session_id="s", parent_session_id="p")
    obj = GenerateReqInput(text="x", kv_hints=own)
    Server().generate(obj, caller())
    told = request_attributes(obj.kv_hints, {})
    assert (told[SESSION_ID], told[PARENT_ID]) == ("s", "p")


def test_what_fails_at_an_answer_costs_its_outcome_alone(monkeypatch):
    server = Server()
    obj = GenerateReqInput(text="x", kv_hints=envelope("session.bind", session_id="s"))
    server.generate(obj, caller())

    def fails(*args):
        raise KeyError("session_id")

    monkeypatch.setattr(server.ingress.results, "get_wire", fails)
    monkeypatch.setattr(server.ingress.results, "update", fails)
    meta_info = {"id": "1"}
    server.ingress.finish_request(obj, meta_info)
    server.ingress.on_results(obj.kv_hints.message_id, [])
    assert meta_info == {"id": "1"}
    assert server.ingress.metrics.snapshot()["rejected_by_reason"]["internal_error"] == 2
