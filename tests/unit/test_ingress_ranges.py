"""When ranges leave the ingress: at once answered, in order, after their inference, bounded.

With SGLang's own chat handler; the scheduler is whoever reads `server.sent`.
"""

import asyncio
import threading

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import GenerateReqInput
from test_ingress_parts import Server, actions_of, body_of, caller, chat, completion, envelope
from test_ranges_parts import chat_handler

MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
]
RANGE = {"type": "evict", "target": "messages", "start": 3, "end": 4}


class Gate:
    """A chat handler whose renderings wait; everything else is the real one's."""

    def __init__(self, name="qwen"):
        self.open = threading.Event()
        self.real = chat_handler(name)
        self.tokenizer_manager = self.real.tokenizer_manager
        self.threads = set()

    def _validate_request(self, request):
        return self.real._validate_request(request)

    def _resolve_lora_path(self, model, path):
        return self.real._resolve_lora_path(model, path)

    def _convert_to_internal_request(self, request, raw=None):
        self.threads.add(threading.current_thread().name)
        assert self.open.wait(20)
        return self.real._convert_to_internal_request(request, raw)


def hint(session="s", *edits, manage=True):
    return {
        "session_id": session,
        "context_management": {"manage_request": manage, "edits": list(edits or [RANGE])},
    }


def session_edit(kind):
    return {"type": kind, "target": "session"}


async def manage(server, handler, session="s", *edits, raw=None):
    request = chat(hint(session, *edits), messages=MESSAGES)
    reply = await server.ingress.intercept_openai_request(handler, request, raw or caller())
    return body_of(reply)["kv_hints"]


def sent_of(server):
    return [
        (action.key.session_id, str(action.kind).removeprefix("session."), action.target)
        for one in server.sent
        for action in actions_of(one)
    ]


def known(server, reply, tenant="anonymous"):
    now_s = 0.0
    return server.ingress.results.get(reply["message_id"], tenant, now_s)["actions"]


# -- management ------------------------------------------------------------------


def test_a_range_is_answered_before_anything_is_rendered():
    async def run():
        server, gate = Server(), Gate()
        reply = await manage(server, gate)
        assert [a["status"] for a in reply["actions"]] == ["accepted"] and not server.sent
        gate.open.set()
        await server.ingress.dispatch.join()
        assert sent_of(server) == [("s", "evict", "tokens")]
        assert threading.current_thread().name not in gate.threads

    asyncio.run(run())


def test_hints_of_a_session_stay_behind_its_range_and_others_pass():
    async def run():
        server, gate = Server(), Gate()
        await manage(server, gate)
        await manage(server, gate, "s", session_edit("offload"))
        server.ingress.submit_envelope(envelope("session.prefetch", session_id="s"), "anonymous")
        await manage(server, gate, "other", session_edit("evict"))
        await manage(server, gate, "s", RANGE | {"type": "prefetch"}, session_edit("evict"))
        assert sent_of(server) == [("other", "evict", "session")]
        gate.open.set()
        await server.ingress.dispatch.join()
        assert sent_of(server)[1:] == [
            ("s", "evict", "tokens"),
            ("s", "demote", "session"),
            ("s", "prefetch", "session"),
            ("s", "prefetch", "tokens"),
            ("s", "evict", "session"),
        ]
        await manage(server, gate, "s", session_edit("offload"))
        assert len(server.sent) == 6

    asyncio.run(run())


def test_the_same_id_of_another_owner_does_not_wait():
    async def run():
        server, gate = Server(), Gate()
        await manage(server, gate)
        await manage(server, gate, "s", session_edit("offload"), raw=caller("Bearer b"))
        assert len(server.sent) == 1
        gate.open.set()
        await server.ingress.dispatch.join()

    asyncio.run(run())


def test_an_inference_does_not_wait_for_a_range():
    async def run():
        server, gate = Server(), Gate()
        await manage(server, gate)
        obj = GenerateReqInput(text="x", agent_hint={"session_id": "s"})
        assert await server.ingress.intercept_generate_request(obj, caller()) is None
        assert actions_of(obj.kv_hints)[0].time_s > 0 and not server.sent
        gate.open.set()
        await server.ingress.dispatch.join()
        (evict,) = actions_of(server.sent[0])
        assert evict.time_s <= actions_of(obj.kv_hints)[0].time_s

    asyncio.run(run())


def test_what_cannot_be_resolved_is_rejected_and_the_rest_is_sent():
    async def run():
        server, handler = Server(), chat_handler("countdown")
        reply = await manage(server, handler, "s", RANGE, session_edit("offload"))
        await server.ingress.dispatch.join()
        first, second = known(server, reply)
        assert (first["status"], first["reason"]) == ("rejected", "unresolvable_range")
        assert second["status"] == "accepted" and sent_of(server) == [("s", "demote", "session")]
        await manage(server, handler, "t")
        await server.ingress.dispatch.join()
        assert len(server.sent) == 1
        server.ingress.on_results(server.sent[0].message_id, [])
        assert server.ingress.dispatch._in_flight.n == 0

    asyncio.run(run())


def test_a_handler_that_breaks_is_a_rejection():
    class Broken(Gate):
        def _resolve_lora_path(self, model, path):
            raise RuntimeError("broken")

    async def run():
        server, gate = Server(), Broken()
        gate.open.set()
        reply = await manage(server, gate)
        await server.ingress.dispatch.join()
        assert known(server, reply)[0]["reason"] == "unresolvable_range" and not server.sent

    asyncio.run(run())


