"""The parts of `sam` that need no server: ranges, envelopes, lineage, tables, exit codes."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from sam.cli import hints, output, top, tree, views
from sam.cli import sessions as listing
from sam.cli.errors import CliError, Exit
from sam.core.actions import ActionKind, parse_envelope, stamp_envelope


def record(session_id, parent=None, **fields):
    zero = {"private": 0, "shared": 0}
    return {
        "session_id": session_id,
        "tenant": "anonymous",
        "parent_session_id": parent,
        "generation": 1,
        "state": "idle",
        "waiting_tool": False,
        "tool_name": None,
        "idle_s": 1.0,
        "n_running": 0,
        "n_draining": 0,
        "tokens": {"device": dict(zero), "host": dict(zero)},
    } | fields


def text_of(shown, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("text", "start", "end"), [("2:5", 2, 5), ("2:", 2, None), (":5", None, 5), (":", None, None)]
)
def test_ranges(text, start, end):
    assert hints.parse_range("messages", text) == ("messages", start, end)


@pytest.mark.parametrize("text", ["", "3", "5:2", "2:2", ":0", "-1:", "a:b", "1:2:3", "1.5:2"])
def test_what_is_no_range(text):
    with pytest.raises(CliError) as failure:
        hints.parse_range("tokens", text)
    assert failure.value.code is Exit.USAGE and "--tokens" in failure.value.message


def test_one_range_a_hint():
    assert hints.one_range(messages=None, tools=None, tokens=None) is None
    with pytest.raises(CliError, match="--messages and --tools"):
        hints.one_range(messages="1:", tools="1:", tokens=None)


def test_the_body_goes_along_but_not_its_hints(tmp_path):
    file = tmp_path / "request.json"
    given = {"messages": [{"role": "user"}], "tools": [], "stream": True, "agent_hint": {}, "n": 1}
    file.write_text(json.dumps(given))
    span = hints.parse_range("messages", "0:")
    body = hints.read_body(file, span)
    assert body == {"model": "default", "messages": given["messages"], "tools": [], "n": 1}
    with pytest.raises(CliError, match="has no tools"):
        hints.read_body(file, hints.parse_range("tools", "0:"))
    with pytest.raises(CliError, match="none was given"):
        hints.read_body(None, span)
    with pytest.raises(CliError, match="goes with"):
        hints.read_body(file, hints.parse_range("tokens", "0:"))
    for text in ("[]", "{", '{"messages": 3}'):
        file.write_text(text)
        with pytest.raises(CliError):
            hints.read_body(file, span)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("offload", {"release": "now", "scope": "subtree"}),
        ("prefetch", {"scope": None}),
        ("evict", {}),
        ("retain", {"ttl_s": 9.0}),
        ("expect", {"expected_idle_s": 60.0}),
    ],
)
def test_envelopes_are_what_the_server_reads(kind, extra):
    """By the server's own decoder."""
    envelope = hints.envelope_of(kind, "a:b", None, **extra)
    stamped = stamp_envelope(envelope, tenant="anonymous", now_s=1.0)
    ((action, rejection),) = parse_envelope(stamped)
    assert rejection is None
    assert action.kind is hints.KINDS[kind] and action.key.session_id == "a:b"
    for name, value in extra.items():
        assert value is None or getattr(action, name) == value


def test_an_envelope_with_a_range():
    span = hints.parse_range("tokens", "16:")
    stamped = stamp_envelope(
        hints.envelope_of("evict", "s", span), tenant="anonymous", now_s=1.0
    )
    ((action, _),) = parse_envelope(stamped)
    assert (action.kind, action.target) == (ActionKind.EVICT, "tokens")
    assert (action.start, action.end) == (16, None)


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["done"], Exit.OK),
        (["done", "clipped"], Exit.OK),
        (["dropped"], Exit.FINDING),
        (["rejected"], Exit.FINDING),
        (["expired", "done"], Exit.FINDING),
        (["missing"], Exit.UNKNOWN),
        (["deferred"], Exit.PENDING),
        (["missing", "accepted"], Exit.PENDING),
        ([], Exit.FINDING),
    ],
)
def test_exit_codes_of_outcomes(statuses, code):
    assert hints.exit_of({"actions": [{"status": status} for status in statuses]}) is code


