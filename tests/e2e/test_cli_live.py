"""`sam` against a real server that has keys: look, steer, refuse; and what its metrics feed."""

from __future__ import annotations

import json
import re
import time

import pytest
import yaml
from openai import OpenAI

from sam.cli import main
from sam.cli.errors import Exit
from sam.testing.server import ServerProcess
from tests.e2e.conftest import REPO, STRICT_ENV

pytestmark = pytest.mark.e2e
KEY, ADMIN = "sk-agent", "sk-admin"
SYSTEM = {"role": "system", "content": "You are one of several careful agents. " * 30}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d " * 40, "parameters": {}}}
    for name in ("read", "write")
]
_METRIC = re.compile(r"sglang:[a-z0-9_]+")


@pytest.fixture(scope="module")
def server(server_args):
    keys = ("--api-key", KEY, "--admin-api-key", ADMIN)
    args = server_args("--radix-cache-backend", "sam", "--enable-metrics", *keys)
    with ServerProcess(args, env=STRICT_ENV) as process:
        yield process
        assert "Traceback" not in process.log_text()


@pytest.fixture
def agent(server):
    """Asks as one session; returns the messages so far, the answer included."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)

    def ask(session_id, parent=None, times=20, hint=None, **extra):
        messages = [SYSTEM, {"role": "user", "content": f"{session_id}: go on " * times}]
        lineage = {"session_id": session_id, "parent_session_id": parent or session_id}
        client.chat.completions.create(
            model="sam",
            messages=messages,
            max_tokens=4,
            temperature=0,
            extra_body={"agent_hint": lineage | (hint or {})},
            **extra,
        )
        return messages

    return ask


@pytest.fixture
def sam(server, capsys):
    """Runs one command; (exit code, JSON or text on standard output, standard error)."""

    def run(*argv, key=KEY, as_json=True):
        options = ["--url", f"{server.url}/v1", "--api-key", key]
        code = main([*argv, *options, *(["--json"] if as_json else [])])
        out, err = capsys.readouterr()
        return code, json.loads(out) if as_json else out, err

    return run


def session_of(sam, session_id):
    code, report, _ = sam("session", session_id, key=ADMIN)
    assert code == Exit.OK
    (record,) = report["sessions"]
    return record


def only(message):
    (action,) = message["actions"]
    return action


def test_sessions_with_their_lineage(sam, agent):
    agent("look")
    agent("look:child", "look")
    code, report, _ = sam("sessions", "--state", "idle", key=ADMIN)
    assert code == Exit.OK
    assert {"look", "look:child"} <= {record["session_id"] for record in report["sessions"]}
    child = session_of(sam, "look:child")
    assert child["ancestors"] == ["look"] and child["tokens"]["device"]["private"] > 0
    assert session_of(sam, "look")["children"] == ["look:child"]

    code, text, _ = sam("sessions", key=ADMIN, as_json=False)
    assert code == Exit.OK
    assert re.search(r"^look +idle", text, re.M) and re.search(r"^  look:child +idle", text, re.M)
    assert re.search(r"In use: device [\d,]+ of [\d,]+ tokens; host", text)
    _, text, _ = sam("session", "look:child", key=ADMIN, as_json=False)
    assert re.search(r"^parents +look *$", text, re.M) and re.search(r"^device +\d", text, re.M)


def test_sessions_page_by_page_are_all_sessions(sam, agent, monkeypatch):
    for i in range(5):
        agent(f"page-{i}")
    _, all_at_once, _ = sam("sessions", key=ADMIN)
    monkeypatch.setattr("sam.cli.sessions.PAGE", 2)
    _, by_pages, _ = sam("sessions", key=ADMIN)
    ids = [record["session_id"] for record in by_pages["sessions"]]
    assert ids == [record["session_id"] for record in all_at_once["sessions"]]
    assert len(ids) == by_pages["n_sessions"] == len(set(ids))
    _, three, _ = sam("sessions", "--offset", "1", "--limit", "3", key=ADMIN)
    assert [record["session_id"] for record in three["sessions"]] == ids[1:4]


def test_hints_move_a_session(sam, agent):
    agent("move")
    n_private = session_of(sam, "move")["tokens"]["device"]["private"]
    code, message, _ = sam("hint", "offload", "move", "--release", "now")
    assert (code, only(message)["status"]) == (Exit.OK, "done")
    assert only(message)["tokens"]["device"] == n_private
    assert session_of(sam, "move")["state"] == "offloaded"
    code, message, _ = sam("hint", "prefetch", "move")
    assert (code, only(message)["tokens"]["device"]) == (Exit.OK, n_private)

    for command in (["expect", "move", "--idle", "60"], ["retain", "move", "--ttl", "9"]):
        code, message, _ = sam("hint", *command)
        assert (code, only(message)["status"]) == (Exit.OK, "done"), message

    code, text, err = sam("hint", "evict", "move", as_json=False)
    assert code == Exit.OK and "Traceback" not in err
    assert re.search(r"session\.evict +done +\d", text)
    assert session_of(sam, "move")["state"] == "ended"


def test_hints_on_ranges(sam, agent, tmp_path):
    messages = agent("range", tools=TOOLS)
    body = tmp_path / "request.json"
    body.write_text(json.dumps({"messages": messages, "tools": TOOLS}))
    before = session_of(sam, "range")["tokens"]["device"]["private"]
    code, message, _ = sam("hint", "evict", "range", "--messages", "1:", "--body", str(body))
    assert code == Exit.OK, message
    freed, span = only(message)["tokens"]["device"], only(message)["span"]
    assert 0 < freed <= before and span[0] > 0
    code, message, _ = sam("hint", "evict", "range", "--tools", "1:", "--body", str(body))
    assert code == Exit.OK and only(message)["span"][0] < span[0], message
    agent("range", tools=TOOLS)
    code, message, _ = sam("hint", "offload", "range", "--tokens", "16:64")
    assert code == Exit.OK and only(message)["status"] in ("done", "clipped"), message


def test_a_subtree(sam, agent):
    agent("team")
    agent("team:a", "team")
    code, message, _ = sam("hint", "offload", "team", "--subtree", "--release", "now")
    assert (code, only(message)["status"]) == (Exit.OK, "done")
    assert session_of(sam, "team:a")["tokens"]["device"]["private"] == 0


def test_what_is_refused_says_why(sam, server, capsys):
    code, report, err = sam("sessions", key="sk-wrong")
    assert code == report["exit_code"] == Exit.REFUSED
    assert "admin key" in err and "sk-wrong" not in err
    assert sam("sessions", key=KEY)[0] == Exit.REFUSED
    assert sam("hint", "evict", "x", key="sk-wrong")[0] == Exit.REFUSED

    code, message, _ = sam("hint", "evict", "nobody")
    assert (code, only(message)["status"]) == (Exit.UNKNOWN, "missing")
    _, text, _ = sam("hint", "evict", "nobody", as_json=False)
    assert "no such session of this API key" in text
    assert sam("session", "nobody", key=ADMIN)[0] == Exit.UNKNOWN

    code = main(["sessions", "--url", f"{server.url}/elsewhere", "--api-key", KEY])
    assert code == Exit.NOT_SAM and "--radix-cache-backend sam" in capsys.readouterr().err


def test_without_waiting_the_outcome_is_open(sam, agent):
    agent("patient")
    code, message, _ = sam("hint", "offload", "patient", "--wait", "0")
    assert only(message)["status"] in ("accepted", "done")
    assert code == (Exit.PENDING if only(message)["status"] == "accepted" else Exit.OK)


def test_the_tree(sam, agent):
    agent("branch-1")
    agent("branch-2")
    code, report, _ = sam("tree", key=ADMIN)
    assert code == Exit.OK
    nodes = {node["id"]: node for node in report["nodes"]}
    assert any(node["parent"] in nodes and node["n_tags"] >= 1 for node in nodes.values())
    code, text, _ = sam("tree", key=ADMIN, as_json=False)
    assert code == Exit.OK
    assert len(nodes) > 2
    assert {int(found) for found in re.findall(r"#(\d+) *$", text, re.M)} == set(nodes)
    assert re.search(r"^[ │]+[├└]── \d+ tokens  device", text, re.M), text


def test_the_tree_of_one_session(sam, agent):
    agent("alone-1")
    agent("alone-2")
    _, whole, _ = sam("tree", key=ADMIN)
    code, report, _ = sam("tree", "--session", "alone-1", key=ADMIN)
    assert code == Exit.OK
    nodes = {node["id"]: node for node in report["nodes"]}
    assert 0 < len(nodes) < len(whole["nodes"])
    assert all("alone-1" in node["sessions"] for node in nodes.values())
    shared = [node for node in nodes.values() if "alone-2" in node["sessions"]]
    assert 0 < len(shared) < len(nodes)
    code, text, _ = sam("tree", "--session", "alone-1", key=ADMIN, as_json=False)
    assert code == Exit.OK
    assert {int(found) for found in re.findall(r"#(\d+) *$", text, re.M)} == set(nodes)
    assert sam("tree", "--session", "nobody", key=ADMIN)[1]["nodes"] == []


def test_top(sam, agent, server, capsys):
    agent("busy")
    code = main(["top", "--url", server.url, "--api-key", ADMIN, "--count", "2", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == Exit.OK and len(lines) == 2
    assert lines[1]["time_s"] > lines[0]["time_s"] and lines[0]["states"]["idle"] >= 1
    code, text, _ = sam("top", "--count", "1", key=ADMIN, as_json=False)
    assert code == Exit.OK and "busy" in text and "next-use" in text


def names_in(expressions):
    return {name for text in expressions for name in _METRIC.findall(text)}


def test_dashboard_and_alerts_use_metrics_that_exist(sam, agent, server):
    agent("measured", hint={"expected_idle_s": "soon"})
    agent("measured", hint={"no_such_key": 1})
    assert sam("hint", "offload", "measured", "--release", "now")[0] == Exit.OK
    agent("measured")
    for i in range(6):
        agent(f"crowd-{i}", times=150)
    dashboard = json.loads((REPO / "docs" / "grafana-sam.json").read_text())
    rules = yaml.safe_load((REPO / "docs" / "alerts-sam.yml").read_text())["groups"][0]["rules"]
    shown = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    used = names_in(shown + [rule["expr"] for rule in rules])
    assert len(rules) == 3 and len(used) >= 15
    deadline = time.monotonic() + 20.0
    while missing := used - exported(server):
        assert time.monotonic() < deadline, f"not exported: {sorted(missing)}"
        time.sleep(0.5)


def exported(server):
    """Metric names, with those of samples that only a label brings to life."""
    text = server.request("/metrics")
    lines = text.splitlines()
    declared = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    return declared | {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
