"""The agent_hint field: what parses, what is rejected and how cheaply, how it lowers."""

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from sam.core.hints import (
    ACTION_VERSION,
    ActionKind,
    ActionStatus,
    CacheControl,
    Edit,
    HintError,
    is_manage,
    lower,
    parse_action,
    parse_agent_hint,
    parse_envelope,
    stamp_envelope,
)
from sam.core.sessions import SessionKey

REPO = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SAM_SHARED", REPO.parent / "shared"))
NESTED: list = []
for _ in range(100_000):
    NESTED = [NESTED]
DEEP: dict = {}
for _ in range(100_000):
    DEEP = {"x": DEEP}
WRONG = [True, 1, -1, 1.5, math.nan, math.inf, "text", b"bytes", [], [1], {}, {"a": 1}]
WRONG += [NESTED, DEEP, 10**5000, object(), {1, 2}, "\ud800", "x" * 1_000_000]


def each(*values):
    """Parameters with short ids: some of these values cannot be printed."""
    return [pytest.param(v, id=f"{i}-{type(v).__name__}") for i, v in enumerate(values)]


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Same shape as upstream's KvHintsEnvelope."""

    class Action(msgspec.Struct, frozen=True, kw_only=True):
        action_id: str
        action_type: str
        action_version: str
        payload: dict = {}

    protocol_version: str
    message_id: str
    actions: list[Action] = []


def hint(**extra):
    return {"session_id": "s", **extra}


def manage(*edits, manage_request=True, **extra):
    management = {"manage_request": manage_request, "edits": list(edits)}
    return hint(context_management=management, **extra)


def edit(type="evict", target="messages", **extra):
    return {"type": type, "target": target, **extra}


def lowered(raw, manage_only=None):
    parsed = parse_agent_hint(raw)
    only = parsed.manage_request if manage_only is None else manage_only
    return lower(parsed, message_id="m1", now_s=12.5, tenant="acme", manage_only=only)


def reason_of(raw):
    with pytest.raises(HintError) as caught:
        parse_agent_hint(raw)
    assert len(caught.value.detail) <= 200
    assert len(str(caught.value)) <= 260
    return caught.value.reason


# -- what parses ---------------------------------------------------------------------


def test_lineage_only():
    parsed = parse_agent_hint(hint(parent_session_id="p"))
    assert (parsed.session_id, parsed.parent_session_id) == ("s", "p")
    assert not parsed.manage_request and parsed.edits == () and parsed.unknown_keys == ()


def test_everything_at_once():
    parsed = parse_agent_hint(
        manage(
            edit(start=1, end=5),
            edit("offload", "tools"),
            edit("prefetch", "session"),
            edit("evict", "tokens", start=0, end=2**31),
            edit("offload", "session", release="now"),
            parent_session_id="p",
            expected_idle_s=86400,
            cache_control={"type": "ephemeral", "ttl": 3600},
        )
    )
    assert parsed.manage_request
    assert parsed.edits[0] == Edit(type="evict", target="messages", start=1, end=5)
    assert parsed.edits[1] == Edit(type="offload", target="tools")
    assert parsed.edits[4].release == "now"
    assert parsed.expected_idle_s == 86400.0
    assert parsed.cache_control == CacheControl(type="ephemeral", ttl_s=3600.0)


def test_nulls_count_as_absent():
    parsed = parse_agent_hint(
        hint(
            parent_session_id=None,
            context_management=None,
            expected_idle_s=None,
            cache_control=None,
        )
    )
    assert parsed == parse_agent_hint(hint())
    nulls = edit("evict", "session", start=None, end=None, release=None)
    assert parse_agent_hint(manage(nulls)).edits == (Edit(type="evict", target="session"),)
    management = {"manage_request": None, "edits": None}
    assert parse_agent_hint(hint(context_management=management)) == parse_agent_hint(hint())


def test_cache_control_default_ttl():
    parsed = parse_agent_hint(hint(cache_control={"type": "ephemeral"}))
    assert parsed.cache_control.ttl_s == 300


