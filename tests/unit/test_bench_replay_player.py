"""What the replay sends, in which order, with which hints: the transport alone is replaced."""

import asyncio
import json
from dataclasses import replace

import pytest

from sam.bench.replay import player
from sam.bench.replay.arms import ARMS, DEFAULT_ARMS, Hints, external, tlru_flags
from sam.bench.replay.comparison import kept_of
from sam.bench.replay.player import play
from sam.bench.swarm_client import Answer, RequestFailed
from sam.bench.workloads import build
from sam.bench.workloads.spec import WorkloadSpec
from sam.bench.workloads.text import Vocabulary
from sam.bench.workloads.timeline import timeline_of

WORDS = Vocabulary([f"word{i}" for i in range(50)])


def answer_to(body):
    ids = tuple(json.dumps(body["messages"]).encode())
    return Answer(f"reply {len(body['messages'])}", ids, (1, 2), len(ids), 1, 1, 0, 0.1, 0.2)


class Wire:
    """Stands in for the transport: keeps what goes over it, in order."""

    def __init__(self, monkeypatch, fails_after=None):
        self.log, self.fails_after = [], fails_after
        monkeypatch.setattr(player, "chat", self.chat)
        monkeypatch.setattr(player, "manage", self.manage)
        monkeypatch.setattr(
            player.httpx.AsyncClient, "post", lambda _, url, json: self.post(url, json)
        )

    async def chat(self, client, body):
        self.log.append(("chat", json.loads(json.dumps(body))))
        await asyncio.sleep(0)
        if self.fails_after is not None and len(self.log) > self.fails_after:
            raise RequestFailed("no")
        return answer_to({**body, "agent_hint": None})

    async def manage(self, client, body):
        self.log.append(("manage", json.loads(json.dumps(body))))
        return {}

    async def post(self, url, json):
        self.log.append((url, json))
        return player.httpx.Response(200, request=player.httpx.Request("POST", "http://t"))

    def edits(self, kind="session"):
        found = []
        for what, body in self.log:
            if what == "manage":
                edit = body["agent_hint"]["context_management"]["edits"][0]
                if edit["target"] == kind:
                    found.append((edit["type"], body["agent_hint"]["session_id"]))
        return found


def plan_of(name="swarm", users=6):
    plan = build(name, WorkloadSpec(users=users, gaps=0.0), WORDS)
    agents = {
        key: replace(a, turns=tuple(replace(t, wait_s=0.0) for t in a.turns))
        for key, a in plan.agents.items()
    }
    return replace(plan, agents=agents, users=tuple((0.0, root) for _, root in plan.users))


def record(monkeypatch, hints, name="swarm", **wire):
    plan, sent = plan_of(name), Wire(monkeypatch, **wire)
    line = timeline_of(plan, WORDS.count)
    return plan, sent, play("http://t", plan, line, hints, lambda: None)


def bare(wire):
    """Bodies of inferences by (session, prompt), without what an arm may add."""
    found = []
    for what, body in wire.log:
        if what == "chat":
            body.pop("agent_hint", None)
            body.pop("session_id", None)
            found.append(json.dumps(body, sort_keys=True))
    return sorted(found)


def test_every_arm_asks_the_same(monkeypatch):
    asked = [bare(record(monkeypatch, hints)[1]) for hints in Hints]
    assert all(found == asked[0] for found in asked[1:])
    assert len(asked[0]) == plan_of().n_requests()


@pytest.mark.parametrize("hints", list(Hints))
def test_what_an_arm_adds_is_its_mode_and_nothing_else(monkeypatch, hints):
    plan, wire, _ = record(monkeypatch, hints)
    chats = [body for what, body in wire.log if what == "chat"]
    assert all(("agent_hint" in body) is hints.has_lineage for body in chats)
    assert all(("session_id" in body) is (hints is Hints.SESSION) for body in chats)
    assert any(what == "manage" for what, _ in wire.log) is hints.manages
    closed = [body["session_id"] for what, body in wire.log if what == "/close_session"]
    assert set(closed) >= (set(plan.agents) if hints is Hints.SESSION else set())
    assert bool(closed) is (hints is Hints.SESSION)
    idle = ["expected_idle_s" in body.get("agent_hint", {}) for body in chats]
    assert any(idle) is (hints is Hints.IDLE)


def test_lineage_names_session_and_parent(monkeypatch):
    plan, wire, _ = record(monkeypatch, Hints.LINEAGE)
    for _, body in wire.log:
        hint = body["agent_hint"]
        agent = plan.agents.get(hint["session_id"])
        if agent is None:
            assert hint["session_id"] == f"{hint['parent_session_id']}:compressor:dialogue"
        else:
            assert hint["parent_session_id"] == agent.parent_id
        assert "context_management" not in hint


