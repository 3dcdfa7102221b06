"""Session hints against a real server: what they do to the cache and to the answers."""

import json
import os
import socket
import time
import urllib.error
from pathlib import Path

import pytest
from openai import OpenAI

from sam.testing.random_swarm import manage
from sam.testing.server import ServerProcess
from tests.e2e.conftest import REPO, STRICT_ENV

pytestmark = pytest.mark.e2e
SYSTEM = "You are one of several careful agents. " * 40
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def server(server_args):
    args = server_args("--radix-cache-backend", "sam", "--enable-metrics", total_tokens=8_192)
    with ServerProcess(args, env=STRICT_ENV) as process:
        yield process
        assert process.request("/sessions")["summary"]["errors"] == 0
        assert "Traceback" not in process.log_text()


@pytest.fixture
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="sk-test", max_retries=0)


@pytest.fixture(autouse=True)
def empty_cache(server):
    for session in all_sessions(server):
        if session["parent_session_id"] is None:
            key = {"session_id": session["session_id"]}
            manage(server, key, "evict")
    server.flush_cache()


def lineage(session_id, parent=None):
    return {"session_id": session_id, "parent_session_id": parent or session_id}


def chat(server, text, hint=None, **extra):
    body = {
        "model": "sam",
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
        **extra,
    }
    if hint is not None:
        body["agent_hint"] = hint
    return server.request("/v1/chat/completions", body)


def all_sessions(server):
    return server.request("/sessions?limit=1000")["sessions"]


def session_of(server, session_id):
    return next(s for s in all_sessions(server) if s["session_id"] == session_id)


def outcomes(server, kv_hints, timeout_s=10.0):
    """All actions of a message once each is final. A response may still say `accepted`: it
    and the outcome travel by different ways."""
    deadline = time.monotonic() + timeout_s
    while True:
        actions = server.request(f"/kv_hints/{kv_hints['message_id']}")["actions"]
        if all(action["status"] not in ("accepted", "deferred") for action in actions):
            return actions
        assert time.monotonic() < deadline, f"still {actions}"
        time.sleep(0.02)


def outcome(server, kv_hints):
    """The first action of a message once it is final."""
    return outcomes(server, kv_hints)[0]


def cached_tokens(reply):
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def device_pool(server):
    return server.request("/sessions")["summary"]["device"]


def test_evict_frees_what_only_the_session_uses(server):
    chat(server, "I am the leader", lineage("lead"))
    chat(server, "I am the worker", lineage("work", "lead"))
    before = device_pool(server)
    worker = session_of(server, "work")
    assert worker["parent_session_id"] == "lead" and worker["state"] == "idle"
    private = worker["tokens"]["device"]["private"]
    assert private > 0 and worker["tokens"]["device"]["shared"] > 400

    action = outcome(server, manage(server, lineage("work", "lead"), "evict"))

    assert action["status"] == "done"
    assert action["tokens"]["device"] == private
    after = device_pool(server)
    assert after["free"] - before["free"] == private
    assert sum(after.values()) == sum(before.values())
    assert session_of(server, "work")["state"] == "ended"
    again = chat(server, "I am the leader", lineage("lead"))
    assert cached_tokens(again) == again["usage"]["prompt_tokens"] - 1


def test_evict_of_a_parent_known_by_name_only_cascades(server):
    free = device_pool(server)["free"]
    chat(server, "first member", lineage("m1", "team-by-name"))
    chat(server, "second member", lineage("m2", "m1"))
    assert session_of(server, "team-by-name")["state"] == "named"

    action = outcome(server, manage(server, lineage("team-by-name"), "evict"))

    assert action["status"] == "done"
    assert {session_of(server, s)["state"] for s in ("m1", "m2")} == {"ended"}
    assert device_pool(server)["free"] == free
    assert action["tokens"]["host"] == action["tokens"]["device"]


def test_offload_and_prefetch_move_between_tiers(server):
    key = lineage("tiers")
    first = chat(server, "a question about tiers", key)
    total = session_of(server, "tiers")["tokens"]["device"]["private"]

    action = outcome(server, manage(server, key, "offload", release="now"))
    assert (action["status"], action["tokens"]["device"]) == ("done", total)
    moved = session_of(server, "tiers")
    assert moved["state"] == "offloaded"
    assert moved["tokens"]["device"]["private"] == 0
    assert moved["tokens"]["host"]["private"] == total

    action = outcome(server, manage(server, key, "prefetch"))
    assert (action["status"], action["tokens"]["device"]) == ("done", total)
    back = session_of(server, "tiers")
    assert back["state"] == "resuming"
    assert back["tokens"]["device"]["private"] == total

    again = chat(server, "a question about tiers", key)
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert cached_tokens(again) == first["usage"]["prompt_tokens"] - 1
    late = outcome(server, manage(server, key, "prefetch"))
    assert late["reason"] == "already_on_device"


