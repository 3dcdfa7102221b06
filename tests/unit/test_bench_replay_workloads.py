"""Workloads of the replay: reproducible, well-formed, shaped by what they were given."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from sam.bench.workloads import WORKLOADS, build
from sam.bench.workloads.plan import (
    Agent,
    Call,
    Conversation,
    Plan,
    Turn,
    evict_messages,
    lineage,
    manage_session,
)
from sam.bench.workloads.shapes import CODING, common_pages, load_shapes
from sam.bench.workloads.spec import WorkloadSpec
from sam.bench.workloads.text import Vocabulary
from sam.bench.workloads.timeline import NOMINAL_TURN_S, expected_idle_s, timeline_of
from sam.core.hints import is_manage, parse_agent_hint
from sam.sim.trace import TraceError

WORDS = Vocabulary([f"word{i}" for i in range(50)])
SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
MADE = [name for name in WORKLOADS if name != "trace"]


def spec(seed=0, **sizes):
    return WorkloadSpec(seed=seed, **{"users": 4, **sizes})


@pytest.mark.parametrize("name", MADE)
def test_equal_specs_give_equal_plans_and_other_seeds_others(name):
    assert build(name, spec(1), WORDS) == build(name, spec(1), WORDS)
    assert build(name, spec(1), WORDS).agents != build(name, spec(2), WORDS).agents


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("seed", range(4))
def test_every_turn_is_played_once_and_calls_reach_known_agents(name, seed):
    plan = build(name, spec(seed), WORDS)
    line = timeline_of(plan, WORDS.count)
    wanted = {(a, i) for a, agent in plan.agents.items() for i in range(len(agent.turns))}
    assert set(line.times) == wanted
    assert len(plan.users) == 4
    for session, agent in plan.agents.items():
        assert agent.session_id == session and agent.parent_id in plan.agents
        starts = [line.times[session, i][0] for i in range(len(agent.turns))]
        assert starts == sorted(starts)


def test_the_swarm_has_what_the_mission_names():
    plans = [build("swarm", spec(seed, users=10), WORDS) for seed in range(3)]
    agents = [agent for plan in plans for agent in plan.agents.values()]
    turns = [turn for agent in agents for turn in agent.turns]
    roots = [agent for agent in agents if agent.is_root]
    assert len(roots) == 30
    assert all(sum(turn.paused for turn in root.turns) == 1 for root in roots)
    assert any(turn.summary for turn in turns) and any(turn.tool for turn in turns)
    sticky = [agent for agent in agents if agent.sticky]
    assert len(sticky) == len(roots)
    for plan in plans:
        calls = [c for a in plan.agents.values() for t in a.turns for c in t.calls]
        for agent in plan.agents.values():
            spans = sorted((c.first, c.last) for c in calls if c.session_id == agent.session_id)
            if not agent.is_root:
                assert spans[0][0] == 0 and spans[-1][1] == len(agent.turns)
                assert [last for _, last in spans[:-1]] == [first for first, _ in spans[1:]]


def test_mixed_and_nohints_are_the_swarm_with_fewer_hints():
    swarm, mixed, silent = (build(n, spec(3), WORDS) for n in ("swarm", "mixed", "nohints"))
    assert not any(agent.hinted for agent in silent.agents.values())
    hinted = {agent.session_id for agent in mixed.agents.values() if agent.hinted}
    assert sum(root in hinted for _, root in mixed.users) == 2
    assert all(child in hinted for r in hinted for child in mixed.children_of(r))
    for plan in (mixed, silent):
        all_hinted = {k: replace(a, hinted=True) for k, a in plan.agents.items()}
        assert replace(plan, workload="swarm", agents=all_hinted) == swarm


def test_adversarial_lies_but_asks_the_same():
    swarm, lying = (build(name, spec(0, users=8), WORDS) for name in ("swarm", "adversarial"))
    kinds = set()
    for name, agent in lying.agents.items():
        honest = swarm.agents[name]
        assert [t.texts for t in agent.turns] == [t.texts for t in honest.turns]
        assert agent.idle_error in (0.1, 10.0)
        for turn in agent.turns:
            kinds |= {(a, t in lying.agents) for a, t in turn.odd}
            for action, target in turn.odd:
                hint = manage_session(action, target, target)["agent_hint"]
                assert parse_agent_hint(hint).edits[0].type == action
    assert {("evict", True), ("prefetch", True)} <= kinds
    assert any(not known for _, known in kinds)


def test_scale_is_two_factors_and_a_cap():
    sized = WorkloadSpec(lengths=0.1, gaps=0.5, max_gap_s=10)
    assert (sized.tokens(1000), sized.seconds(8), sized.seconds(1e6)) == (100, 4.0, 5.0)
    assert "0.1" in sized.about() and "0.5" in sized.about() and "10 s" in sized.about()


@pytest.mark.skipif(not SHARED.is_dir(), reason="no trace files here")
def test_shapes_come_from_the_traces():
    shapes = load_shapes(SHARED)
    assert shapes.source == CODING
    assert 10_000 < shapes.shared_tokens < 20_000
    assert len(shapes.leaders) > 100 and len(shapes.members) > 10
    plan = build("coding", spec(0, lengths=0.05, traces=SHARED), WORDS)
    known = {
        max(spec(lengths=0.05).tokens(turn.new_tokens), 6)
        for shape in shapes.leaders
        for turn in shape.turns
    }
    lengths = {WORDS.count(t.texts[0]) for a in plan.agents.values() for t in a.turns}
    assert lengths <= known


def test_common_pages_of_paths():
    assert common_pages(((-1, 4), (0, 6)), ((-1, 4), (0, 9))) == 10
    assert common_pages(((-1, 4), (0, 6)), ((-1, 4), (1, 6))) == 4
    assert common_pages(((-1, 4),), ((-1, 3), (0, 1))) == 3
    assert common_pages((), ((0, 1),)) == 0


def tiny_plan():
    """A leader of three turns that calls one member, then compresses."""
    calls = (Call("kid", 0, 2),)
    leader = Agent("root", "root", (
        Turn(("a b c",), 0.0, 4, calls=calls),
        Turn(("d e",), 1.0, 4, paused=True),
        Turn(("f",), 2.0, 4, keep_messages=1, summary="s s"),
    ))  # fmt: skip
    kid = Agent("kid", "root", (Turn(("k",), 0.5, 3, tool="search"), Turn(("l",), 0.5, 3)))
    agents = {"root": leader, "kid": kid}
    return Plan("toy", "", "", "sys", ({"name": "t"},), agents, ((0.0, "root"),), 10, False)


def test_timeline_of_a_small_plan_by_hand():
    plan, turn = tiny_plan(), NOMINAL_TURN_S
    line = timeline_of(plan, WORDS.count)
    kid_end = turn + 0.5 + turn + 0.5 + turn
    assert line.times["root", 0] == (0.0, turn)
    assert line.times["kid", 1][1] == kid_end
    assert line.times["root", 1] == (kid_end + 1.0, kid_end + 1.0 + turn)
    assert line.idle_after("root", 0) == kid_end + 1.0 - turn
    assert line.idle_after("root", 2) is None
    assert line.times["root", 2][0] == kid_end + 1.0 + turn + 2.0 + turn  # the compressor's too
    # root after turn 0: (3 + 5) + (4 + 5); kid: (1 + 5) + (3 + 5), twice; shared: 10
    assert line.working_set_tokens == 17 + 28 + 10
    by_hand = (1.5 * 17 + 1.5 * 31 + 45 + 17 + 4 * 33 + 22) / 10.0 + 10
    assert line.mean_working_set_tokens == round(by_hand)
    assert line.longest_tokens == 10 + 17 + (2 + 5) + (4 + 5)
    assert line.n_turns == 5 and plan.n_requests() == 6


def test_expected_idle_is_near_the_plan_and_wrong_where_meant():
    plan = build("swarm", spec(0, users=10), WORDS)
    line = timeline_of(plan, WORDS.count)
    ratios = []
    for session, agent in plan.agents.items():
        assert expected_idle_s(plan, line, session, len(agent.turns) - 1) is None
        for index in range(len(agent.turns) - 1):
            true = line.idle_after(session, index)
            said = expected_idle_s(plan, line, session, index)
            assert said == expected_idle_s(plan, line, session, index)
            ratios.append(said / true if true > 0.1 else 1.0)
    ratios.sort()
    assert 0.8 < ratios[len(ratios) // 2] < 1.25
    assert ratios[0] < 0.5 and ratios[-1] > 2


def test_a_conversation_grows_answers_its_calls_and_is_cut():
    plan = tiny_plan()
    talk = Conversation(plan, plan.agents["root"])
    first = talk.body(0)
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    talk.take_reply(0, "yes")
    second = talk.body(1)
    assert second["messages"][: len(first["messages"])] == first["messages"]
    call, result = second["messages"][-2:]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] and result["role"] == "tool"
    talk.take_reply(1, "again")
    asked = talk.compressor_body(2)
    assert asked["messages"][:-1] == talk.messages and asked["messages"][-1]["role"] == "user"
    start, window = talk.cut(2)
    assert (start, len(window)) == (1, 5)
    third = talk.body(2)
    assert [m["content"] for m in third["messages"]] == ["sys", "s s", "f"]
    assert talk.cut(0) is None


def test_answers_before_tool_waits_are_made_calls_the_same_for_every_arm():
    plan = replace(tiny_plan(), tool_calls=True)
    for name, calls in (("root", ["spawn_member", None, None]), ("kid", ["search", None])):
        talk = Conversation(plan, plan.agents[name])
        for index, call in enumerate(calls):
            body = talk.body(index)
            assert body.get("tool_choice") == ("required" if call else None)
            assert not call or body["max_tokens"] > plan.agents[name].turns[index].reply_tokens
            talk.take_reply(index, "reply")
            calls_of = talk.messages[-1].get("tool_calls", [])
            assert [c["function"]["name"] for c in calls_of] == [call] * bool(call)
    free, forced = (timeline_of(p, WORDS.count) for p in (tiny_plan(), plan))
    assert forced.working_set_tokens > free.working_set_tokens


def test_hints_are_the_clients():
    plan = tiny_plan()
    agent = plan.agents["kid"]
    hint = parse_agent_hint(lineage("kid", "root"))
    assert (hint.session_id, hint.parent_session_id) == ("kid", "root")
    body = manage_session("offload", "kid", "root")
    assert body["messages"] == [] and "tools" not in body and is_manage(body["agent_hint"])
    window = [{"role": "user", "content": "x"}] * 4
    body = evict_messages(agent, 1, window, {"tools": [1], "max_tokens": 9, "temperature": 0})
    edit = parse_agent_hint(body["agent_hint"]).edits[0]
    assert (edit.type, edit.target, edit.start, edit.end) == ("evict", "messages", 1, 4)
    assert (body["messages"], body["tools"], body["max_tokens"]) == (window, [1], 9)


def test_bodies_are_json():
    plan = build("swarm", spec(0), WORDS)
    for agent in plan.agents.values():
        talk = Conversation(plan, agent)
        for index in range(len(agent.turns)):
            talk.cut(index)
            json.dumps(talk.body(index))
            talk.take_reply(index, "reply")


def test_an_own_trace_shares_what_it_says(tmp_path):
    rows = [
        {"hash_ids": [1, 2, 3], "input_length": 30, "timestamp": 0, "block_size": 10},
        {"hash_ids": [1, 2, 3, 4], "input_length": 40, "timestamp": 900, "block_size": 10},
        {"hash_ids": [1, 9], "input_length": 20, "timestamp": 950, "block_size": 10},
    ]
    file = tmp_path / "mooncake.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    plan = build("trace", spec(trace=str(file), lengths=1.0, gaps=1.0), WORDS)
    texts = sorted(
        (turn.texts[0].split() for a in plan.agents.values() for turn in a.turns), key=len
    )
    short, longer, longest = texts
    assert [len(text) for text in texts] == [20, 30, 40]
    assert longest[:30] == longer
    assert short[:10] == longer[:10] and short[10:] != longer[10:20]


def test_a_trace_is_wanted_and_must_be_one(tmp_path):
    with pytest.raises(TraceError, match="--trace"):
        build("trace", spec(), WORDS)
    (tmp_path / "x.jsonl").write_text('{"what": 1}\n')
    with pytest.raises(TraceError, match="x.jsonl"):
        build("trace", spec(trace=str(tmp_path / "x.jsonl")), WORDS)


def test_text_has_the_wanted_length():
    rng = random.Random(0)
    assert WORDS.count(WORDS.text(rng, 17)) == 17
    tools = WORDS.tools(rng)
    of_tools = WORDS.count(json.dumps(tools))
    system, shared = WORDS.system(rng, of_tools + 100, tools)
    assert (WORDS.count(system), shared) == (100, of_tools + 100)
    assert WORDS.system(rng, 5, tools)[1] > of_tools
    with pytest.raises(ValueError, match="16"):
        Vocabulary(["a"])


@pytest.mark.parametrize("waves, n_called", [(1, 1), (4, 4), (99, 9)])
def test_leaders_call_members_as_often_as_asked(waves, n_called):
    plan = build("swarm", spec(users=6, turns=10, waves=waves), WORDS)
    for _, root in plan.users:
        leader = plan.agents[root]
        wanted = min(n_called, len(leader.turns) - 1)
        assert sum(bool(turn.calls) for turn in leader.turns) == wanted
        (sticky,) = (a for a in plan.agents.values() if a.sticky and a.parent_id == root)
        calls = [
            c for turn in leader.turns for c in turn.calls if c.session_id == sticky.session_id
        ]
        assert [c.last for c in calls[:-1]] == [c.first for c in calls[1:]]
        assert calls[-1].last == len(sticky.turns)
