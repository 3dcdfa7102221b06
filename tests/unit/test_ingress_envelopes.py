"""Ranges of messages and tools in a client's own envelope: as those of `agent_hint`."""

import time
from urllib.parse import quote

import pytest

pytest.importorskip("sglang")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.managers.io_struct import GenerateReqInput
from test_ingress_parts import Server, actions_of, body_of, caller, chat, completion, envelope
from test_ranges_parts import chat_handler, tool

from sam.srt.entrypoints.routes import install_routes

MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
]
RANGE = {"session_id": "s", "target": "messages", "start": 2}


@pytest.fixture
def server():
    return Server(handler=chat_handler("qwen"))


def evict(**payload):
    return envelope("session.evict", message_id="mine", **(RANGE | payload))


def with_hint(server, edit, **fields):
    """The same edit by the other door, on its way to the scheduler."""
    hint = {"session_id": "s", "context_management": {"manage_request": True, "edits": [edit]}}
    server.openai(chat(hint, messages=MESSAGES, **fields), caller())
    return span_of(server.sent.pop())


def span_of(one):
    (action,) = actions_of(one)
    return (str(action.kind), action.source, action.start, action.end, action.token_ids)


@pytest.mark.parametrize("end", [None, 3])
def test_both_doors_say_the_same_about_a_range(server, end):
    tools = [tool("a"), tool("b")]
    edit = {"type": "evict", "target": "messages", "start": 2, "end": end}
    expected = with_hint(server, edit, tools=tools)
    obj = server.openai(chat(kv_hints=evict(end=end), messages=MESSAGES, tools=tools), caller())
    assert not actions_of(obj.kv_hints)
    assert span_of(server.sent.pop()) == expected and expected[2] > 0
    tool_edit = {"type": "evict", "target": "tools", "start": 1}
    expected = with_hint(server, tool_edit, tools=tools)
    own = evict(target="tools", start=1)
    server.openai(chat(kv_hints=own, messages=MESSAGES, tools=tools), caller())
    assert span_of(server.sent.pop()) == expected


@pytest.mark.parametrize("hint", [None, {"session_id": "s"}])
def test_what_binds_rides_on_the_request_and_the_rest_keeps_its_order(server, hint):
    own = evict()
    offload = envelope("session.demote", "session.bind", "vendor.other", session_id="s")
    own["actions"] += [
        action | {"action_id": f"d{i}"} for i, action in enumerate(offload["actions"])
    ]
    obj = server.openai(chat(hint, kv_hints=own, messages=MESSAGES), caller())
    riding = [a.action_type for a in obj.kv_hints.actions]
    assert riding == ["session.bind"] * (2 if hint else 1)
    sent = [a.action_type for one in server.sent for a in one.actions]
    assert sent == ["session.evict", "session.demote", "vendor.other"]
    shown = server.shown(obj)
    assert shown["message_id"] == "mine" and len(shown["actions"]) == len(sent) + len(riding)


def test_all_that_one_request_carries_has_one_time_stamp(server):
    """The scheduler takes an older edit for one that the request overtook."""
    obj = server.openai(chat({"session_id": "s"}, kv_hints=evict(), messages=MESSAGES), caller())
    (bind,), (edit,) = actions_of(obj.kv_hints), actions_of(server.sent[0])
    assert bind.time_s == edit.time_s > 0


def test_an_envelope_beside_a_management_request_counts(server):
    hint = {"session_id": "s", "context_management": {"manage_request": True}}
    hint["context_management"]["edits"] = [{"type": "offload", "target": "session"}]
    reply = body_of(server.openai(chat(hint, kv_hints=evict(), messages=MESSAGES), caller()))
    shown = reply["kv_hints"]
    assert shown["message_id"] == "mine"
    ids = [action["action_id"] for action in shown["actions"]]
    assert ids == ["hint-a0", "c0"] == [a.action_id for a in server.sent[0].actions]
    own = envelope("session.demote", session_id="s", message_id="other")
    broken = {"session_id": 5, "context_management": {"manage_request": True}}
    obj = GenerateReqInput(agent_hint=broken, kv_hints=own)
    shown = server.generate(obj, caller())["meta_info"]["kv_hints"]
    statuses = {a["action_type"]: a["status"] for a in shown["actions"]}
    assert statuses == {"session.demote": "accepted", "agent_hint": "rejected"}
    for malformed in ("x", {"actions": 1}):
        request = chat(hint, kv_hints=malformed, messages=MESSAGES)
        shown = body_of(server.openai(request, caller()))["kv_hints"]["actions"]
        assert sorted(a["status"] for a in shown) == ["accepted", "rejected"]