def test_too_many_ranges_are_dropped_and_one_client_has_half():
    async def run():
        server, gate = Server(max_pending_ranges=4), Gate()
        a = [await manage(server, gate, f"a{i}", raw=caller("Bearer a")) for i in range(3)]
        b = await manage(server, gate, "b", raw=caller("Bearer b"))
        statuses = [(r["actions"][0]["status"], r["actions"][0]["reason"]) for r in (*a, b)]
        accepted, dropped = ("accepted", ""), ("dropped", "overloaded")
        assert statuses == [accepted, accepted, dropped, accepted]
        gate.open.set()
        await server.ingress.dispatch.join()
        assert len(server.sent) == 3
        assert server.ingress.dispatch._rendering.n == 0

    asyncio.run(run())


def test_many_boundaries_of_one_request_are_refused():
    edits = [RANGE | {"start": i, "end": i + 1} for i in range(12)]
    messages = [{"role": "user", "content": f"q{i}"} for i in range(20)]
    server = Server(handler=chat_handler("qwen"))
    reply = body_of(server.openai(chat(hint("s", *edits), messages=messages), caller()))
    statuses = [a["status"] for a in reply["kv_hints"]["actions"]]
    assert statuses == ["accepted"] * 7 + ["rejected"] * 5
    assert len(actions_of(server.sent[0])) == 7


def test_the_namespace_of_the_radix_key_travels_with_the_span():
    server = Server(handler=chat_handler("qwen"))
    request = chat(hint(), messages=MESSAGES, cache_salt="salt", extra_key="key")
    server.openai(request, caller())
    (evict,) = actions_of(server.sent[0])
    assert (evict.cache_salt, evict.extra_key) == ("salt", "key")
    assert len(evict.token_ids) > 4 * evict.start


# -- inference, then edits -------------------------------------------------------


def converted(server, handler, request):
    return handler._convert_to_internal_request(request)[0]


@pytest.mark.parametrize("ending", ["finished", "aborted", "never registered"])
def test_edits_of_ranges_follow_their_inference(ending):
    async def run():
        server, handler = Server(), chat_handler("qwen")
        edits = [session_edit("offload"), RANGE, session_edit("prefetch")]
        request = chat(hint("s", *edits, manage=False), messages=MESSAGES)
        assert await server.ingress.intercept_openai_request(handler, request, caller()) is None
        obj = converted(server, handler, request)
        assert await server.ingress.intercept_generate_request(obj, caller()) is None
        assert type(obj.agent_hint) is dict
        bind, offload = actions_of(obj.kv_hints)
        assert (bind.kind, offload.kind) == ("session.bind", "session.demote")
        obj.normalize_batch_and_arguments()
        if ending != "never registered":
            server.manager.rid_to_state[obj.rid] = obj
            await asyncio.sleep(0.3)
            assert not server.sent
        if ending == "finished":
            shown = server.shown(obj)["actions"]
            assert [a["status"] for a in shown] == ["accepted"] * 4
        else:
            server.manager.rid_to_state.clear()
        await asyncio.wait_for(server.ingress.dispatch.join(), 10)
        assert sent_of(server) == [("s", "evict", "tokens"), ("s", "prefetch", "session")]
        assert server.sent[0].message_id == obj.kv_hints.message_id
        evict = actions_of(server.sent[0])[0]
        ids = memoryview(evict.token_ids).cast("i").tolist()
        assert obj.input_ids == ids and evict.end is None
        assert not server.ingress.dispatch._ends._ends

    asyncio.run(run())


def test_ranges_of_parallel_samples_are_dropped():
    server = Server(handler=chat_handler("qwen"))
    obj = server.openai(chat(hint(manage=False), messages=MESSAGES, n=2), caller())
    _, dropped = server.shown(obj[0])["actions"]
    assert (dropped["status"], dropped["reason"]) == ("dropped", "parallel_samples")
    assert not server.sent


# -- routes without messages -----------------------------------------------------


@pytest.mark.parametrize("target", ["messages", "tools"])
@pytest.mark.parametrize("manage_request", [True, False])
def test_no_lists_no_ranges(target, manage_request):
    server = Server()
    raw_hint = hint("s", {"type": "evict", "target": target}, manage=manage_request)
    answer = server.openai(completion(raw_hint), caller())
    shown = body_of(answer)["kv_hints"] if manage_request else server.shown(answer)
    assert shown["actions"][-1]["reason"] == "unsupported_target"
    obj = GenerateReqInput(text="x", agent_hint=raw_hint)
    reply = server.generate(obj, caller())
    shown = reply["meta_info"]["kv_hints"] if manage_request else server.shown(obj)
    assert shown["actions"][-1]["reason"] == "unsupported_target"
    assert not server.sent


def test_token_ranges_are_taken_as_they_are():
    server = Server()
    edit = {"type": "evict", "target": "tokens", "start": 5, "end": 9}
    server.generate(GenerateReqInput(agent_hint=hint("s", edit)), caller())
    server.openai(chat(hint("s", edit), messages=MESSAGES), caller())
    for one in server.sent:
        (evict,) = actions_of(one)
        assert (evict.target, evict.start, evict.end, evict.source) == ("tokens", 5, 9, "tokens")
        assert evict.token_ids is None


def test_a_client_cannot_send_tokens_of_others():
    server = Server()
    own = envelope(
        "session.evict",
        session_id="s",
        target="tokens",
        start=1,
        token_ids="AAAA",
        cache_salt="victim",
        extra_key="x",
        source="messages",
    )
    obj = GenerateReqInput(text="x", kv_hints=own)
    server.generate(obj, caller())
    server.ingress.submit_envelope(own | {"message_id": "m2"}, "t")
    for one in (obj.kv_hints, server.sent[0]):
        assert set(one.actions[0].payload) == {"session_id", "target", "start", "tenant", "time_s"}
