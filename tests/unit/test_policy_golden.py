"""The hand-checkable cases of the retention policy: victims of the order, switches of the guard.

The cases lie beside the repository (`SAM_SHARED` or ../shared); another file of the same
format may be named with `SAM_POLICY_GOLDEN`. Without any this is skipped.

The cases were written for gaps that count as their median, 10 s after a tool and 100 s else.
Our default counts their mean (`sam.core.gaps`, decision in sam/README.md): here as the notes
have it, so that the order itself is what is checked.
"""

import json
import os
from pathlib import Path

import pytest

from sam.core.gaps import GapEstimator, GapParams
from sam.core.guard import RegretGuard
from sam.core.order import create_order, drain
from sam.core.retention import NextUseRank, Standing

REPO = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SAM_SHARED", REPO.parent / "shared"))
GOLDEN = Path(os.environ.get("SAM_POLICY_GOLDEN") or SHARED / "policy_golden.json")
LEFT = "(branches that some session left)"
MEDIANS = GapParams(mean_over_median=1.0)


def cases(kind):
    if not GOLDEN.is_file():
        reason = f"no {GOLDEN} (set SAM_POLICY_GOLDEN or SAM_SHARED)"
        return [pytest.param(None, id="none", marks=pytest.mark.skip(reason=reason))]
    golden = json.loads(GOLDEN.read_text())
    assert golden["version"] == 1
    return [pytest.param(case, id=case["name"]) for case in golden[kind]]


class GoldenTree:
    """The tree of one case: adds what becomes a leaf, with its users, to an order."""

    def __init__(self, case, order):
        self.sessions, self.nodes, self.order = case["sessions"], case["nodes"], order
        self.ids = {name: i for i, name in enumerate(self.nodes)}
        self.names = list(self.nodes)
        self.here = dict.fromkeys(self.nodes)
        gaps = GapEstimator(MEDIANS)
        order.queue.plain_gap_s = gaps.gap_s(None, "plain")
        order.set_user(LEFT, Standing(NextUseRank.SUPERSEDED))
        for name, session in self.sessions.items():
            order.set_user(name, self.standing(gaps, name, session))
        for name in self.nodes:
            self.offer(name)

    def standing(self, gaps, name, session):
        state = session["state"]
        if state in ("running", "queued"):
            return Standing(NextUseRank[state.upper()])
        tail = session["path"][-1] if session["path"] else None
        access = self.nodes[tail]["last_access"] if tail else 0
        if state == "ended":
            since_s = session.get("last_access", session.get("idle_since", access))
            gap_s = gaps.gap_s(name, session.get("label", "other"))
            return Standing(NextUseRank.ENDED, since_s, gap_s)
        assert state == "idle", state
        gap_s = gaps.gap_s(name, session.get("label", "other"))
        return Standing(NextUseRank.IDLE, session["idle_since"], gap_s, session.get("hint"))

    def users(self, name):
        return [s for s, session in self.sessions.items() if name in session["path"]]

    def path(self, name):
        path = []
        while name is not None:
            path.append(name)
            name = self.nodes[name]["parent"]
        return path

    def offer(self, name):
        """Add `name` if it is an unlocked leaf. A node off every path, below one, was left."""
        users = self.users(name)
        if any(self.nodes[other]["parent"] == name for other in self.here):
            return
        if any(self.sessions[user]["state"] == "running" for user in users):
            return
        if not users and any(self.users(above) for above in self.path(name)):
            users = [LEFT]
        node = self.nodes[name]
        depth = len(self.path(name))
        self.order.add(self.ids[name], users, node["last_access"], depth, node["pages"])

    def uncover(self, node_id):
        name = self.names[node_id]
        del self.here[name]
        parent = self.nodes[name]["parent"]
        if parent is not None:
            self.offer(parent)

    def drain(self, need, now):
        taken = drain(self.order, need, now, self.uncover)
        return [[self.names[node_id], pages] for node_id, pages in taken]


@pytest.mark.parametrize("case", cases("eviction"))
def test_eviction(case):
    tree = GoldenTree(case, create_order("next-use"))
    assert tree.drain(case["need"], case["now"]) == case["expect"], case["why"]


@pytest.mark.parametrize("case", cases("guard"))
def test_guard(case):
    guard = RegretGuard(case["capacity"])
    switches, used = [], False
    for i, (ours, lru) in enumerate(zip(case["ours"], case["lru"], strict=True)):
        if guard.observe(ours, lru) != used:
            used = guard.use_lru
            switches.append([i, "lru" if used else "ours"])
    assert switches == case["expect"]


# -- cases of our own, same format: what the shared file does not touch ---------------


def eviction(sessions, nodes, need, now=1000):
    parents = {}
    for session in sessions.values():
        parents.update(zip(session["path"][1:], session["path"], strict=False))
    nodes = {
        name: {"parent": parents.get(name), "pages": pages, "last_access": access}
        for name, (pages, access) in nodes.items()
    }
    case = {"sessions": sessions, "nodes": nodes}
    return GoldenTree(case, create_order("next-use")).drain(need, now)


def idle(path, since, label="tool", **extra):
    return {"state": "idle", "path": path, "label": label, "idle_since": since} | extra


def test_equal_keys_older_access_then_deeper_then_drain():
    sessions = {"A": idle(["a1", "a2", "a3"], 900), "B": idle(["b1", "b2"], 900)}
    same = {"a1": (1, 900), "a2": (1, 900), "a3": (1, 900), "b1": (1, 900), "b2": (1, 900)}
    drained = [["a3", 1], ["a2", 1], ["a1", 1], ["b2", 1], ["b1", 1]]
    assert eviction(sessions, same, 5) == drained
    older = same | {"b2": (1, 899)}
    assert eviction(sessions, older, 1) == [["b2", 1]]


def test_unowned_nodes_wait_like_humans_who_just_left():
    sessions = {"A": idle(["a"], 970), "H": idle(["h"], 995, "human")}
    nodes = {"a": (1, 970), "h": (1, 995), "u": (1, 994)}
    assert eviction(sessions, nodes, 3) == [["u", 1], ["h", 1], ["a", 1]]


def test_late_sessions_order_by_age_and_early_ones_by_return():
    sessions = {
        "A": idle(["a"], 900, hint=30),  # late: 51
        "B": idle(["b"], 800, hint=30),  # late: 101
        "C": idle(["c"], 990, hint=70),  # in 61
        "D": idle(["d"], 940, hint=130),  # in 71
    }
    nodes = {name: (1, 900) for name in "abcd"}
    assert eviction(sessions, nodes, 4) == [["b", 1], ["d", 1], ["c", 1], ["a", 1]]


def test_ended_by_oldest_access_and_not_while_somebody_needs_it():
    sessions = {
        "E": {"state": "ended", "path": ["p", "e"], "label": "tool", "last_access": 990},
        "F": {"state": "ended", "path": ["f"], "label": "tool", "last_access": 980},
        "A": idle(["p", "a"], 999),
    }
    nodes = {"p": (1, 999), "e": (1, 990), "f": (1, 980), "a": (1, 999)}
    assert eviction(sessions, nodes, 4) == [["f", 1], ["e", 1], ["a", 1], ["p", 1]]