def test_requests_without_lists_refuse_them(server):
    plain = Server()
    made = [
        plain.openai(completion(kv_hints=evict()), caller()),
        GenerateReqInput(text="x", kv_hints=evict()),
    ]
    plain.generate(made[1], caller())
    for obj in made:
        (action,) = plain.shown(obj)["actions"]
        assert (action["status"], action["reason"]) == ("rejected", "unsupported_target")
    batch = GenerateReqInput(text=["x", "y"], kv_hints=[evict(), evict()])
    plain.generate(batch, caller())
    assert not any(one.actions for one in batch.kv_hints) and not plain.sent


BAD = [
    ({"start": "2"}, "bad_range"),
    ({"start": -1}, "bad_range"),
    ({"start": 3, "end": 2}, "bad_range"),
    ({"start": 4}, "empty_range"),
    ({"session_id": ""}, "bad_session_id"),
    ({"release": "never"}, "bad_release"),
]


@pytest.mark.parametrize(("payload", "reason"), BAD)
def test_a_malformed_range_is_rejected_and_served(server, payload, reason):
    obj = server.openai(chat(kv_hints=evict(**payload), messages=MESSAGES), caller())
    (action,) = server.shown(obj)["actions"]
    assert (action["status"], action["reason"]) == ("rejected", reason)
    assert not server.sent


def test_unknown_actions_with_such_a_payload_pass(server):
    own = envelope("vendor.evict", session_id="s", target="messages")
    own["actions"].append(envelope("session.evict", **RANGE)["actions"][0])
    own["actions"][1] |= {"action_version": "9", "action_id": "c1"}
    obj = server.openai(chat(kv_hints=own, messages=MESSAGES), caller())
    assert [a.action_type for a in obj.kv_hints.actions] == ["vendor.evict", "session.evict"]
    assert not server.sent


@pytest.mark.parametrize("target", ["session", "tokens"])
@pytest.mark.parametrize("manage", [False, True])
def test_too_much_of_both_doors_is_rejected_and_what_binds_is_not(server, manage, target):
    """The scheduler takes 67 actions of a message, or none."""
    edits = [{"type": "evict", "target": target}] * 60
    hint = {"session_id": "s"}
    hint["context_management"] = {"manage_request": manage, "edits": edits}
    own = envelope(*["session.demote"] * 9, "session.bind", session_id="s")
    answer = server.openai(chat(hint, kv_hints=own, messages=MESSAGES), caller())
    sent = actions_of(server.sent[0] if manage else answer.kv_hints)
    shown = (body_of(answer)["kv_hints"] if manage else server.shown(answer))["actions"]
    rejected = [a["action_id"] for a in shown if a["status"] == "rejected"]
    assert rejected == (["c6", "c7", "c8"] if manage else ["c5", "c6", "c7", "c8"])
    assert {a["reason"] for a in shown if a["action_id"] in rejected} == {"too_many_edits"}
    assert len(sent) == 67 and len(shown) == 67 + len(rejected)
    kinds = [a.kind for a in sent]
    assert kinds.count("session.bind") == (1 if manage else 2)


# -- POST /kv_hints --------------------------------------------------------------


@pytest.fixture
def http(server):
    app = FastAPI()
    app.state.openai_serving_chat = server.handler
    install_routes(app, server.ingress)
    with TestClient(app) as client:
        yield client


def settled(http, message_id, **params):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        (action,) = http.get(f"/kv_hints/{message_id}", params=params).json()["actions"]
        if action["status"] != "accepted":
            return action
        time.sleep(0.01)
    raise AssertionError("still accepted")


def sent_soon(server):
    deadline = time.monotonic() + 20
    while not server.sent and time.monotonic() < deadline:
        time.sleep(0.01)
    return server.sent.pop()


def test_the_route_maps_ranges_of_its_own_lists(server, http):
    edit = {"type": "evict", "target": "messages", "start": 2, "end": None}
    expected = with_hint(server, edit, tools=[tool("a")])
    window = {"model": "m", "messages": MESSAGES, "tools": [tool("a")]}
    reply = http.post("/kv_hints", json=evict() | window)
    assert reply.status_code == 200
    assert [a["status"] for a in reply.json()["actions"]] == ["accepted"]
    assert span_of(sent_soon(server)) == expected


