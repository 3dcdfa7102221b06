"""The hint ingress: what an inference carries on, what a management request gets back.

On real request models of SGLang; the only stand-in is the TokenizerManager.
"""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")
openai_types = pytest.importorskip("openai.types")

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from sglang.srt.entrypoints.openai.protocol import EmbeddingRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from test_ingress_parts import (
    MANAGE_EVICT,
    Server,
    actions_of,
    body_of,
    caller,
    chat,
    completion,
    envelope,
    events_of,
)

from sam.core.validation import HintError

BAD_HINTS = [
    5,
    "text",
    [],
    {},
    {"session_id": ""},
    {"session_id": 7},
    {"session_id": "x" * 513},
    {"session_id": "x" * 1_000_000},
    {"session_id": "s", "parent_session_id": 1},
    {"session_id": "s", "context_management": []},
    {"session_id": "s", "context_management": {"edits": {}}},
    {"session_id": "s", "context_management": {"edits": [{"type": "burn", "target": "session"}]}},
    {"session_id": "s", "context_management": {"edits": [{"type": "evict", "target": "disk"}]}},
    {"session_id": "s", "context_management": {"edits": [MANAGE_EVICT["edits"][0]] * 65}},
    {
        "session_id": "s",
        "context_management": {
            "edits": [{"type": "evict", "target": "messages", "start": 3, "end": 3}]
        },
    },
    {"session_id": "s", "expected_idle_s": float("nan")},
    {"session_id": "s", "expected_idle_s": -1},
    {"session_id": "s", "cache_control": {"type": "forever"}},
]
BAD_MANAGEMENT = [
    hint | {"context_management": MANAGE_EVICT | (hint.get("context_management") or {})}
    for hint in BAD_HINTS
    if isinstance(hint, dict) and isinstance(hint.get("context_management", {}), dict)
]


@pytest.fixture
def server():
    return Server()


# -- management ------------------------------------------------------------------


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "x"}]])
def test_manage_on_chat_is_a_valid_empty_completion(server, messages):
    hint = {"session_id": "s", "context_management": MANAGE_EVICT}
    response = server.openai(chat(hint, messages=messages), caller())
    assert response.status_code == 200
    parsed = ChatCompletion.model_validate(body_of(response))
    assert len(parsed.choices) == 1 and parsed.choices[0].finish_reason == "stop"
    assert parsed.choices[0].message.content == "" and parsed.usage.total_tokens == 0
    shown = body_of(response)["kv_hints"]
    assert [a["status"] for a in shown["actions"]] == ["accepted"]
    (sent,) = server.sent
    (action,) = actions_of(sent)
    assert (action.kind, action.key.session_id, action.scope) == (
        "session.evict",
        "s",
        "subtree",
    )


def test_manage_on_chat_streams_one_chunk(server):
    hint = {"session_id": "s", "context_management": MANAGE_EVICT}
    events = events_of(server.openai(chat(hint, messages=[], stream=True), caller()))
    assert events[-1] == "[DONE]"
    chunk = ChatCompletionChunk.model_validate(json.loads(events[0]))
    assert chunk.choices[0].finish_reason == "stop" and chunk.choices[0].delta.content == ""
    assert len(server.sent) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_manage_on_completions(server, stream):
    hint = {"session_id": "s", "context_management": MANAGE_EVICT}
    response = server.openai(completion(hint, stream=stream), caller())
    body = json.loads(events_of(response)[0]) if stream else body_of(response)
    parsed = openai_types.Completion.model_validate(body)
    assert parsed.choices[0].text == "" and parsed.choices[0].finish_reason == "stop"
    assert len(server.sent) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_manage_on_generate(server, stream):
    hint = {"session_id": "s", "context_management": MANAGE_EVICT}
    reply = server.generate(GenerateReqInput(agent_hint=hint, stream=stream), caller())
    assert reply["text"] == "" and reply["meta_info"]["finish_reason"] == {"type": "stop"}
    assert reply["meta_info"]["completion_tokens"] == 0
    assert len(server.sent) == 1