def test_offload_is_lazy_and_a_resume_costs_nothing(server):
    key = lineage("lazy")
    chat(server, "a lazy question", key)
    action = outcome(server, manage(server, key, "offload"))
    assert (action["status"], action["tokens"]["device"]) == ("done", 0)
    tokens = session_of(server, "lazy")["tokens"]
    assert tokens["device"] == tokens["host"]
    reply = server.request(
        "/generate",
        {
            "text": "x",
            "agent_hint": key,
            "sampling_params": {"max_new_tokens": 1},
        },
    )
    assert outcome(server, reply["meta_info"]["kv_hints"])["status"] == "done"
    assert session_of(server, "lazy")["state"] == "idle"


def test_offloaded_session_gives_way_before_an_older_idle_one(server):
    def fill(session_id, first, n_tokens):
        ids = [first, *(300 + j % 1000 for j in range(n_tokens))]
        body = {"input_ids": ids, "agent_hint": lineage(session_id)}
        server.request("/generate", {**body, "sampling_params": {"max_new_tokens": 1}})

    fill("older-idle", 401, 700)
    fill("younger", 402, 700)
    kept = session_of(server, "older-idle")["tokens"]["device"]["private"]
    outcome(server, manage(server, lineage("younger"), "offload"))
    fill("filler-1", 403, 3_500)
    fill("filler-2", 404, 3_500)
    assert session_of(server, "older-idle")["tokens"]["device"]["private"] == kept
    assert session_of(server, "younger")["tokens"]["device"]["private"] < kept


def test_id_reuse_opens_a_new_generation(server):
    key = lineage("compressor")
    for generation in (1, 2, 3):
        chat(server, f"compress {generation}", key)
        assert session_of(server, "compressor")["generation"] >= generation
        assert outcome(server, manage(server, key, "evict"))["status"] == "done"
    assert outcome(server, manage(server, key, "evict"))["status"] == "missing"


def test_inference_with_edit_answers_first_and_edits_then(server):
    edits = [{"type": "evict", "target": "session"}]
    hint = {**lineage("one-shot"), "context_management": {"edits": edits}}
    free = device_pool(server)["free"]
    reply = chat(server, "answer, then forget", hint)
    assert reply["usage"]["completion_tokens"] == 4
    evicted = outcomes(server, reply["kv_hints"])[1]
    assert (evicted["action_type"], evicted["status"]) == ("session.evict", "done")
    assert evicted["tokens"]["device"] >= reply["usage"]["prompt_tokens"]
    assert device_pool(server)["free"] == free


@pytest.mark.parametrize("stream", [False, True])
def test_management_reply_is_valid_for_the_openai_sdk(client, stream):
    hint = {
        **lineage("sdk"),
        "context_management": {
            "manage_request": True,
            "edits": [{"type": "prefetch", "target": "session"}],
        },
    }
    started = time.perf_counter()
    reply = client.chat.completions.create(
        model="sam", messages=[], stream=stream, extra_body={"agent_hint": hint}
    )
    if stream:
        chunks = list(reply)
        assert [c.choices[0].finish_reason for c in chunks] == ["stop"]
    else:
        assert reply.choices[0].message.content == ""
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage.total_tokens == 0
    assert time.perf_counter() - started < 1.5


def test_openai_sdk_inference_stream_and_completions(client, server):
    hint = {"agent_hint": lineage("sdk-inference")}
    messages = [{"role": "user", "content": "hello"}]
    stream = client.chat.completions.create(
        model="sam", messages=messages, max_tokens=4, stream=True, extra_body=hint
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream)
    done = client.completions.create(model="sam", prompt="hello", max_tokens=4, extra_body=hint)
    assert done.usage.completion_tokens == 4
    tenants = {s["tenant"] for s in all_sessions(server) if s["session_id"] == "sdk-inference"}
    assert len(tenants) == 1 and tenants.pop().startswith("key-")


