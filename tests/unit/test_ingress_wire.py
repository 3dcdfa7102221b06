"""What JSON allows and the way to the scheduler does not: refused before it is sent."""

import json

import pytest

pytest.importorskip("sglang")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.managers.io_struct import KvHintsReqInput, msgpack_decode, msgpack_encode
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
from test_ingress_parts import Server, actions_of, body_of, caller, chat, envelope

from sam.core.validation import HintError
from sam.srt.entrypoints.envelopes import check_encodable
from sam.srt.entrypoints.routes import install_routes


class WireServer(Server):
    """What is sent takes the real encoding to the scheduler."""

    def __init__(self, **config):
        super().__init__(**config)
        self.manager.send_kv_hints = self._send

    def _send(self, one):
        self.sent.append(over_the_wire(one))


def over_the_wire(one):
    return msgpack_decode(msgpack_encode(KvHintsReqInput(kv_hints=one))).kv_hints


def unsendable(fields, kind):
    own = envelope(kind, session_id="s")
    action = own["actions"][0]
    fields = json.loads(fields)
    action["payload"] |= fields.pop("payload", {})
    action |= fields
    return own


BAD = [
    json.dumps({"payload": {"x": 10**30}}),
    json.dumps({"payload": {"x": ["\ud800"]}}),
    json.dumps({"payload": {"\ud800": 1}}),
    json.dumps({"action_version": "\ud800"}),
    json.dumps({"action_version": ""}),
]
KINDS = pytest.mark.parametrize("kind", ["session.evict", "vendor.x"])


@KINDS
@pytest.mark.parametrize("fields", BAD)
def test_an_inference_is_served_and_told(fields, kind):
    server = WireServer()
    obj = server.openai(chat({"session_id": "s"}, kv_hints=unsendable(fields, kind)), caller())
    assert [a.kind for a in actions_of(over_the_wire(obj.kv_hints))] == ["session.bind"]
    statuses = {a["status"]: a["reason"] for a in server.shown(obj)["actions"]}
    assert statuses["rejected"] in ("bad_envelope", "bad_action")


@KINDS
@pytest.mark.parametrize("fields", BAD)
def test_a_management_request_does_the_rest(fields, kind):
    server = WireServer()
    edits = [{"type": "evict", "target": "session"}]
    hint = {"session_id": "s", "context_management": {"manage_request": True, "edits": edits}}
    reply = server.openai(chat(hint, messages=[], kv_hints=unsendable(fields, kind)), caller())
    shown = body_of(reply)["kv_hints"]["actions"]
    assert sorted(a["status"] for a in shown) == ["accepted", "rejected"]
    assert [a.kind for a in actions_of(server.sent[0])] == ["session.evict"]


@KINDS
@pytest.mark.parametrize("fields", BAD)
def test_the_route_refuses_it(fields, kind):
    server, app = WireServer(), FastAPI()
    install_routes(app, server.ingress)
    bad = json.dumps(unsendable(fields, kind))
    with TestClient(app, headers={"content-type": "application/json"}) as client:
        reply = client.post("/kv_hints", content=bad)
        (action,) = reply.json()["actions"]
        assert reply.status_code == 200 and action["status"] == "rejected"
        assert action["reason"].startswith("bad_")
        assert not server.sent and server.ingress.dispatch._in_flight.n == 0
        good = envelope("session.evict", session_id="s")
        assert client.post("/kv_hints", json=good).status_code == 200 and server.sent


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return envelope("vendor.x", session_id="s", x=value)


def test_what_passes_can_be_sent_from_a_deeper_stack_too():
    def passes(depth):
        try:
            check_encodable(nested(depth))
        except HintError as error:
            assert error.reason == "bad_envelope"
            return False
        return True

    assert passes(100)
    deepest = next(depth for depth in range(100, 1_000) if not passes(depth + 1))
    own = decode_kv_hints_envelope(nested(deepest + 32))
    assert over_the_wire(own) == own
