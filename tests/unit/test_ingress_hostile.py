"""Nonsense at every door: an inference is always served, and what is said of each hint is whole.

Random bodies with fixed seeds; the scheduler's side is its own decoder and table on no cache.
"""

import json
import random

import msgspec
import pytest

pytest.importorskip("sglang")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.managers.io_struct import GenerateReqInput
from test_ingress_parts import Server, body_of, caller, chat, completion
from test_ranges_parts import chat_handler, tool

from sam.core.actions import ActionKind, ActionStatus, parse_envelope
from sam.core.hints import is_manage
from sam.srt.entrypoints.routes import install_routes

KINDS = {kind.value for kind in ActionKind}
STATUSES = {status.value for status in ActionStatus}
MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
]
JSON = {"content-type": "application/json"}
DEEP = json.loads("[" * 60 + "]" * 60)
ODD = [None, True, False, 0, -1, 1, 1.5, 2**31, 2**63, 2**64, -(2**70), 1e308, float("nan"), "",
       "x", "\x00", "\ud800", "é" * 300, "\U0001d518" * 200, "9" * 600, [], {}, [None], [[]],
       {"a": None}, DEEP, {"type": "evict"}, {"session_id": "a"}]  # fmt: skip


class Nonsense:
    """Bodies that are right but for about every fifth value."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def maybe(self, value, share=0.2):
        return self.rng.choice(ODD) if self.rng.random() < share else value

    def one_of(self, *values):
        return self.maybe(self.rng.choice(values))

    def some(self, make, at_most):
        return self.maybe([make(i) for i in range(self.rng.randrange(at_most + 1))])

    def keys(self, **values):
        return {name: value for name, value in values.items() if self.rng.random() < 0.8}

    def edit(self, _):
        return self.maybe(
            {
                "type": self.one_of("evict", "offload", "prefetch"),
                "target": self.one_of("session", "messages", "tools", "tokens"),
            }
            | self.keys(start=self.one_of(None, 0, 2), end=self.one_of(None, 3, 99))
        )

    def hint(self):
        management = {
            "manage_request": self.one_of(True, False),
            "edits": self.some(self.edit, 4),
        }
        hint = {"session_id": self.one_of("a", "b", "default_session")} | self.keys(
            parent_session_id=self.one_of("a", "b"),
            context_management=self.maybe(management),
            expected_idle_s=self.maybe(5),
            cache_control=self.maybe({"type": "ephemeral", "ttl": self.maybe(3)}),
            other=self.one_of(1),
        )
        return self.maybe(hint, 0.1)

    def action(self, i):
        kinds = [f"session.{k}" for k in ("bind", "evict", "demote", "prefetch", "expect")]
        return self.maybe(
            {
                "action_id": self.one_of(f"c{i}", "c0"),
                "action_type": self.one_of(*kinds, "session.retain", "vendor.x", "sam.query"),
                "action_version": self.maybe("0.1", 0.1),
                "payload": self.maybe(
                    {"session_id": self.one_of("a", "b")}
                    | self.keys(
                        target=self.one_of("session", "tokens", "messages", "tools"),
                        start=self.one_of(None, 0, 2),
                        end=self.one_of(None, 3),
                        scope=self.one_of("session", "subtree"),
                        ttl_s=self.maybe(3),
                        expected_idle_s=self.maybe(3),
                        **{k: self.one_of("x") for k in ("tenant", "time_s", "token_ids")},
                        **{k: self.one_of("x") for k in ("source", "cache_salt", "extra_key")},
                    )
                ),
            },
            0.1,
        )

    def envelope(self):
        return self.maybe(
            {
                "protocol_version": self.maybe("0.1", 0.1),
                "message_id": self.one_of("m1", "m/2"),
                "actions": self.some(self.action, 4),
            },
            0.1,
        )

    def hints(self):
        return {
            "agent_hint": self.hint() if self.rng.random() < 0.8 else None,
            "kv_hints": self.envelope() if self.rng.random() < 0.5 else None,
        }


def check_shown(shown):
    """Each action is named once, with a status and what goes with it; all of it is JSON."""
    assert isinstance(shown["message_id"], str)
    ids = [action["action_id"] for action in shown["actions"]]
    assert len(ids) == len(set(ids))
    for action in shown["actions"]:
        assert action["status"] in STATUSES
        assert bool(action["reason"]) == (action["status"] not in ("accepted", "done")), action
    json.dumps(shown)


def take(server):
    """What was sent goes over the wire and is answered; nothing may be left behind."""
    for one in [*server.sent]:
        wired = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=type(one))
        assert len(parse_envelope(wired)) == len(one.actions)
        owners = [a.payload["tenant"] for a in one.actions if a.action_type in KINDS]
        assert set(owners) <= {"anonymous"}
        server.ingress.on_results(one.message_id, [])
    server.sent.clear()
    assert server.ingress.dispatch._in_flight.n == server.ingress.dispatch._rendering.n == 0
    assert not server.ingress.dispatch._sent and not server.ingress.dispatch._ends._ends
    assert server.counts()["rejected_by_reason"].get("internal_error") is None


@pytest.fixture
def server():
    return Server(handler=chat_handler("qwen"), hint_rate_per_s=0.0)


def request_of(nonsense, fields):
    """One of the OpenAI routes' requests."""
    if nonsense.rng.random() < 0.3:
        return completion(**fields)
    tools = [tool("a"), tool("b")] if nonsense.rng.random() < 0.4 else None
    n = nonsense.rng.choice([1, 1, 1, 2])
    return chat(fields["agent_hint"], kv_hints=fields["kv_hints"], messages=MESSAGES,
                tools=tools, n=n)  # fmt: skip