def test_streams_carry_what_became_of_the_hint(client, server):
    messages = [{"role": "user", "content": "hello"}]
    served = {"accepted", "done"}
    for hint, statuses in ((lineage("streamed"), served), ("garbage", {"rejected"})):
        extra = {"agent_hint": hint}
        chat_stream = client.chat.completions.create(
            model="sam", messages=messages, max_tokens=3, stream=True, extra_body=extra
        )
        text_stream = client.completions.create(
            model="sam", prompt="hello", max_tokens=3, stream=True, extra_body=extra
        )
        for stream in (chat_stream, text_stream):
            chunks = list(stream)
            assert chunks[-1].choices[0].finish_reason == "length"
            told = [c.kv_hints for c in chunks if getattr(c, "kv_hints", None)]
            assert len(told) == 1 and told[0]["actions"][0]["status"] in statuses


def test_streaming_management_on_generate_is_clean(server):
    """The fixture's teardown finds no traceback in the log."""
    management = {"manage_request": True, "edits": []}
    hint = {**lineage("stream-manage"), "context_management": management}
    reply = server.request("/generate", {"text": "", "stream": True, "agent_hint": hint})
    assert reply.startswith("data: ") and reply.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("field", ["kv_hints", "prompt_cache_key", "agent_hint"])
def test_wrong_types_never_fail_an_openai_request(server, field):
    for value in (5, "x", ["a"], {"a": 1}, [], True):
        reply = chat(server, "typed", **{field: value})
        assert reply["usage"]["completion_tokens"] == 4


def test_top_level_session_id_and_prompt_cache_key_bind(server):
    chat(server, "plain id", session_id="top-level")
    chat(server, "cache key", prompt_cache_key="openai-key")
    states = {s["session_id"]: s["state"] for s in all_sessions(server)}
    assert states["top-level"] == states["openai-key"] == "idle"


def test_tools_and_tool_messages_are_served_with_hints(server):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
    }
    body = {
        "model": "sam",
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
        "tools": [WEATHER],
        "max_tokens": 4,
        "agent_hint": lineage("tools"),
    }
    assert server.request("/v1/chat/completions", body)["usage"]["completion_tokens"] >= 1


