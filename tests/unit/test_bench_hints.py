"""Parts of the hint benchmark and of the soak that need no server."""

import argparse
import copy
import random

import pytest
from rich.console import Console

from sam.bench.hints import KINDS, Agent, Load, hint_body, report_of
from sam.bench.soak import Soak, Verdict, compare
from sam.bench.soak_load import GENERATE, Sample
from sam.bench.soak_load import Load as SoakLoad
from sam.core.hints import parse_agent_hint

SUMMARY = {"errors": 0, "actions": {}, "tree_core": "core"}


def an_agent():
    agent = Agent(3, 0, "system")
    agent.next_body()
    agent.take("answer")
    return agent


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_valid_management_request(kind):
    rng = random.Random(1)
    for _ in range(20):
        body = hint_body(kind, an_agent(), rng)
        hint = parse_agent_hint(body["agent_hint"])
        assert hint.manage_request and hint.unknown_keys == ()
        for edit in hint.edits:
            if edit.target == "messages":
                assert 0 <= edit.start < edit.end == len(body["messages"])
            else:
                assert body["messages"] == []


def test_an_agents_context_grows_and_starts_anew():
    agent, sizes = an_agent(), []
    for _ in range(20):
        sizes.append(len(agent.next_body()["messages"]))
        agent.take("x")
    assert sizes[:3] == [4, 6, 8] and 2 in sizes and max(sizes) <= 14
    assert agent.over[-1][0] != agent.session_id and len(agent.over[-1][1]) == 13


def measured(hint_s, failed=0):
    args = argparse.Namespace(clients=2, seed=0, running=1, rate=1.0, rounds=1, seconds=1.0)
    load = Load("http://127.0.0.1:9", args)
    load.inference["without hints"].seconds = [0.5] * 100
    load.inference["with hints"].seconds = [0.75] * 100
    load.wall_s = dict.fromkeys(load.wall_s, 10.0)
    load.hints["evict"].seconds = [hint_s] * 50
    load.hints["evict"].failed = failed
    return report_of(load, SUMMARY)


def test_the_report_compares_and_judges():
    report = measured(0.010)
    assert report["all_hints"]["p99_ms"] == 10.0 and report["target_met"]
    assert report["p99_ratio"] == 1.5
    assert report["inference"]["with hints"]["per_s"] == 10.0
    assert not measured(0.060)["target_met"]
    assert not measured(0.010, failed=1)["target_met"]


def test_nothing_measured_is_no_success():
    args = argparse.Namespace(clients=1, seed=0, running=1, rate=1.0, rounds=1, seconds=1.0)
    report = report_of(Load("http://127.0.0.1:9", args), SUMMARY)
    assert not report["target_met"]


def test_a_soak_is_good_only_when_complete_and_without_findings():
    load = SoakLoad("http://127.0.0.1:9", seed=0, clients=1, agents=3)
    verdict = Verdict(load=load)
    assert not verdict.report()["good"]
    verdict.is_complete = True
    assert verdict.report()["good"]
    load.failures.append("something")
    assert not verdict.report()["good"]


def test_samples_are_drawn_from_the_whole_run():
    load = SoakLoad("http://127.0.0.1:9", seed=0, clients=1, agents=3)
    for i in range(5_000):
        load._keep(Sample(GENERATE, {}, i))
    kept = [sample.answer for sample in load.samples]
    assert len(kept) == 48 and min(kept) < 1_500 and max(kept) > 3_500


def test_agents_of_a_soak_form_a_tree_and_share_a_prefix():
    load = SoakLoad("http://127.0.0.1:9", seed=4, clients=1, agents=12)
    known = {agent.session_id for agent in load.agents}
    roots = [agent for agent in load.agents if agent.parent_id not in known]
    assert len(roots) == 1 and len(known) == 12
    assert len({tuple(agent.prefix[:300]) for agent in load.agents}) == 1


AT_REST = {
    "/sessions?limit=1000": {
        "sessions": [{"session_id": "a", "state": "idle", "n_running": 0}],
        "summary": {
            "pending_actions": 0, "errors": 0, "tree_core_mismatches": 0,
            "device": {"free": 60, "evictable": 40, "protected": 0},
            "host": {"free": 170, "total": 200},
        },
    },
    "/sessions/tree?limit=10000": {"nodes": [{"id": 7, "locked": False, "host_tokens": 29}]},
}  # fmt: skip
FAULTS = {
    "actions pending": ("pending_actions", 3),
    "1 errors": ("errors", 1),
    "2 mismatches": ("tree_core_mismatches", 2),
    "device pool": ("device", {"free": 60, "evictable": 30, "protected": 10}),
    "100 in all": ("device", {"free": 59, "evictable": 40, "protected": 0}),
    "host pool": ("host", {"free": 150, "total": 200}),
}


class CannedServer:
    """Answers what a server said once; the soak only reads it."""

    def __init__(self, answers):
        self.answers = answers

    def request(self, path, body=None, **_):
        return self.answers[path]


def a_soak(answers):
    args = argparse.Namespace(page_size=10, minutes=1, seed=0, clients=1)
    soak = Soak(CannedServer(answers), args, Console(quiet=True))
    soak._empty = {"device": {"free": 100}, "host": {"free": 200}}
    return soak


def test_a_server_at_rest_has_nothing_unsettled():
    assert a_soak(AT_REST)._unsettled() == ""


@pytest.mark.parametrize("what", FAULTS)
def test_every_kind_of_leak_is_found_in_the_summary(what):
    answers = copy.deepcopy(AT_REST)
    name, value = FAULTS[what]
    answers["/sessions?limit=1000"]["summary"][name] = value
    assert what in a_soak(answers)._unsettled()


def test_running_sessions_and_locked_nodes_are_found():
    answers = copy.deepcopy(AT_REST)
    answers["/sessions?limit=1000"]["sessions"][0]["n_running"] = 1
    answers["/sessions/tree?limit=10000"]["nodes"][0]["locked"] = True
    found = a_soak(answers)._unsettled()
    assert "still running: ['a']" in found and "locked: [7]" in found


def test_another_answer_without_a_cache_is_a_finding():
    load = SoakLoad("http://127.0.0.1:9", seed=0, clients=1, agents=2)
    load.samples = [Sample(GENERATE, {}, [1, 2]), Sample(GENERATE, {}, [1, 3])]
    verdict = Verdict(load=load)
    compare(CannedServer({GENERATE: {"output_ids": [1, 2]}}), verdict)
    assert verdict.n_compared == 2 and len(verdict.failures) == 1
