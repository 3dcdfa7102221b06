"""Agents of the real client: a tool, a tree of three levels, compression, sub-agents."""

import pytest

from tests.client.conftest import NEW

SYSTEM = "You are one of several careful agents. " * 30
ADD = ["add", {"a": "1", "b": "3"}]


def state_of(server, session_id):
    return server.sessions()[session_id]["state"]


def grown(before, after):
    """Counters of `summary["actions"]` that went up."""
    counts = {name: n - before.get(name, 0) for name, n in after["actions"].items()}
    return {name: n for name, n in counts.items() if n}


def solo(client, sid, **options):
    name = f"{sid}-solo"
    client("react", name=name, system=SYSTEM + sid, tools=["add"], **options)
    return name


def test_a_react_agent_calls_a_tool_and_goes_on(server, client, sid):
    """The server itself calls the tool (grammar); the second call finds the first one's KV."""
    agent, session = solo(client, sid), f"{sid}:session"
    hits = server.hit_tokens("device")
    turn = client(
        "run", agent=agent, session=session, query="add them", scripts={agent: ["native", None]}
    )
    assert turn["calls"][agent] == 2
    (during,) = client("during_tools")
    assert session in {s["session_id"] for s in during}
    assert server.hit_tokens("device") - hits > 700
    assert state_of(server, session) == "idle"


def test_the_server_knows_which_tool_the_session_waits_for(server, client, sid):
    agent, session = solo(client, sid), f"{sid}:session"
    client("run", agent=agent, session=session, query="add", scripts={agent: ["native", None]})
    (during,) = client("during_tools")
    waiting = next(s for s in during if s["session_id"] == session)
    assert waiting["waiting_tool"] is True and waiting["tool_name"] == "add"
    assert server.sessions()[session]["waiting_tool"] is False


def test_a_streaming_agent(server, client, sid):
    agent, session = solo(client, sid), f"{sid}:session"
    scripts = {agent: [ADD, None]}
    turn = client("run", agent=agent, session=session, query="q", scripts=scripts, stream=True)
    assert turn["n_chunks"] > 0 and turn["calls"][agent] == 2
    assert state_of(server, session) == "idle"


@pytest.mark.usefixtures("new_client_only")
def test_suspend_resume_release(server, client, sid):
    agent, session = solo(client, sid), f"{sid}:session"
    client("run", agent=agent, session=session, query="first", scripts={agent: [ADD, None]})
    total = server.device(session)["private"]
    before = server.settled()["actions"]

    assert client("lifecycle", session=session, do="suspend") is True
    assert grown(before, server.settled()) == {"session.demote:done": 1}
    assert state_of(server, session) == "offloaded" and server.host(session)["private"] == total
    server.press()
    assert server.device(session)["private"] == 0

    hits = server.hit_tokens("device") + server.hit_tokens("host")
    client("run", agent=agent, session=session, query="second", scripts={agent: [None]})
    moved = grown(before, server.settled())
    assert any(name.startswith("session.prefetch:") for name in moved)
    assert server.hit_tokens("device") + server.hit_tokens("host") - hits > 0.7 * total

    assert client("lifecycle", session=session, do="release") is True
    assert grown(before, server.settled())["session.evict:done"] == 1
    assert state_of(server, session) == "ended" and server.device(session)["private"] == 0
    client("run", agent=agent, session=session, query="third", scripts={agent: [None]})
    assert state_of(server, session) == "idle"
    assert client("offload_switches") == []


def test_a_tree_of_three_levels(server, client, sid):
    names = [f"{sid}-{role}" for role in ("statistician", "analyst", "director")]
    statistician, analyst, director = names
    client("react", name=statistician, system=SYSTEM + "stat", tools=["add"])
    client("react", name=analyst, system=SYSTEM + "analyst", subagents=[statistician])
    client("react", name=director, system=SYSTEM + "director", subagents=[analyst])
    root = f"{sid}:root"
    free = server.settled()["device"]["free"]
    scripts = {
        director: [[analyst, {"query": "analyse"}], None],
        analyst: [[statistician, {"query": "count"}], None],
        statistician: [ADD, None],
    }
    turn = client("run", agent=director, session=root, query="go", scripts=scripts)
    assert [turn["calls"][name] for name in names] == [2, 2, 2]

    below = {s: v for s, v in server.sessions().items() if s.startswith(root + ":")}
    assert len(below) == 2 and sorted(v["depth"] for v in below.values()) == [1, 2]
    deepest = max(below, key=len)
    assert below[deepest]["parent_session_id"] == min(below, key=len)
    assert below[min(below, key=len)]["parent_session_id"] == root
    assert all(v["tokens"]["device"]["shared"] > 500 for v in below.values())

    if client.version == NEW:
        assert client("lifecycle", session=root, do="release") is True
    else:
        client("kvc", action="evict", session_id=root, parent_session_id=root)
    assert server.settled()["device"]["free"] == free
    assert {state_of(server, s) for s in (root, *below)} == {"ended"}