@pytest.mark.parametrize("end", [99, 2**31])
def test_end_beyond_the_list_is_no_error(end):
    assert parse_agent_hint(manage(edit(start=2, end=end))).edits[0].end == end


def test_one_sided_ranges():
    edits = parse_agent_hint(manage(edit(start=3), edit(end=3))).edits
    assert [(e.start, e.end) for e in edits] == [(3, None), (None, 3)]


def test_ids_are_opaque_up_to_512_bytes():
    for session_id in ("a:b:c", " ", "x" * 512, "é" * 256, "\x00"):
        assert parse_agent_hint({"session_id": session_id}).session_id == session_id
    assert reason_of({"session_id": "é" * 257}) == "id_too_long"


def test_unknown_keys_are_listed_and_bounded():
    raw = manage(edit(color=1), depth=2, cache_control={"type": "ephemeral", "x": 1}, later={})
    raw["context_management"]["mode"] = "x"
    assert parse_agent_hint(raw).unknown_keys == (
        "depth",
        "later",
        "context_management.mode",
        "context_management.edits.color",
        "cache_control.x",
    )
    many = hint(**{f"{i}" + "k" * 1000: i for i in range(50)}) | {7: 8}
    keys = parse_agent_hint(many).unknown_keys
    assert len(keys) == 16 and max(map(len, keys)) <= 64


def test_64_edits_pass_and_65_do_not():
    assert len(parse_agent_hint(manage(*[edit()] * 64)).edits) == 64
    assert reason_of(manage(*[edit()] * 65)) == "too_many_edits"


# -- what is rejected ----------------------------------------------------------------


@pytest.mark.parametrize("raw", each(None, *[w for w in WRONG if not isinstance(w, dict)]))
def test_not_an_object(raw):
    assert reason_of(raw) == "not_an_object"
    assert not is_manage(raw)


@pytest.mark.parametrize("field", ["session_id", "parent_session_id"])
@pytest.mark.parametrize("bad", each(*[w for w in [*WRONG, ""] if w != "text"]))
def test_bad_ids(field, bad):
    reason = "id_too_long" if isinstance(bad, str) and len(bad) > 512 else f"bad_{field}"
    assert reason_of(hint() | {field: bad}) == reason


def test_missing_session_id():
    assert reason_of({}) == "bad_session_id"
    assert reason_of({"session_id": None}) == "bad_session_id"


@pytest.mark.parametrize("bad", each(*[w for w in WRONG if not isinstance(w, dict)]))
def test_bad_containers(bad):
    assert reason_of(hint(context_management=bad)) == "bad_context_management"
    assert reason_of(hint(cache_control=bad)) == "bad_cache_control"
    if bad != []:
        assert reason_of(manage(bad)) == "bad_edit"


@pytest.mark.parametrize("bad", each(*[w for w in WRONG if not isinstance(w, list)]))
def test_bad_edits(bad):
    assert reason_of(hint(context_management={"edits": bad})) == "bad_edits"


@pytest.mark.parametrize("bad", each(*[w for w in WRONG if w is not True]))
def test_bad_manage_request(bad):
    raw = hint(context_management={"manage_request": bad})
    assert reason_of(raw) == "bad_manage_request"
    assert not is_manage(raw)


@pytest.mark.parametrize("bad", each(None, *WRONG, "EVICT", "demote"))
def test_bad_edit_words(bad):
    assert reason_of(manage(edit(type=bad))) == "bad_edit_type"
    assert reason_of(manage(edit(target=bad))) == "bad_edit_target"
    assert reason_of(hint(cache_control={"type": bad})) == "bad_cache_control"
    if bad is not None:
        assert reason_of(manage(edit(release=bad))) == "bad_release"


@pytest.mark.parametrize(
    "bad", each(*[w for w in WRONG if w != 1 or w is True], "1", 2**31 + 1)
)
def test_bad_indices(bad):
    assert reason_of(manage(edit(start=bad))) == "bad_range"
    assert reason_of(manage(edit(end=bad))) == "bad_range"


