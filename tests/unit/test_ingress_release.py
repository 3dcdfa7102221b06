"""Strict hints, and release mode of clients older than `agent_hint`."""

import asyncio
import json

import pytest

pytest.importorskip("sglang")

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from test_ingress_parts import Server, actions_of, caller, chat
from test_ranges_parts import chat_handler, tool

MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
]


# -- strict ----------------------------------------------------------------------

MALFORMED = [
    {"session_id": ""},
    {"session_id": "s", "context_management": {"manage_request": True, "edits": {}}},
    5,
]
GOOD = {
    "session_id": "s",
    "context_management": {
        "manage_request": True,
        "edits": [{"type": "evict", "target": "messages", "start": 3, "end": 4}],
    },
}


@pytest.mark.parametrize("bad", MALFORMED)
def test_strict_hints_are_refused(bad):
    server = Server(strict_hints=True)
    with pytest.raises(ValueError, match="bad_|not_an_object"):
        server.openai(chat(bad, messages=[]), caller())
    with pytest.raises(ValueError, match="bad_|not_an_object"):
        server.generate(GenerateReqInput(text="x", agent_hint=bad), caller())
    with pytest.raises(ValueError):
        server.openai(chat(kv_hints={"actions": []}), caller())
    assert server.counts()["rejected_hints"] == 3


def test_strict_hints_leave_good_ones_alone():
    server = Server(strict_hints=True, handler=chat_handler("qwen"))
    reply = server.openai(chat(GOOD, messages=MESSAGES), caller())
    assert reply.status_code == 200 and len(server.sent) == 1
    obj = server.openai(chat(prompt_cache_key="k" * 2_000), caller())
    assert not actions_of(obj.kv_hints)


# -- release mode ----------------------------------------------------------------


def released(body, server=None, tenant="t"):
    server = server or Server()

    async def run():
        reply = server.ingress.release(chat_handler("qwen"), body, tenant)
        await server.ingress.dispatch.join()
        return reply["kv_hints"]

    return asyncio.run(run()), [a for one in server.sent for a in actions_of(one)]


def release_body(**fields):
    return {
        "model": "m",
        "cache_salt": "session-1",
        "cache_sharing": True,
        "messages": MESSAGES,
        "messages_released_index": 1,
    } | fields


def test_a_release_evicts_from_the_index_on():
    tools = [tool("a"), tool("b")]
    reply, sent = released(release_body(tools=tools, tools_released_index=1))
    assert [a["status"] for a in reply["actions"]] == ["accepted"] * 2
    for action, source in zip(sent, ("messages", "tools"), strict=True):
        assert (action.kind, action.key.session_id) == ("session.evict", "session-1")
        assert (action.target, action.source, action.end) == ("tokens", source, None)
        assert action.cache_salt == "session-1"


def test_a_release_of_tools_only():
    body = release_body(messages_released_index=4, tools=[tool("a")], tools_released_index=0)
    _, (action,) = released(body)
    assert action.source == "tools"


def test_a_hint_in_the_body_names_the_session():
    _, (action,) = released(release_body(agent_hint={"session_id": "other"}))
    assert action.key.session_id == "other"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages_released_index": 4}, "empty_range"),
        ({"messages_released_index": None}, "empty_range"),
        ({"messages_released_index": "1"}, "bad_range"),
        ({"messages_released_index": -1}, "bad_range"),
        ({"cache_salt": None}, "bad_session_id"),
        ({"messages": "text"}, "unresolvable_range"),
        ({"messages": [{"role": "nobody"}]}, "unresolvable_range"),
        ({"tools": 5}, "unresolvable_range"),
    ],
)
def test_an_unusable_release_is_answered(fields, reason):
    reply, sent = released(release_body(**fields))
    (action,) = reply["actions"]
    assert (action["status"], action["reason"]) == ("rejected", reason) and not sent
    with pytest.raises(ValueError, match=reason):
        released(release_body(**fields), Server(strict_hints=True))


@pytest.mark.parametrize(
    ("body", "bound"),
    [
        ({"cache_sharing": True}, True),
        ({"cache_sharing": False}, False),
        ({}, False),
        ({"messages": [{"role": "user", "content": '"cache_sharing": true'}]}, False),
    ],
)
def test_a_shared_salt_alone_binds_only_in_release_mode(body, bound):
    server = Server()
    obj = server.openai(chat(cache_salt="s1"), caller(body=json.dumps(body).encode()))
    assert (obj.kv_hints is not None) == bound
    if bound:
        (bind,) = actions_of(obj.kv_hints)
        reply, (evict,) = released(release_body(cache_salt="s1"), tenant=bind.key.tenant)
        assert evict.key == bind.key


def test_release_routes_answer_like_the_clients_expect():
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from sam.srt.entrypoints.routes import install_routes

    server, app = Server(), FastAPI()
    app.state.openai_serving_chat = chat_handler("qwen")
    install_routes(app, server.ingress)
    with TestClient(app) as client:
        for path in ("/release_kv_cache", "/v1/release_kv_cache"):
            response = client.post(path, json=release_body())
            assert response.status_code == 200
            assert response.json()["kv_hints"]["actions"][0]["status"] == "accepted"
        message_id = response.json()["kv_hints"]["message_id"]
        known = client.get(f"/kv_hints/{message_id}", params={"cache_salt": "session-1"})
        assert known.json()["message_id"] == message_id
    strict = Server(strict_hints=True)
    app = FastAPI()
    app.state.openai_serving_chat = chat_handler("qwen")
    install_routes(app, strict.ingress)
    with TestClient(app) as client:
        response = client.post("/release_kv_cache", json=release_body(cache_salt=None))
        assert response.status_code == 400
        assert "bad_session_id" in response.json()["error"]["message"]


def test_a_chat_request_built_from_a_release_is_the_same_window():
    _, (action,) = released(release_body())
    request = ChatCompletionRequest(messages=MESSAGES, model="m")
    window = chat_handler("qwen")._convert_to_internal_request(request)[0].input_ids
    assert memoryview(action.token_ids).cast("i").tolist() == window
