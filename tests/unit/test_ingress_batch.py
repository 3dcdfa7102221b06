"""Several prompts in one body: what is about all of them counts once, after the last."""

import asyncio

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import GenerateReqInput
from test_ingress_parts import Server, actions_of, caller, envelope

EDITS = [{"type": "offload", "target": "session"}, {"type": "evict", "target": "session"}]
HINT = {"session_id": "s", "expected_idle_s": 3, "context_management": {"edits": EDITS}}
BIND = "session.bind"
ALL = ["session.expect", "session.demote", "session.evict"]


async def infer(server, prompts, n=1, **hints):
    """An inference that upstream has taken up, and its requests' envelopes."""
    obj = GenerateReqInput(text=prompts, sampling_params={"n": n}, **hints)
    assert await server.ingress.intercept_generate_request(obj, caller()) is None
    obj.normalize_batch_and_arguments()
    for rid in obj.rid if isinstance(obj.rid, list) else [obj.rid]:
        server.manager.rid_to_state[rid] = obj
    return obj


def kinds(one):
    return [] if one is None else [a.action_type for a in one.actions if a.action_id]


async def finish(server, obj, i):
    rid = obj.rid[i]
    del server.manager.rid_to_state[rid]
    shown = {}
    server.ingress.finish_request(obj[i], shown)
    await asyncio.sleep(0.01)
    return shown["kv_hints"]


async def over(server):
    await asyncio.wait_for(server.ingress.dispatch.join(), 20)
    assert not server.ingress.dispatch._ends._ends
    return [kinds(one) for one in server.sent]


def statuses(shown):
    return {a["action_type"]: (a["status"], a["reason"]) for a in shown["actions"]}


def test_edits_of_one_hint_are_sent_once_when_the_last_prompt_is_over():
    async def run():
        server = Server()
        obj = await infer(server, ["a", "b", "c"], agent_hint=HINT)
        assert [kinds(one) for one in obj.kv_hints] == [[BIND]] * 3
        assert len({one.message_id for one in obj.kv_hints}) == 1
        for i in (2, 0):
            shown = await finish(server, obj, i)
            assert not server.sent and set(statuses(shown)) == {BIND, *ALL}
        await finish(server, obj, 1)
        assert await over(server) == [ALL]
        assert server.sent[0].message_id == obj.kv_hints[0].message_id

    asyncio.run(run())


def test_a_shared_envelope_does_the_same_as_the_hint():
    async def run():
        server = Server()
        own = envelope("session.evict", BIND, session_id="s")
        obj = await infer(server, ["a", "b"], kv_hints=own)
        assert [kinds(one) for one in obj.kv_hints] == [[BIND]] * 2
        for i in range(2):
            await finish(server, obj, i)
        assert await over(server) == [["session.evict"]]

    asyncio.run(run())


def test_an_envelope_per_prompt_is_about_that_prompt_and_the_hint_about_all():
    async def run():
        server = Server()
        own = [envelope("session.evict", message_id=f"m{i}", session_id=f"t{i}") for i in "01"]
        obj = await infer(server, ["a", "b", "c"], kv_hints=[*own, None], agent_hint=HINT)
        carried = [kinds(one) for one in obj.kv_hints]
        assert carried == [[BIND, "session.evict"], [BIND, "session.evict"], [BIND]]
        evicts = [actions_of(one)[1].key.session_id for one in obj.kv_hints[:2]]
        assert evicts == ["t0", "t1"]
        for i in range(3):
            await finish(server, obj, i)
        assert await over(server) == [ALL]
        assert [a.action_id for a in server.sent[0].actions] == ["hint-a1", "hint-a2", "hint-a3"]

    asyncio.run(run())


@pytest.mark.parametrize("prompts", ["a", ["a"]])
def test_what_is_about_one_prompt_rides_on_it(prompts):
    async def run():
        server = Server()
        obj = await infer(server, prompts, agent_hint=HINT)
        one = obj.kv_hints[0] if isinstance(obj.kv_hints, list) else obj.kv_hints
        assert kinds(one) == [BIND, *ALL] and await over(server) == []

    asyncio.run(run())


def test_several_answers_to_each_prompt_are_left_to_the_scheduler():
    async def run():
        server = Server()
        obj = await infer(server, ["a", "b"], n=2, agent_hint=HINT)
        assert {tuple(kinds(one)) for one in obj.kv_hints} == {(BIND, *ALL)}
        assert await over(server) == []

    asyncio.run(run())


def test_with_an_envelope_per_prompt_and_several_answers_the_hint_only_binds():
    async def run():
        server = Server()
        own = [envelope("session.evict", message_id=f"m{i}", session_id="t") for i in range(2)]
        obj = await infer(server, ["a", "b"], n=2, kv_hints=own, agent_hint=HINT)
        assert kinds(obj.kv_hints[0]) == [BIND, "session.evict"] and await over(server) == []
        shown = {}
        server.ingress.finish_request(obj[0], shown)
        told = shown["kv_hints"]["actions"]
        dropped = [a["action_type"] for a in told if a["reason"] == "parallel_samples"]
        assert dropped == ALL

    asyncio.run(run())


def test_a_body_that_fails_before_it_runs_leaves_nothing_waiting():
    async def run():
        server = Server()
        await infer(server, ["a", "b"], agent_hint=HINT)
        server.manager.rid_to_state.clear()
        assert await over(server) == [ALL]

    asyncio.run(run())


@pytest.mark.parametrize(
    "prompts", [{"input_ids": [[1, 2], [3]]}, {"input_embeds": [[[0.5]], [[0.5], [1.0]]]}]
)
def test_prompts_come_as_tokens_and_embeddings_too(prompts):
    async def run():
        server = Server()
        obj = GenerateReqInput(sampling_params={}, agent_hint=HINT, **prompts)
        assert await server.ingress.intercept_generate_request(obj, caller()) is None
        assert kinds(obj.kv_hints) == [BIND]
        obj = GenerateReqInput(
            sampling_params={}, agent_hint=HINT, **{k: v[1] for k, v in prompts.items()}
        )
        assert await server.ingress.intercept_generate_request(obj, caller()) is None
        assert kinds(obj.kv_hints) == [BIND, *ALL]

    asyncio.run(run())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("n_envelopes", [1, 3])
def test_envelopes_that_are_not_one_for_each_prompt_are_reported_and_the_body_is_served(
    n_envelopes, n
):
    async def run():
        server = Server()
        own = [envelope("session.evict", message_id=f"m{i}", session_id="t") for i in range(3)]
        obj = await infer(server, ["a", "b"], n, kv_hints=own[:n_envelopes], agent_hint=HINT)
        shown = {}
        server.ingress.finish_request(obj[0], shown)
        told = statuses(shown["kv_hints"])
        assert told["agent_hint"] == ("rejected", "bad_envelope") and BIND in told
        assert not any("session.evict" in kinds(one) for one in obj.kv_hints) or n > 1
        server.manager.rid_to_state.clear()
        assert await over(server) == ([ALL] if n == 1 else [])

    asyncio.run(run())
