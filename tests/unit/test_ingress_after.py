"""Clients that use ids in their own way: message ids again, request ids as lists."""

import asyncio

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import GenerateReqInput
from test_ingress_parts import Server, actions_of, caller, chat, envelope
from test_ingress_ranges import MESSAGES, Gate
from test_ranges_parts import chat_handler

from sam.srt.entrypoints.after import RequestEnds
from sam.srt.entrypoints.spans import ChatBody


def evict(action_id, **payload):
    own = envelope("session.evict", session_id="s", target="messages", start=3, **payload)
    own["actions"][0]["action_id"] = action_id
    return own


async def infer(server, handler, own, rid=None):
    """An inference that upstream has taken up."""
    request = chat(None, messages=MESSAGES, kv_hints=own, rid=rid)
    assert await server.ingress.intercept_openai_request(handler, request, caller()) is None
    obj = handler._convert_to_internal_request(request)[0]
    assert await server.ingress.intercept_generate_request(obj, caller()) is None
    obj.normalize_batch_and_arguments()
    for one in obj.rid if isinstance(obj.rid, list) else [obj.rid]:
        server.manager.rid_to_state[one] = obj
    return obj


def finish(server, obj):
    server.ingress.finish_request(obj, {})
    del server.manager.rid_to_state[obj.rid]


def sent(server):
    return [a.action_id for one in server.sent for a in actions_of(one)]


async def sends(server, n):
    async with asyncio.timeout(20):
        while len(server.sent) < n:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("first", [0, 1])
def test_two_inferences_of_one_message_id_each_have_their_end(first):
    async def run():
        server, handler = Server(), chat_handler("qwen")
        failed = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(context))
        both = [await infer(server, handler, evict(f"e{i}")) for i in range(2)]
        finish(server, both[first])
        await sends(server, 1)
        await asyncio.sleep(0.3)
        assert sent(server) == [f"e{first}"]
        finish(server, both[1 - first])
        await asyncio.wait_for(server.ingress.dispatch.join(), 20)
        assert sent(server) == [f"e{first}", f"e{1 - first}"]
        assert not failed and not server.ingress.dispatch._ends._ends

    asyncio.run(run())


def test_an_end_while_the_range_is_still_resolved_is_not_missed():
    async def run():
        server, gate = Server(), Gate()
        request = chat(None, messages=MESSAGES, kv_hints=evict("e"))
        await server.ingress.intercept_openai_request(gate, request, caller())
        obj = gate.real._convert_to_internal_request(request)[0]
        await server.ingress.intercept_generate_request(obj, caller())
        obj.normalize_batch_and_arguments()
        server.manager.rid_to_state[obj.rid] = obj
        await asyncio.sleep(0)
        server.ingress.finish_request(obj, {})
        gate.open.set()
        await asyncio.wait_for(server.ingress.dispatch.join(), 20)
        assert sent(server) == ["e"]

    asyncio.run(run())


def test_a_request_id_in_a_list_is_no_error():
    async def run():
        server, handler = Server(), chat_handler("qwen")
        await infer(server, handler, evict("e"), rid=["r"])
        server.manager.rid_to_state.clear()
        await asyncio.wait_for(server.ingress.dispatch.join(), 20)
        assert sent(server) == ["e"] and not server.ingress.dispatch._ends._ends

    asyncio.run(run())


def test_several_requests_of_one_body_are_over_with_the_last():
    async def run():
        manager = Server().manager
        manager.rid_to_state.update(a=1, b=1)
        ends = RequestEnds(manager)
        end = ends.expect(GenerateReqInput(text=["x", "y"], rid=["a", "b"]))
        task = asyncio.create_task(end.wait())
        for rid in "ab":
            await asyncio.sleep(0.01)
            assert not task.done()
            ends.announce(rid)
            del manager.rid_to_state[rid]
        await asyncio.wait_for(task, 20)
        assert not ends._ends

    asyncio.run(run())


def test_one_message_id_used_again_does_not_widen_the_bound_of_ranges():
    async def run():
        server, passes, waits = Server(max_pending_ranges=4), Gate(), Gate()
        passes.open.set()

        def submit(action_id, handler):
            body = ChatBody(handler, chat(messages=MESSAGES))
            known = server.ingress.submit_envelope(evict(action_id), "anonymous", body)
            return known["actions"][-1]["status"]

        assert [submit("a", passes), submit("b", waits)] == ["accepted"] * 2
        await sends(server, 1)
        assert [submit("c", waits), submit("d", waits)] == ["accepted", "dropped"]
        waits.open.set()
        await server.ingress.dispatch.join()
        assert sent(server) == ["a", "b", "c"] and server.ingress.dispatch._rendering.n == 0

    asyncio.run(run())