@pytest.mark.usefixtures("new_client_only")
def test_compression_spares_the_parents_prefix(server, client, sid):
    """The compressor is a child that shares all of its parent's messages, and is evicted."""
    agent, session = f"{sid}-comp", f"{sid}:session"
    client("react", name=agent, system=SYSTEM + "comp", compress_after=0.002)
    words = " many words of a long question" * 40
    client("run", agent=agent, session=session, query="one" + words)
    before = server.settled()["actions"]
    hits = server.hit_tokens("device")
    for i in range(2):
        client("run", agent=agent, session=session, query=f"turn {i}" + words)
    moved = grown(before, server.settled())
    assert moved["session.evict:done"] >= 1
    compressor = server.sessions()[f"{session}:compressor:dialogue"]
    assert (compressor["state"], compressor["parent_session_id"]) == ("ended", session)
    assert compressor["tokens"]["device"]["private"] == 0
    assert server.hit_tokens("device") - hits > 2 * 700
    assert state_of(server, session) == "idle"
    assert client("offload_switches") == []


@pytest.mark.usefixtures("new_client_only")
def test_compression_frees_the_window_that_it_replaced(server, client, sid):
    agent, session = f"{sid}-comp", f"{sid}:session"
    client("react", name=agent, system=SYSTEM + "comp", compress_after=0.002)
    words = " many words of a long question" * 40
    client("run", agent=agent, session=session, query="one" + words)
    client("told")
    client("run", agent=agent, session=session, query="two" + words)
    edits = [a for a in server.outcomes(client("told")) if a["action_type"] == "session.evict"]
    of_window = [edit for edit in edits if edit["status"] in ("done", "clipped")]
    assert len(of_window) == len(edits) == 2
    assert max(edit["tokens"]["device"] for edit in of_window) > 200


def test_a_sliding_window_announces_what_left(server, client, sid):
    agent, session = f"{sid}-window", f"{sid}:session"
    client("react", name=agent, system=SYSTEM + "window", window_rounds=1)
    before = server.settled()["actions"]
    for i in range(3):
        client("run", agent=agent, session=session, query=f"question {i}")
    moved = grown(before, server.settled())
    edits = {name: n for name, n in moved.items() if name.startswith("session.evict:")}
    edits.pop("session.evict:deferred", None)
    assert sum(edits.values()) == 2 and moved["session.bind:done"] == 3, moved


@pytest.mark.usefixtures("new_client_only")
def test_sticky_and_one_shot_sub_agents(server, client, sid, tmp_path):
    lead, root = f"{sid}-lead", f"{sid}:root"
    kinds = ["verification_agent", "explore_agent"]
    client("deep", name=lead, system=SYSTEM, subagents=kinds, workspace=str(tmp_path))
    sticky, one_shot = (
        ["task_tool", {"subagent_type": kind, "task_description": "look at it"}] for kind in kinds
    )
    look = ["look", ADD[1]]
    before = server.settled()
    scripts = {
        lead: [sticky, one_shot, sticky, None],
        kinds[0]: [look, None, look, None],
        kinds[1]: [look, None],
    }
    turn = client("run", agent=lead, session=root, query="do it", scripts=scripts)
    assert [turn["calls"][name] for name in (lead, *kinds)] == [4, 4, 2]
    moved = grown(before["actions"], server.settled())
    assert moved["session.demote:done"] == 2 and moved["session.evict:done"] == 1
    assert sum(n for name, n in moved.items() if name.startswith("session.prefetch:")) == 1

    members = {s: v for s, v in server.sessions().items() if s.startswith(root + "_sub_")}
    states = {s.removeprefix(root + "_sub_")[:7]: v["state"] for s, v in members.items()}
    assert states == {"verific": "offloaded", "explore": "ended"}
    assert {v["parent_session_id"] for v in members.values()} == {root}

    assert client("lifecycle", session=root, do="release") is True
    after = server.settled()
    assert after["device"]["free"] == before["device"]["free"]
    assert {state_of(server, s) for s in (root, *members)} == {"ended"}
    assert client("offload_switches") == []