@pytest.mark.parametrize("number", range(len(BAD_MANAGEMENT)))
def test_malformed_management_is_answered_200_rejected(server, number):
    hint = BAD_MANAGEMENT[number]
    response = server.openai(chat(hint, messages=[]), caller())
    assert response.status_code == 200
    ChatCompletion.model_validate(body_of(response))
    (action,) = body_of(response)["kv_hints"]["actions"]
    assert action["status"] == "rejected" and action["reason"]
    assert len(json.dumps(body_of(response))) < 2_000
    assert not server.sent and server.counts()["rejected_hints"] == 1


def test_a_management_request_never_generates_even_if_sending_fails(server):
    def fail(_):
        raise RuntimeError("scheduler gone")

    server.manager.send_kv_hints = fail
    hint = {"session_id": "s", "context_management": MANAGE_EVICT}
    response = server.openai(chat(hint, messages=[]), caller())
    (action,) = body_of(response)["kv_hints"]["actions"]
    assert (action["status"], action["reason"]) == ("rejected", "internal_error")


# -- inference -------------------------------------------------------------------


def test_an_inference_carries_bind_and_edits(server):
    hint = {
        "session_id": "s",
        "parent_session_id": "p",
        "expected_idle_s": 3,
        "context_management": {
            "edits": [{"type": "evict", "target": "tokens", "start": 4, "end": 5}]
        },
        "colour": "blue",
    }
    obj = server.openai(chat(hint), caller())
    bind, expect, evict = actions_of(obj.kv_hints)
    assert (bind.kind, bind.key.session_id, bind.parent_session_id) == ("session.bind", "s", "p")
    assert expect.expected_idle_s == 3
    assert (evict.target, evict.start, evict.end, evict.source) == ("tokens", 4, 5, "tokens")
    assert not server.sent
    assert [a["status"] for a in server.shown(obj)["actions"]] == ["accepted"] * 3
    assert server.counts()["unknown_keys"] == 1


@pytest.mark.parametrize("number", range(len(BAD_HINTS)))
def test_malformed_hints_are_served_counted_and_reported(server, number):
    obj = server.openai(chat(BAD_HINTS[number]), caller())
    assert not actions_of(obj.kv_hints)
    (action,) = server.shown(obj)["actions"]
    assert action["status"] == "rejected" and action["reason"]
    assert len(action["detail"]) <= 200
    assert server.counts()["rejected_hints"] == 1
    assert sum(server.counts()["rejected_by_reason"].values()) == 1


def test_requests_without_hints_are_left_alone(server):
    request = chat()
    obj = server.openai(request, caller())
    assert request.agent_hint is None and obj.kv_hints is None
    assert server.shown(obj) is None
    embedding = EmbeddingRequest(model="m", input="x")
    assert asyncio.run(server.ingress.intercept_openai_request(None, embedding, None)) is None


def test_an_ingress_that_fails_serves_without_hints(server, monkeypatch):
    monkeypatch.setattr(server.ingress, "_lower_inference", lambda *a: 1 / 0)
    obj = server.openai(chat({"session_id": "s"}), caller())
    assert obj.kv_hints is None
    assert server.counts()["rejected_by_reason"] == {"internal_error": 1}


@pytest.mark.parametrize("make", [chat, completion])
def test_prompt_cache_key_and_session_id_bind(server, make):
    for fields, session in (
        ({"prompt_cache_key": "k"}, "k"),
        ({"session_id": "s"}, "s"),
        ({"session_id": "s", "prompt_cache_key": "k"}, "s"),
    ):
        (bind,) = actions_of(server.openai(make(**fields), caller()).kv_hints)
        assert (bind.kind, bind.key.session_id) == ("session.bind", session)
    hinted = server.openai(make({"session_id": "h"}, prompt_cache_key="k"), caller())
    assert actions_of(hinted.kv_hints)[0].key.session_id == "h"


def test_an_unusable_prompt_cache_key_is_no_error(server):
    obj = server.openai(chat(prompt_cache_key="k" * 2_000), caller())
    assert not actions_of(obj.kv_hints)
    assert server.counts()["rejected_by_reason"] == {"id_too_long": 1}


# -- owners ----------------------------------------------------------------------


def tenant_of(server, raw, **fields):
    obj = server.openai(chat({"session_id": "s"}, **fields), raw)
    return actions_of(obj.kv_hints)[0].key.tenant