MALFORMED = {
    "string": "garbage",
    "number": 17,
    "list": [],
    "empty": {},
    "no id": {"parent_session_id": "x"},
    "id of 1 MB": {"session_id": "x" * 2**20},
    "id is an object": {"session_id": {"a": 1}},
    "edits is a string": {"session_id": "x", "context_management": {"edits": "all"}},
    "too many edits": {
        "session_id": "x",
        "context_management": {"edits": [{"type": "evict", "target": "session"}] * 65},
    },
    "reversed range": {
        "session_id": "x",
        "context_management": {
            "edits": [{"type": "evict", "target": "messages", "start": 5, "end": 2}]
        },
    },
    "negative idle": {"session_id": "x", "expected_idle_s": -1},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_hint_is_served_counted_and_reported(server, name):
    plain = chat(server, "malformed?")
    before = server.request("/sessions")["ingress"]["rejected_hints"]
    reply = chat(server, "malformed?", MALFORMED[name])
    assert reply["choices"] == plain["choices"]
    assert reply["kv_hints"]["actions"][0]["status"] == "rejected"
    assert len(json.dumps(reply["kv_hints"])) < 2_000
    assert server.request("/sessions")["ingress"]["rejected_hints"] == before + 1


def test_malformed_management_request_never_generates(server):
    hint = {"context_management": {"manage_request": True, "edits": 5}}
    reply = chat(server, "do not answer", hint)
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["kv_hints"]["actions"][0]["status"] == "rejected"


def test_generate_accepts_hints_and_envelopes(server):
    envelope = {
        "protocol_version": "0.1",
        "message_id": "native-1",
        "actions": [
            {
                "action_id": "b",
                "action_type": "session.bind",
                "action_version": "0.1",
                "payload": {"session_id": "native", "tenant": "somebody-else", "time_s": 9e9},
            },
            {"action_id": "u", "action_type": "vendor.thing", "action_version": "1", "payload": {}},
        ],
    }
    body = {"text": "native", "kv_hints": envelope, "sampling_params": {"max_new_tokens": 2}}
    server.request("/generate", body)
    assert session_of(server, "native")["tenant"] == "anonymous"

    evict = {**envelope, "message_id": "native-2"}
    evict["actions"] = [{**envelope["actions"][0], "action_type": "session.evict"}]
    accepted = server.request("/kv_hints", evict)
    assert accepted["actions"][0]["status"] == "accepted"
    assert outcome(server, accepted)["status"] == "done"

    hint = {
        **lineage("native"),
        "context_management": {
            "manage_request": True,
            "edits": [{"type": "evict", "target": "session"}],
        },
    }
    reply = server.request("/generate", {"text": "", "agent_hint": hint})
    assert reply["text"] == "" and reply["meta_info"]["completion_tokens"] == 0


def test_bad_requests_have_clear_errors(server):
    for path in ("/kv_hints/unknown-id", "/sessions?limit=0"):
        with pytest.raises(urllib.error.HTTPError) as error:
            server.request(path)
        assert error.value.code in (400, 404, 422)
        assert json.loads(error.value.read())


def test_an_envelope_that_is_no_object_is_answered_with_the_reason(server):
    assert "not_an_object" in json.dumps(server.request("/kv_hints", ["no object"]))


def test_one_tenant_cannot_touch_or_see_another(server):
    chat(server, "mine", lineage("same-id"), cache_salt="alpha")
    chat(server, "mine", lineage("same-id"), cache_salt="beta")
    tenants = {s["tenant"] for s in all_sessions(server) if s["session_id"] == "same-id"}
    assert len(tenants) == 2
    kv_hints = manage(server, lineage("same-id"), "evict")
    assert outcome(server, kv_hints)["status"] == "missing"
    states = [s["state"] for s in all_sessions(server) if s["session_id"] == "same-id"]
    assert states == ["idle", "idle"]
    with pytest.raises(urllib.error.HTTPError):
        server.request(f"/kv_hints/{kv_hints['message_id']}?cache_salt=alpha")


def test_client_that_hangs_up_leaves_no_running_session(server):
    body = json.dumps(
        {
            "text": "a long answer",
            "stream": True,
            "agent_hint": {
                **lineage("hangup"),
                "context_management": {"edits": [{"type": "evict", "target": "session"}]},
            },
            "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True},
        }
    ).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        assert connection.recv(100)
        assert session_of(server, "hangup")["state"] == "running"
    deadline = time.monotonic() + 20
    while session_of(server, "hangup")["state"] != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert chat(server, "next turn", lineage("hangup"))["usage"]["completion_tokens"] == 4


def test_flush_keeps_sessions_as_empty(server):
    chat(server, "before the flush", lineage("flushed"))
    server.flush_cache()
    session = session_of(server, "flushed")
    assert session["state"] == "idle"
    assert session["tokens"]["device"] == {"private": 0, "shared": 0}
    assert server.request("/sessions/tree")["nodes"] == []
    chat(server, "after the flush", lineage("flushed"))
    assert session_of(server, "flushed")["tokens"]["device"]["private"] > 0


def test_sessions_are_paged(server):
    for i in range(5):
        chat(server, f"page {i}", lineage(f"page-{i}"))
    everything = [s["session_id"] for s in all_sessions(server)]
    first = server.request("/sessions?offset=0&limit=2")["sessions"]
    second = server.request("/sessions?offset=2&limit=2")["sessions"]
    assert [s["session_id"] for s in first + second] == everything[:4]


def test_metrics_are_exported_without_ids(server):
    outcome(server, manage(server, lineage("never-seen"), "evict"))
    text = server.request("/metrics")
    assert 'sglang:sam_actions_total{action="session.evict",status="missing"' in text
    assert "sglang:sam_sessions" in text and "sglang:sam_rejected_hints_total" in text
    assert "never-seen" not in text


def captured_bodies():
    shared = Path(os.environ.get("SAM_SHARED", REPO.parent / "shared"))
    for path in sorted((shared / "captures").glob("*.json")):
        for record in json.loads(path.read_text())["records"]:
            if record.get("body"):
                yield pytest.param(record["body"], id=f"{path.stem}-{record['n']}")


@pytest.mark.parametrize("body", list(captured_bodies()) or [pytest.param(None, id="none")])
def test_bodies_of_the_real_client(server, body):
    if body is None:
        pytest.skip("no captures: set SAM_SHARED to the folder that holds captures/")
    if "image_url" in json.dumps(body["messages"]):
        pytest.skip("the test model takes no images")
    body = {**body, "max_tokens": 2, "stream": False}
    body.pop("tool_choice", None)
    hint = body.get("agent_hint") or {}
    manages = hint.get("context_management", {}).get("manage_request", False)
    reply = server.request("/v1/chat/completions", body)
    assert reply["choices"][0]["message"]["role"] == "assistant"
    if manages:
        assert reply["usage"]["total_tokens"] == 0
        assert reply["choices"][0]["message"]["content"] == ""
    else:
        assert reply["usage"]["completion_tokens"] >= 1