def is_kept(fields):
    """Whether upstream's own model of the body lets it pass: it needs JSON."""
    try:
        json.dumps(fields, allow_nan=False)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_openai_routes(server, seed):
    nonsense, plain = Nonsense(f"openai-{seed}"), Server()
    for _ in range(40):
        fields = nonsense.hints()
        if not is_kept(fields):
            continue
        request = request_of(nonsense, fields)
        target = server if "messages" in type(request).model_fields else plain
        answer = target.openai(request, caller())
        if is_manage(fields["agent_hint"]):
            assert answer.status_code == 200
            body = body_of(answer)
            assert len(body["choices"]) == 1 and body["usage"]["total_tokens"] == 0
            check_shown(body["kv_hints"])
        else:
            shown = target.shown(answer if answer.is_single else answer[0])
            assert shown is not None or not any(fields.values())
            if shown is not None:
                check_shown(shown)
        take(target)


@pytest.mark.parametrize("seed", range(4))
def test_generate(seed):
    nonsense, server = Nonsense(f"generate-{seed}"), Server(hint_rate_per_s=0.0)
    for _ in range(60):
        fields = nonsense.hints()
        prompt = nonsense.rng.choice(["one", ["one", "two"]])
        obj = GenerateReqInput(text=prompt, sampling_params={"n": 1}, **fields)
        reply = server.generate(obj, caller())
        if is_manage(fields["agent_hint"]):
            assert reply["text"] == ""
            check_shown(reply["meta_info"]["kv_hints"])
        else:
            assert reply is None
        take(server)


@pytest.mark.parametrize("seed", range(4))
def test_routes_without_inference(server, seed):
    nonsense, app = Nonsense(f"routes-{seed}"), FastAPI()
    app.state.openai_serving_chat = server.handler
    install_routes(app, server.ingress)
    with TestClient(app) as client:
        for _ in range(40):
            envelope = nonsense.envelope()
            body = envelope if isinstance(envelope, dict) else {}
            body = body | nonsense.keys(messages=nonsense.maybe(MESSAGES))
            index = nonsense.one_of(0, 1, 9)
            release = nonsense.keys(
                cache_salt=nonsense.maybe("a"),
                messages=nonsense.maybe(MESSAGES),
                messages_released_index=index,
                tools=nonsense.maybe([tool("a")]),
                tools_released_index=nonsense.one_of(0, 1),
                agent_hint=nonsense.hint(),
            )
            for path, sent in (("/kv_hints", body), ("/v1/release_kv_cache", release)):
                if not is_kept(sent):
                    continue
                reply = client.post(path, content=json.dumps(sent), headers=JSON)
                assert reply.status_code == 200, reply.text
                check_shown(reply.json().get("kv_hints", reply.json()))
            client.portal.call(server.ingress.dispatch.join)
            owners_are_checked_by_tenant(server)


def owners_are_checked_by_tenant(server):
    """A salt makes an owner of its own; else as `take`."""
    for one in [*server.sent]:
        assert len(parse_envelope(one)) == len(one.actions)
        server.ingress.on_results(one.message_id, [])
    server.sent.clear()
    assert server.ingress.dispatch._in_flight.n == 0
    assert server.counts()["rejected_by_reason"].get("internal_error") is None