def test_management_is_what_the_client_sends(monkeypatch):
    plan, wire, _ = record(monkeypatch, Hints.MANAGE)
    edits = wire.edits()
    for name, agent in plan.agents.items():
        ends = edits.count(("evict", name))
        pauses = sum(turn.paused for turn in agent.turns)
        runs = sum(c.session_id == name for a in plan.agents.values() for t in a.turns
                   for c in t.calls)  # fmt: skip
        assert ends == (0 if agent.sticky else 1)
        downs = edits.count(("offload", name))
        ups = edits.count(("prefetch", name))
        assert (downs, ups) == ((runs, runs - 1) if agent.sticky else (pauses, pauses))
    cuts = sum(bool(t.summary) for a in plan.agents.values() for t in a.turns)
    assert len(wire.edits("messages")) == cuts > 0
    assert sum(name.endswith(":compressor:dialogue") for _, name in edits) == cuts
    assert edits[-1][0] == "evict" and edits[-1][1] in {root for _, root in plan.users}


def test_a_cut_is_announced_between_compressor_and_next_request(monkeypatch):
    plan, wire, _ = record(monkeypatch, Hints.MANAGE)
    root = next(a.session_id for a in plan.agents.values() if any(t.summary for t in a.turns))
    compressor = f"{root}:compressor:dialogue"
    mine = [
        (what, body["agent_hint"]["session_id"], body)
        for what, body in wire.log
        if body["agent_hint"]["session_id"] in (root, compressor)
    ]
    at = next(i for i, entry in enumerate(mine) if entry[:2] == ("chat", compressor))
    assert [entry[:2] for entry in mine[at : at + 4]] == [
        ("chat", compressor), ("manage", compressor), ("manage", root), ("chat", root),
    ]  # fmt: skip
    dropped, after = mine[at + 2][2], mine[at + 3][2]
    edit = dropped["agent_hint"]["context_management"]["edits"][0]
    assert (edit["start"], edit["end"]) == (1, len(dropped["messages"]))
    assert after["messages"][0] == dropped["messages"][0]
    turn = next(turn for turn in plan.agents[root].turns if turn.summary)
    texts = [message["content"] for message in after["messages"][1:]]
    assert texts == [turn.summary, *turn.texts]


@pytest.mark.parametrize("name,share", [("mixed", 0.5), ("nohints", 0.0)])
def test_users_without_hints_send_none(monkeypatch, name, share):
    plan, wire, _ = record(monkeypatch, Hints.IDLE, name)
    hinted = {body["agent_hint"]["session_id"] for _, body in wire.log if "agent_hint" in body}
    roots = [root for _, root in plan.users]
    assert sum(root in hinted for root in roots) == share * len(roots)
    assert (not hinted) is (share == 0.0)


def test_odd_hints_are_sent_where_arms_manage(monkeypatch):
    plan, wire, _ = record(monkeypatch, Hints.MANAGE, "adversarial")
    odd = [pair for a in plan.agents.values() for t in a.turns for pair in t.odd]
    edits = wire.edits()
    assert all(pair in edits for pair in odd) and odd
    _, silent, _ = record(monkeypatch, Hints.LINEAGE, "adversarial")
    assert not silent.edits()


def test_records_are_complete_and_keep_totals(monkeypatch):
    plan, _, played = record(monkeypatch, Hints.NONE)
    kept = json.loads(json.dumps(kept_of(played)))
    rows = kept["rows"]
    assert len(rows) == plan.n_requests()
    assert {row["user"] for row in rows} == set(range(6)) == set(map(int, kept["task_s"]))
    assert all(row["prompt"] > row["device"] + row["host"] + row["storage"] for row in rows)
    assert 0 < kept["new_tokens"] <= sum(row["prompt"] for row in rows)
    assert kept["manage"] == {"n": 0}


def test_a_refused_request_ends_the_play(monkeypatch):
    with pytest.raises(ExceptionGroup) as raised:
        record(monkeypatch, Hints.MANAGE, fails_after=5)
    assert raised.value.subgroup(RequestFailed)


def test_arms_differ_from_stock_in_what_they_name():
    assert ARMS["stock"].flags == () and ARMS["stock"].schedule_policy == "fcfs"
    assert set(DEFAULT_ARMS) <= set(ARMS)
    for name, arm in ARMS.items():
        assert arm.name == name
        assert name.startswith("sam") is ("sam" in arm.flags)
        assert name.endswith("lpm") is (arm.schedule_policy == "lpm")
        assert ("-adm" in name) is (arm.schedule_policy == "sam-shortest")
        assert name.endswith("-wb") is (arm.write_policy == "write_back")
        assert name.endswith("-wb") or arm.write_policy == "write_through"
        assert not arm.hints.has_lineage or name.startswith("sam")
    assert json.loads(tlru_flags(300)[1]) == {"threshold": 300}


def test_an_external_server_is_an_arm():
    arm = external("mine=http://h:1/,manage")
    assert (arm.name, arm.url, arm.hints) == ("mine", "http://h:1", Hints.MANAGE)
    assert external("x=https://h").hints is Hints.NONE
    for wrong in ("stock=http://h", "x=h:1", "=http://h", "x=http://h,what"):
        with pytest.raises(ValueError, match="NAME=|hints"):
            external(wrong)
