"""The swarm of the quickstart: reproducible, well-formed, the same for every arm."""

import asyncio
import json
from dataclasses import replace

import pytest

from sam.bench import swarm_client
from sam.bench.swarm import Conversation, SwarmSpec, lineage_hint, manage_body, plan_swarm
from sam.bench.swarm_client import Answer, RequestFailed, SwarmRun, run_swarm
from sam.core.hints import is_manage, parse_agent_hint

FAST = SwarmSpec(
    waves=2, members=3, system_words=20, wait_s=(0.0, 0.01), slow_wait_s=0.02, lead_s=0.0
)


def answer(text="reply", ids=(1, 2)):
    return Answer(text, (7, 8, 9), ids, 3, 1, 1, 0, 0.1, 0.2)


def record(monkeypatch, *, hints, fails=False):
    """Play FAST against nothing; every body as it was sent, and the management bodies."""
    plan, sent, managed, run = plan_swarm(FAST), [], [], SwarmRun()

    async def chat(client, body):
        sent.append(json.loads(json.dumps(body)))
        await asyncio.sleep(0.001 * (len(sent) % 3))
        if fails and len(sent) > 3:
            raise RequestFailed("no")
        return answer(f"reply {len(body['messages'])}")

    async def manage(client, body):
        managed.append(body)
        return {}

    monkeypatch.setattr(swarm_client, "chat", chat)
    monkeypatch.setattr(swarm_client, "manage", manage)
    error = None
    try:
        run_swarm("http://test", plan, run, hints=hints, on_answer=lambda _: None)
    except ExceptionGroup as group:
        error = group
    return plan, run, sent, managed, error


def test_equal_seeds_give_equal_plans_and_others_differ():
    assert plan_swarm(SwarmSpec(seed=4)) == plan_swarm(SwarmSpec(seed=4))
    assert plan_swarm(SwarmSpec(seed=4)).system != plan_swarm(SwarmSpec(seed=5)).system


@pytest.mark.parametrize("seed", range(8))
def test_order_covers_every_turn_once_and_keeps_causes_before_effects(seed):
    plan = plan_swarm(SwarmSpec(seed=seed))
    wanted = {(a.session_id, i) for a in plan.agents for i in range(len(a.turns))}
    place = {key: n for n, key in enumerate(plan.order)}
    assert set(plan.order) == wanted and len(plan.order) == len(wanted)
    for agent in plan.agents:
        places = [place[agent.session_id, i] for i in range(len(agent.turns))]
        assert places == sorted(places)
    leader = plan.leader
    for index, turn in enumerate(leader.turns):
        for member in plan.waves[turn.spawns] if turn.spawns is not None else ():
            first = place[member.session_id, 0]
            last = place[member.session_id, len(member.turns) - 1]
            assert place[leader.session_id, index] < first
            assert last < place[leader.session_id, index + 1]


def test_plan_is_a_tree_with_members_that_end_early():
    plan = plan_swarm(SwarmSpec())
    assert plan.leader.is_leader
    members = [a for wave in plan.waves for a in wave]
    assert len({a.session_id for a in plan.agents}) == len(plan.agents)
    assert {a.parent_id for a in members} == {plan.leader.session_id}
    assert len({len(a.turns) for a in members}) > 1
    assert [t.spawns for t in plan.leader.turns if t.spawns is not None] == [0, 1, 2]
    assert plan.leader.turns[-1].calls == ""


def test_bodies_share_system_and_tools_and_only_grow():
    plan = plan_swarm(FAST)
    member = max(plan.waves[0], key=lambda a: len(a.turns))
    talk, before = Conversation(plan, member), []
    for index in range(len(member.turns)):
        body = talk.body(index)
        assert body["messages"][: len(before)] == before
        assert body["messages"][0] == {"role": "system", "content": plan.system}
        assert body["tools"] == list(plan.tools)
        assert "agent_hint" not in body
        talk.take_reply(index, f"reply {index}")
        before = list(talk.messages)
    assert "tool_calls" not in before[-1]


def test_every_tool_message_answers_a_call_of_the_message_before():
    plan = plan_swarm(FAST)
    talk = Conversation(plan, plan.leader)
    for index in range(len(plan.leader.turns)):
        spawned = plan.leader.turns[index - 1].spawns if index else None
        results = tuple("x" for _ in plan.waves[spawned]) if spawned is not None else ()
        talk.body(index, results)
        talk.take_reply(index, "ok")
    open_calls = []
    for message in talk.messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] == open_calls.pop(0)
        else:
            assert not open_calls
            open_calls = [call["id"] for call in message.get("tool_calls", [])]
            assert len(open_calls) == len(set(open_calls))
    assert not open_calls


def test_hints_are_valid_and_manage_only_where_meant():
    agent = plan_swarm(FAST).waves[0][0]
    hint = parse_agent_hint(lineage_hint(agent))
    assert (hint.session_id, hint.parent_session_id) == (agent.session_id, agent.parent_id)
    assert not is_manage(lineage_hint(agent))
    for action in ("offload", "prefetch", "evict"):
        body = manage_body(agent, action)
        assert body["messages"] == [] and is_manage(body["agent_hint"])
        edit = parse_agent_hint(body["agent_hint"]).edits[0]
        assert (edit.type, edit.target, edit.release) == (action, "session", None)
    assert parse_agent_hint(manage_body(agent, "offload", release="now")["agent_hint"])


def test_both_arms_send_the_same_bodies_in_the_planned_order(monkeypatch):
    plan, run, stock, no_management, _ = record(monkeypatch, hints=False)
    _, hinted_run, sam, managed, _ = record(monkeypatch, hints=True)
    assert not no_management
    assert tuple(run.sent) == tuple(hinted_run.sent) == plan.order
    assert len(run.answers) == len(plan.order)
    assert all("agent_hint" not in body for body in stock)
    assert [body.pop("agent_hint")["session_id"] for body in sam] == [s for s, _ in plan.order]
    assert stock == sam
    assert len(hinted_run.manage_s) == len(managed)


def test_every_agent_is_evicted_once_and_the_root_last(monkeypatch):
    plan, _, _, managed, _ = record(monkeypatch, hints=True)
    acts = [
        (m["agent_hint"]["context_management"]["edits"][0]["type"], m["agent_hint"]["session_id"])
        for m in managed
    ]
    evicted = [session for kind, session in acts if kind == "evict"]
    assert sorted(evicted) == sorted(a.session_id for a in plan.agents)
    assert acts[-1] == ("evict", plan.leader.session_id)
    waits = sum(len(a.turns) - 1 for a in plan.agents)
    assert [kind for kind, _ in acts].count("offload") == waits
    assert [kind for kind, _ in acts].count("prefetch") == waits


def test_a_failed_request_ends_the_swarm_and_keeps_what_was_measured(monkeypatch):
    _, run, _, _, error = record(monkeypatch, hints=True, fails=True)
    assert error is not None and error.subgroup(RequestFailed)
    assert 0 < len(run.answers) <= 3
    assert run.wall_s > 0


def test_the_slow_tool_is_the_longest_wait():
    spec = replace(SwarmSpec(), slow_wait_s=9.0)
    for wave in plan_swarm(spec).waves:
        assert wave[-1].turns[-1].wait_s == 9.0