@pytest.mark.parametrize(("start", "end"), [(0, 0), (None, 0), (5, 5), (6, 5), (-2, -1)])
def test_bad_ranges(start, end):
    assert reason_of(manage(edit(start=start, end=end))) == "bad_range"


def test_a_range_on_the_session_target_is_refused():
    assert reason_of(manage(edit("evict", "session", start=0, end=1))) == "bad_range"


@pytest.mark.parametrize("bad", each(*[w for w in WRONG if w not in (1, 1.5) or w is True]))
def test_bad_numbers(bad):
    assert reason_of(hint(expected_idle_s=bad)) == "bad_number"
    assert reason_of(hint(cache_control={"type": "ephemeral", "ttl": bad})) == "bad_number"


def test_number_bounds():
    assert reason_of(hint(expected_idle_s=86400.1)) == "bad_number"
    assert reason_of(hint(cache_control={"type": "ephemeral", "ttl": 3601})) == "bad_number"
    assert parse_agent_hint(hint(expected_idle_s=0)).expected_idle_s == 0


def test_too_many_keys():
    wide = {str(i): 0 for i in range(100_000)}
    assert reason_of(wide) == "too_many_keys"
    assert reason_of(hint(context_management=wide)) == "too_many_keys"
    assert reason_of(manage(wide)) == "too_many_keys"


def test_rejection_is_cheap_and_echoes_little():
    secret = "s3cret" * 200_000
    bodies = [
        {"session_id": secret},
        hint(parent_session_id=secret),
        manage(*[secret] * 100_000),
        manage(edit(type=secret)),
        manage(edit(target=NESTED)),
        hint(expected_idle_s=10**5000),
    ]
    started = time.perf_counter()
    for _ in range(100):
        for raw in bodies:
            with pytest.raises(HintError) as caught:
                parse_agent_hint(raw)
            assert caught.value.detail.count("s3cret") <= 7
    assert time.perf_counter() - started < 1.0


def test_is_manage_on_malformed_hints():
    assert is_manage({"session_id": 7, "context_management": {"manage_request": True}})
    assert not is_manage({"context_management": {"manage_request": 1}})
    assert not is_manage({"context_management": [True]})
    assert not is_manage({"manage_request": True})


# -- lowering ------------------------------------------------------------------------


def test_inference_lowers_to_bind_then_extras_then_edits():
    envelope = lowered(
        manage(
            edit(start=4, end=5),
            edit("offload", "session", release="now"),
            manage_request=False,
            parent_session_id="p",
            expected_idle_s=3,
            cache_control={"type": "ephemeral"},
        )
    )
    assert (envelope["protocol_version"], envelope["message_id"]) == ("0.1", "m1")
    kinds = [a["action_type"] for a in envelope["actions"]]
    assert kinds == [
        "session.bind",
        "session.expect",
        "session.retain",
        "session.evict",
        "session.demote",
    ]
    assert [a["action_id"] for a in envelope["actions"]] == ["a0", "a1", "a2", "a3", "a4"]
    assert {a["action_version"] for a in envelope["actions"]} == {"0.1"}
    common = {"session_id": "s", "parent_session_id": "p", "tenant": "acme", "time_s": 12.5}
    for action in envelope["actions"]:
        assert common.items() <= action["payload"].items()
    assert envelope["actions"][3]["payload"] == common | {
        "target": "messages",
        "scope": "session",
        "start": 4,
        "end": 5,
    }


def test_manage_only_never_binds():
    for parent in ({}, {"parent_session_id": "s"}, {"parent_session_id": "p"}):
        envelope = lowered(manage(edit("prefetch", "session"), **parent))
        assert [a["action_type"] for a in envelope["actions"]] == ["session.prefetch"]