def test_tenants_come_from_key_salt_and_extra_key(server):
    tenants = [
        tenant_of(server, None),
        tenant_of(server, caller("Bearer secret-a")),
        tenant_of(server, caller("Bearer secret-b")),
        tenant_of(server, caller("Bearer secret-a"), cache_salt="x"),
        tenant_of(server, caller("Bearer secret-a"), extra_key="x"),
        tenant_of(server, caller(), cache_salt="x"),
    ]
    assert len(set(tenants)) == len(tenants) and tenants[0] == "anonymous"
    assert not any("secret" in tenant for tenant in tenants)
    assert tenant_of(server, caller()) == "anonymous"
    assert tenant_of(server, caller("Bearer secret-a")) == tenants[1]
    assert tenant_of(server, caller("bearer secret-a")) == tenants[1]


def test_management_and_inference_have_the_same_owner(server):
    hint = {"session_id": "s", "context_management": MANAGE_EVICT}
    for fields in ({}, {"cache_salt": "x"}, {"extra_key": "y"}):
        server.openai(chat(hint, messages=[], **fields), caller("Bearer a"))
        owner = actions_of(server.sent[-1])[0].key.tenant
        assert owner == tenant_of(server, caller("Bearer a"), **fields)


def test_a_client_cannot_choose_its_tenant_or_time(server):
    own = envelope("session.evict", "session.bind", session_id="s", tenant="victim", time_s=9e9)
    obj = GenerateReqInput(text="x", kv_hints=own)
    server.generate(obj, caller("Bearer a"))
    for action in actions_of(obj.kv_hints):
        assert action.key.tenant == tenant_of(server, caller("Bearer a"))
        assert action.time_s < 5e9


def test_internal_actions_of_clients_are_stripped(server):
    own = envelope("sam.query", "sam.parallel", "session.bind", "vendor.other", session_id="s")
    obj = GenerateReqInput(text="x", kv_hints=own)
    server.generate(obj, caller())
    types = [a.action_type for a in obj.kv_hints.actions]
    assert types == ["session.bind", "vendor.other"]
    server.ingress.submit_envelope(own | {"message_id": "m-2"}, "t")
    assert [a.action_type for a in server.sent[-1].actions] == types


def test_no_envelope_passes_unstamped(server):
    """What sam refuses must not reach the scheduler as the client wrote it."""
    bind = envelope("session.bind", session_id="s", tenant="victim", time_s=1)["actions"]
    too_many = envelope() | {"actions": bind * 100}
    long_id = envelope(message_id="x" * 1_000) | {"actions": bind}
    for own in (too_many, long_id):
        obj = GenerateReqInput(text="x", kv_hints=own)
        server.generate(obj, caller())
        assert not obj.kv_hints.actions
        assert server.shown(obj)["actions"][0]["status"] == "rejected"
        with pytest.raises(HintError):
            server.ingress.submit_envelope(own, "t")
    assert not server.sent


@pytest.mark.parametrize(
    "own", [{"actions": []}, {"message_id": 3}, {"bad": 1}, "x", 5, [{"bad": 1}], [None, "x"]]
)
def test_a_malformed_envelope_never_fails_an_inference(server, own):
    obj = GenerateReqInput(text="x", kv_hints=own)
    server.generate(obj, caller())
    assert not obj.kv_hints.actions
    assert server.shown(obj)["actions"][0]["status"] == "rejected"


def test_an_empty_list_of_envelopes_is_none(server):
    obj = GenerateReqInput(text="x", kv_hints=[])
    server.generate(obj, caller())
    assert obj.kv_hints is None


def test_a_malformed_hint_beside_an_envelope_is_reported(server):
    own = envelope("session.bind", session_id="s", message_id="mine")
    obj = GenerateReqInput(text="x", kv_hints=own, agent_hint={"session_id": 5})
    server.generate(obj, caller())
    statuses = {a["action_type"]: a["status"] for a in server.shown(obj)["actions"]}
    assert statuses == {"session.bind": "accepted", "agent_hint": "rejected"}


@pytest.mark.parametrize("name", ["action_id", "action_type"])
def test_a_huge_name_of_an_action_is_not_kept(server, name):
    own = envelope("session.bind", session_id="s")
    own["actions"][0][name] = "x" * 2**20
    obj = GenerateReqInput(text="x", kv_hints=own)
    server.generate(obj, caller())
    assert len(str(server.shown(obj))) < 2_000