def test_lineage_puts_children_below_their_parent():
    records = [
        record("b", "a"),
        record("c", "b"),
        record("a"),
        record("x", "gone"),
        record("a", tenant="other"),
        record("b2", "a"),
    ]
    shown = [(depth, one["session_id"]) for depth, one in listing.by_lineage(records)]
    assert shown == [(0, "a"), (1, "b"), (2, "c"), (1, "b2"), (0, "x"), (0, "a")]


def test_a_story_of_each_owner():
    records = [record("a"), record("b", "a"), record("c", "b"), record("b", tenant="other")]
    mine, other = listing.story_of(records, "b", None)
    assert (mine["ancestors"], mine["children"]) == (["a"], ["c"])
    assert (other["ancestors"], other["children"]) == ([], [])
    assert listing.story_of(records, "b", "other")[0]["tenant"] == "other"
    with pytest.raises(CliError) as failure:
        listing.story_of(records, "z", None)
    assert failure.value.code is Exit.UNKNOWN


def test_a_cycle_of_parents_ends():
    """A page may be cut anywhere; nothing says that what it names hangs together."""
    records = [record("a", "b"), record("b", "a")]
    assert listing.story_of(records, "a", None)[0]["ancestors"] == ["a", "b"]


def test_ids_are_text_not_markup():
    odd = "[red]id[/red] [/]"
    records = [record(odd, waiting_tool=True, tool_name="[b]tool")]
    shown = text_of(views.sessions_table(records))
    assert odd in shown and "waits for [b]tool" in shown
    story = listing.story_of(records, odd, None)
    assert odd in text_of(views.session_view(story[0]))
    node = {"id": 1, "parent": 0, "key_tokens": 5, "device_tokens": 5, "host_tokens": 0}
    node |= {"locked": False, "next_use": "idle", "next_use_in_s": 3.0, "n_tags": 3}
    named = tree.radix_tree([node | {"sessions": [odd]}], "tree")
    assert odd in text_of(named) and "(+2 branches)" in text_of(named)


def test_tiers_are_those_that_the_server_names():
    tokens = {tier: {"private": n, "shared": 7} for n, tier in enumerate(("device", "pool"), 1)}
    shown = text_of(views.sessions_table([record("a", tokens=tokens)]))
    assert shown.split()[:6] == ["session", "state", "device", "pool", "shared", "idle"]


def test_outcomes_are_explained():
    action = {"action_type": "session.evict", "status": "missing", "reason": "unknown_session"}
    shown = text_of(views.outcome_table({"message_id": "m1", "actions": [action]}))
    assert "unknown_session: no such session of this API key" in shown and "m1" in shown
    action = {
        "action_type": "session.evict",
        "status": "clipped",
        "reason": "what_follows_too",
        "tokens": {"device": 1234, "host": 0, "pool": 0},
        "span": [16, 4096],
    }
    shown = text_of(views.outcome_table({"message_id": "m2", "actions": [action]}))
    assert "1,234" in shown and "16:4,096" in shown


def test_a_tree_of_some_nodes():
    nodes = [
        {"id": i, "parent": parent, "key_tokens": 10 * i, "device_tokens": 1, "host_tokens": i % 2,
         "locked": i == 2, "next_use": "ended", "next_use_in_s": 0.0, "n_tags": 1,
         "sessions": names}
        for i, parent, names in ((1, 0, ["a", "b"]), (2, 1, ["a"]), (3, 1, ["b"]), (9, 7, ["c"]))
    ]  # fmt: skip
    shown = text_of(tree.radix_tree(nodes, "tree")).splitlines()
    assert [line.split("#")[1].strip() for line in shown[1:]] == ["1", "2", "3", "9"]
    assert "locked" in shown[2] and "device+host" in shown[1] and shown[4].startswith("└──")
    assert [node["id"] for node in tree.of_session(nodes, "b")] == [1, 3]
    for node in nodes:
        del node["sessions"]
    with pytest.raises(CliError):
        tree.of_session(nodes, "a")


def test_what_changed_between_two_looks():
    def look(**counters):
        return top.Frame(0.0, {"summary": {"counters": counters, "actions": {"e:done": 1}}}, {})

    changed = top._changes(look(opened=2, ended=1), look(opened=5, ended=1, expired=2).report)
    assert changed == {"opened": 3, "expired": 2}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (61, "1 min 01 s"), (3_660, "1 h 01 min")],
)
def test_seconds(value, text):
    assert output.seconds(value) == text


def test_bars():
    assert output.bar(0, 100, 4) == "░░░░" and output.bar(50, 100, 4) == "██░░"
    assert output.bar(200, 100, 4) == "████" and output.bar(1, 0, 4) == "░░░░"