@pytest.mark.parametrize(
    ("raw", "scope"),
    [
        (manage(edit("evict", "session")), "subtree"),
        (manage(edit("evict", "session"), parent_session_id="p"), "subtree"),
        (manage(edit("evict", "session"), manage_request=False), "subtree"),
        (manage(edit("offload", "session"), parent_session_id="p"), "session"),
        (manage(edit("offload", "session"), parent_session_id="s"), "subtree"),
        (manage(edit("prefetch", "session"), parent_session_id="s"), "subtree"),
        (manage(edit("prefetch", "session")), "session"),
        (manage(edit(start=1, end=2), parent_session_id="s"), "session"),
        (
            manage(edit("offload", "session"), manage_request=False, parent_session_id="s"),
            "session",
        ),
    ],
)
def test_scope(raw, scope):
    action = lowered(raw)["actions"][-1]
    assert action["payload"]["scope"] == scope
    assert parse_action(action).scope == scope


def test_lowering_is_deterministic_and_fits_upstreams_struct():
    raw = manage(*[edit(start=i) for i in range(64)], manage_request=False)
    assert json.dumps(lowered(raw)) == json.dumps(lowered(raw))
    envelope = msgspec.convert(lowered(raw), Envelope)
    entries = parse_envelope(envelope)
    assert len(entries) == 65 and all(action for action, _ in entries)
    assert entries == parse_envelope(lowered(raw))


# -- actions -------------------------------------------------------------------------


def action(kind="session.evict", version="0.1", **payload):
    base = {"session_id": "s", "tenant": "t", "time_s": 1.0}
    return {
        "action_id": "a0",
        "action_type": kind,
        "action_version": version,
        "payload": base | payload,
    }


def test_parse_action_round_trip():
    parsed = parse_action(
        action("session.demote", target="tokens", start=1, end=9, release="now")
    )
    assert parsed.kind is ActionKind.DEMOTE and parsed.key == SessionKey("t", "s")
    assert (parsed.target, parsed.start, parsed.end) == ("tokens", 1, 9)
    assert (parsed.scope, parsed.release, parsed.time_s) == ("session", "now", 1.0)
    assert parse_action(SimpleNamespace(**action())).kind is ActionKind.EVICT


def test_kind_fields():
    assert parse_action(action("session.expect", expected_idle_s=4)).expected_idle_s == 4.0
    assert parse_action(action("session.retain", ttl_s=9)).ttl_s == 9.0
    assert parse_action(action("session.retain")).ttl_s == 300.0


@pytest.mark.parametrize("kind", [None, 7, [], "session.sing", "vendor.evict"])
def test_unknown_actions_are_ignored(kind):
    assert parse_action(action(kind)) is None
    assert parse_action(action(version="9.9")) is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (action(session_id=7), "bad_session_id"),
        (action(session_id="x" * 513), "id_too_long"),
        (action(parent_session_id=[]), "bad_parent_session_id"),
        (action(tenant=None), "bad_tenant"),
        (action(time_s=math.nan), "bad_time"),
        (action(time_s=1e300), "bad_time"),
        (action(time_s=True), "bad_time"),
        (action(scope="all"), "bad_scope"),
        (action(target="world"), "bad_edit_target"),
        (action(target="tokens", start=3, end=3), "bad_range"),
        (action(release="soon"), "bad_release"),
        (action("session.expect"), "bad_number"),
        (action("session.retain", ttl_s=1e9), "bad_number"),
        (action() | {"payload": None}, "bad_action"),
        (action() | {"action_id": 3}, "bad_action"),
        (7, "bad_action"),
        (None, "bad_action"),
    ],
)
def test_bad_actions(bad, reason):
    with pytest.raises(HintError) as caught:
        parse_action(bad)
    assert caught.value.reason == reason
    good = action()
    entries = parse_envelope({"actions": [good, bad, action("other"), good]})
    assert entries[0] == entries[3] == (parse_action(good), None)
    assert entries[1][1].status is ActionStatus.REJECTED and entries[1][1].reason == reason
    assert entries[2] == (None, None)


@pytest.mark.parametrize("actions", each(None, 7, "x", {}, [1] * 68))
def test_bad_envelopes(actions):
    with pytest.raises(HintError):
        parse_envelope({"actions": actions})
    with pytest.raises(HintError):
        stamp_envelope(SimpleNamespace(actions=actions), tenant="t", now_s=1.0)