def test_equal_message_ids_of_two_tenants_do_not_meet(server):
    own = envelope("session.bind", session_id="s", message_id="same")
    objs = [GenerateReqInput(text="x", kv_hints=dict(own)) for _ in range(2)]
    for obj, key in zip(objs, "ab", strict=True):
        server.generate(obj, caller(f"Bearer {key}"))
    assert objs[0].kv_hints.message_id != objs[1].kv_hints.message_id
    done = SimpleNamespace(
        action_id="c0", action_type="session.bind", status="done", reason="", detail={}
    )
    server.ingress.on_results(objs[0].kv_hints.message_id, [done])
    assert server.shown(objs[0])["actions"][0]["status"] == "done"
    assert server.shown(objs[1])["actions"][0]["status"] == "accepted"
    assert {server.shown(obj)["message_id"] for obj in objs} == {"same"}


# -- both doors, batches, samples ------------------------------------------------


def test_hint_and_envelope_of_one_request_travel_together(server):
    own = envelope("session.demote", session_id="s", message_id="mine")
    obj = GenerateReqInput(text="x", kv_hints=own, agent_hint={"session_id": "s"})
    server.generate(obj, caller())
    bind, demote = actions_of(obj.kv_hints)
    assert (bind.action_id, demote.action_id) == ("hint-a0", "c0")
    assert server.shown(obj)["message_id"] == "mine"
    assert len(server.shown(obj)["actions"]) == 2


def test_batches_bind_every_item(server):
    obj = GenerateReqInput(text=["x", "y"], agent_hint={"session_id": "s"})
    server.generate(obj, caller())
    assert [actions_of(e)[0].key.session_id for e in obj.kv_hints] == ["s", "s"]
    own = [envelope("session.bind", session_id=s, message_id=s) for s in "ab"]
    obj = GenerateReqInput(text=["x", "y"], kv_hints=own)
    server.generate(obj, caller())
    assert [actions_of(e)[0].key.session_id for e in obj.kv_hints] == ["a", "b"]
    obj = GenerateReqInput(text=["x", "y"], kv_hints=own, agent_hint={"session_id": "s"})
    server.generate(obj, caller())
    ids = [[a.key.session_id for a in actions_of(e)] for e in obj.kv_hints]
    assert ids == [["s", "a"], ["s", "b"]]


@pytest.mark.parametrize("n", [1, 3])
def test_parallel_samples_are_marked_for_the_scheduler(server, n):
    """Upstream warms the prefix with a request of its own: edits must not run after that."""
    obj = server.openai(chat({"session_id": "s"}, n=n), caller())
    envelopes = obj.kv_hints if isinstance(obj.kv_hints, list) else [obj.kv_hints]
    assert len(envelopes) == n
    for one in envelopes:
        types = [a.action_type for a in one.actions]
        assert types == ["session.bind"] + ["sam.parallel"] * (n > 1)
    assert len(server.shown(obj[0] if n > 1 else obj)["actions"]) == 1


# -- outcomes --------------------------------------------------------------------


def test_outcomes_reach_the_response_and_the_route(server):
    obj = server.openai(chat({"session_id": "s"}), caller("Bearer a"))
    shown = server.shown(obj)
    result = SimpleNamespace(
        action_id="a0",
        action_type="session.bind",
        status="done",
        reason="",
        detail={"tokens": {"device": 3}},
    )
    server.ingress.on_results(obj.kv_hints.message_id, [result])
    after = server.shown(obj)["actions"][0]
    assert (after["status"], after["tokens"]) == ("done", {"device": 3})
    owner = tenant_of(server, caller("Bearer a"))
    results, now_s = server.ingress.results, time.time()
    assert results.get(shown["message_id"], owner, now_s)["actions"][0]["status"] == "done"
    assert results.get(shown["message_id"], "anonymous", now_s) is None


def test_query_waits_for_the_scheduler_and_gives_up(server):
    async def ask():
        task = asyncio.ensure_future(server.ingress.query("sessions", limit=5))
        await asyncio.sleep(0)
        sent = server.sent[-1]
        assert sent.actions[0].payload == {"what": "sessions", "limit": 5}
        server.ingress.on_results(sent.message_id, [SimpleNamespace(detail={"n": 1})])
        assert await task == {"n": 1}
        with pytest.raises(TimeoutError):
            await server.ingress.query("sessions", timeout_s=0.01)

    asyncio.run(ask())
    assert not server.ingress._queries