def test_the_window_of_the_route_has_the_namespace_of_its_owner(server, http):
    http.post("/kv_hints", json=evict() | {"messages": MESSAGES, "cache_salt": "salt"})
    (action,) = actions_of(sent_soon(server))
    assert action.cache_salt == "salt" and "/ns-" in action.key.tenant


def test_without_lists_the_route_refuses_ranges(server, http):
    reply = http.post("/kv_hints", json=evict())
    assert reply.json()["actions"][0]["reason"] == "unsupported_target"
    assert not server.sent


def test_what_the_template_refuses_is_rejected_by_the_route(server, http):
    window = {"messages": [MESSAGES[1], {"role": "user", "content": [{"type": "image_url"}]}]}
    reply = http.post("/kv_hints", json=evict(start=1) | window)
    assert reply.status_code == 200
    assert reply.json()["actions"][0]["reason"] == "unresolvable_range"
    numbered = Server(handler=chat_handler("countdown"))
    app = FastAPI()
    app.state.openai_serving_chat = numbered.handler
    install_routes(app, numbered.ingress)
    with TestClient(app) as client:
        reply = client.post("/kv_hints", json=evict() | {"messages": MESSAGES})
        assert reply.status_code == 200
        assert settled(client, "mine")["reason"] == "unresolvable_range"


@pytest.mark.parametrize("message_id", ["plain", "a/b", "run/7?x=1#y", "/a"])
def test_any_message_id_can_be_looked_up(server, http, message_id):
    own = envelope("session.evict", session_id="s", message_id=message_id)
    assert http.post("/kv_hints", json=own).status_code == 200
    reply = http.get(f"/kv_hints/{quote(message_id, safe='')}")
    assert reply.status_code == 200 and reply.json()["message_id"] == message_id


BAD_BODIES = [
    {},
    {"message_id": "x"},
    {"protocol_version": "0.1", "message_id": "x", "actions": 3},
    {"protocol_version": "0.1", "message_id": 7, "actions": []},
    envelope("session.evict", session_id="s") | {"message_id": "x" * 513},
    envelope(*["session.evict"] * 68, session_id="s"),
    envelope("session.evict", session_id="s") | {"messages": [{"role": "nobody"}]},
    None,
    [],
    "kv_hints",
    7,
]


@pytest.mark.parametrize("body", BAD_BODIES)
def test_a_malformed_body_is_rejected_with_200_and_with_400_if_strict(server, http, body):
    reply = http.post("/kv_hints", json=body)
    (action,) = reply.json()["actions"]
    assert reply.status_code == 200 and action["status"] == "rejected" and action["detail"]
    message_id = reply.json()["message_id"]
    assert http.get(f"/kv_hints/{message_id}").json() == reply.json()
    assert server.counts()["rejected_by_reason"] == {action["reason"]: 1} and not server.sent
    strict, app = Server(strict_hints=True, handler=server.handler), FastAPI()
    app.state.openai_serving_chat = server.handler
    install_routes(app, strict.ingress)
    with TestClient(app) as client:
        reply = client.post("/kv_hints", json=body)
        assert reply.status_code == 400 and action["reason"] in reply.json()["error"]["message"]
        assert strict.counts()["rejected_by_reason"] == {action["reason"]: 1}
        assert not strict.sent


@pytest.mark.parametrize("body", [None, [], "x", 7, True])
@pytest.mark.parametrize("path", ["/release_kv_cache", "/v1/release_kv_cache"])
def test_a_release_that_is_no_object_is_answered(server, http, path, body):
    reply = http.post(path, json=body)
    (action,) = reply.json()["kv_hints"]["actions"]
    assert reply.status_code == 200
    assert (action["status"], action["reason"]) == ("rejected", "not_an_object")


def test_a_malformed_action_does_not_take_its_neighbours_down(server, http):
    own = envelope("session.evict", "session.prefetch", session_id="s")
    own["actions"][0]["payload"] = {"session_id": 7}
    assert http.post("/kv_hints", json=own).status_code == 200
    kinds = [a.action_type for a in sent_soon(server).actions]
    assert "session.prefetch" in kinds