def test_stamp_replaces_owner_and_time_only_in_a_copy():
    mine, other = action(tenant="victim", time_s=1e10), action("vendor.x", tenant="keep")
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [mine, other]}
    stamped = stamp_envelope(envelope, tenant="t", now_s=5.0)
    assert parse_action(stamped["actions"][0]).key.tenant == "t"
    assert parse_action(stamped["actions"][0]).time_s == 5.0
    assert stamped["actions"][1] == other
    assert mine["payload"]["tenant"] == "victim"
    as_struct = msgspec.convert(envelope, Envelope)
    assert stamp_envelope(as_struct, tenant="t", now_s=5.0) == stamped


# -- the real client -----------------------------------------------------------------

CAPTURES = sorted((SHARED / "captures").glob("*.json"))
needs_captures = pytest.mark.skipif(
    not CAPTURES, reason=f"no captures in {SHARED}/captures (set SAM_SHARED)"
)


def captured_hints():
    for path in CAPTURES:
        for record in json.loads(path.read_text())["records"]:
            if "agent_hint" in record["body"]:
                yield record["kind"], record["body"]["agent_hint"]


@needs_captures
def test_every_captured_hint_parses_lowers_and_decodes():
    hints = list(captured_hints())
    assert len(hints) > 100
    for kind, raw in hints:
        parsed = parse_agent_hint(raw)
        assert parsed.unknown_keys == ()
        assert parsed.manage_request == is_manage(raw) == kind.startswith("manage"), kind
        entries = parse_envelope(lowered(raw))
        assert all(action is not None for action, _ in entries)
        binds = [a for a, _ in entries if a.kind is ActionKind.BIND]
        assert len(binds) == (0 if parsed.manage_request else 1)
        assert len(entries) == len(binds) + len(parsed.edits)


# -- what only the ingress may say about a range --------------------------------------


def range_action(**payload):
    base = {"session_id": "s", "tenant": "t", "time_s": 1.0, "target": "tokens"}
    return {
        "action_id": "a",
        "action_type": "session.evict",
        "action_version": ACTION_VERSION,
        "payload": base | payload,
    }


def test_a_token_range_names_its_window():
    ids = b"\x01\x00\x00\x00\x02\x00\x00\x00"
    action = parse_action(
        range_action(
            start=2, token_ids=ids, cache_salt="salt", extra_key="lora", source="messages"
        )
    )
    assert (action.start, action.end, action.token_ids) == (2, None, ids)
    assert (action.cache_salt, action.extra_key, action.source) == ("salt", "lora", "messages")
    assert parse_action(range_action(start=0, end=2, token_ids=ids)).token_ids == ids
    assert parse_action(range_action(start=7)).token_ids is None


@pytest.mark.parametrize(
    "payload",
    [
        {"start": 2, "token_ids": b"\x01\x00\x00"},
        {"start": 2, "token_ids": b"\x01\x00\x00\x00"},
        {"start": 1, "end": 3, "token_ids": b"\x01\x00\x00\x00"},
        {"start": 1, "token_ids": "\x01\x00\x00\x00"},
        {"start": 1, "token_ids": [1]},
        {"start": 1, "source": "disk"},
        {"start": 1, "cache_salt": 5},
        {"start": 1, "extra_key": "x" * 65_537},
    ],
)
def test_a_malformed_window_is_refused(payload):
    with pytest.raises(HintError):
        parse_action(range_action(**payload))


def test_clients_cannot_name_a_window():
    own = range_action(
        start=1, token_ids=b"\x01\x00\x00\x00", cache_salt="victim", extra_key="x", source="tools"
    )
    stamped = stamp_envelope({"actions": [own]}, tenant="t", now_s=5.0)
    payload = stamped["actions"][0]["payload"]
    assert payload == {
        "session_id": "s",
        "tenant": "t",
        "time_s": 5.0,
        "target": "tokens",
        "start": 1,
    }
