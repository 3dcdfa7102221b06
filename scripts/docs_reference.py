#!/usr/bin/env python3
"""Writes what in the documents is read off the code: the protocol reference, its JSON Schema, the
table of settings in the operating guide.

Owns their shape, and the one sentence that each field gets. Must never state a type, a default or
a bound of its own: those come from `sam.core` and `sam.config`.

    scripts/docs_reference.py            write them
    scripts/docs_reference.py --check    exit code 1 if one is not current
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from sam.config import ENV_PREFIX, HELP, SamConfig  # noqa: E402
from sam.core import actions, hints  # noqa: E402
from sam.core.validation import DEFAULT_LIMITS as LIMITS  # noqa: E402
from sam.core.validation import HintReason  # noqa: E402

DOCS = REPO / "docs"
FIELDS = {
    "session_id": "whose KV this is; opaque",
    "parent_session_id": "whose child; equal to `session_id` or absent: a root",
    "context_management": "what to do with parts of the context",
    "expected_idle_s": "seconds from the end of this answer to the session's next request",
    "cache_control": "soft keep-alive of the session",
    "manage_request": "`true`: manage only, never generate; `false`: answer first, then the edits",
    "edits": "in this order",
    "edits[].type": "free it, copy it to the host, bring it to the device",
    "edits[].target": "the whole session, or what `start` and `end` count",
    "edits[].start": "first item, from 0; absent: from the beginning",
    "edits[].end": "behind the last item; absent: to the end",
    "edits[].release": "of an offload: free the device copy now, or under pressure (default)",
    "cache_control.type": "the only kind",
    "cache_control.ttl": "seconds; 0 ends it",
    "payload.session_id": "whose KV this is",
    "payload.parent_session_id": "whose child",
    "payload.target": "as in an edit",
    "payload.start": "as in an edit",
    "payload.end": "as in an edit",
    "payload.scope": "`subtree`: the sessions below as well; an evict of a session always is",
    "payload.expected_idle_s": "of `session.expect`",
    "payload.ttl_s": "of `session.retain`",
    "payload.release": "of `session.demote`, as in an edit",
}
ACTIONS = {
    "session.bind": "the request belongs to this session; opens it where it is not known",
    "session.evict": "the session and those below it end; what nobody else uses is freed",
    "session.demote": "`offload`: the host gets a copy, the device copy gives way",
    "session.prefetch": "what is on host or in the pool comes to the device",
    "session.retain": "`cache_control`: goes last for a while",
    "session.expect": "`expected_idle_s`: goes by when it comes back",
}
STATUSES = {
    "accepted": "taken; the outcome is open",
    "deferred": "waits, for a request that runs or for a transfer; the outcome is open",
    "done": "done",
    "clipped": "done in part; the reason says what limited it",
    "dropped": "not done; the reason says why",
    "missing": "no such session, or nothing of it is cached there",
    "rejected": "malformed, or it cannot be resolved",
    "expired": "its time was over before it could be done",
}
_SET_BY_SERVER = {"kind", "action_id", "key", "time_s", *actions.INTERNAL_KEYS}
_BEGIN, _END = "<!-- settings: from scripts/docs_reference.py -->", "<!-- end of settings -->"


def hint_schema() -> dict[str, Any]:
    """JSON Schema of `agent_hint` as clients send it: the structs, with their wire names."""
    defs = msgspec.json.schema(hints.AgentHint)["$defs"]
    hint, edit = (defs[name]["properties"] for name in ("AgentHint", "Edit"))
    control = defs["CacheControl"]["properties"]
    session_id = {"type": "string", "minLength": 1, "maxLength": LIMITS.max_id_bytes}
    idle = {"type": "number", "minimum": 0, "maximum": LIMITS.max_expected_idle_s}
    ttl = idle | {"maximum": LIMITS.max_ttl_s, "default": LIMITS.default_ttl_s}
    index = {"type": "integer", "minimum": 0, "maximum": LIMITS.max_index}
    edits = {
        "type": "array",
        "maxItems": LIMITS.max_edits,
        "items": _object(
            {
                "type": {"enum": _choices(edit["type"])},
                "target": {"enum": _choices(edit["target"])},
                "start": _or_null(index),
                "end": _or_null(index),
                "release": {"enum": [*_choices(edit["release"]), None]},
            },
            required=["type", "target"],
        ),
    }
    manage = {"type": ["boolean", "null"], "default": hint["manage_request"]["default"]}
    management = {"manage_request": manage, "edits": _or_null(edits)}
    keep = {"type": {"enum": _choices(control["type"])}, "ttl": _or_null(ttl)}
    properties = {
        "session_id": session_id,
        "parent_session_id": _or_null(session_id),
        "context_management": _or_null(_object(management)),
        "expected_idle_s": _or_null(idle),
        "cache_control": _or_null(_object(keep, required=["type"])),
    }
    left = set(hint) - {*properties, *management, "unknown_keys"}
    if left:
        raise KeyError(f"AgentHint has fields that the schema does not know: {sorted(left)}")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "agent_hint"}
    return head | _object(properties, required=["session_id"])


def _object(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    found = {"type": "object", "maxProperties": LIMITS.max_keys, "properties": properties}
    return found | ({"required": required} if required else {})


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


def _choices(schema: dict[str, Any]) -> list[str]:
    """The words of an enumeration, null apart."""
    if "enum" in schema:
        return [word for word in schema["enum"] if word is not None]
    return [word for one in schema["anyOf"] for word in one.get("enum", ()) if word is not None]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines)


def _words(values: list[Any]) -> str:
    return ", ".join(f"`{value}`" for value in values if value is not None)


def _type_of(schema: dict[str, Any]) -> str:
    """A field's type and bounds in words."""
    if "enum" in schema:
        return _words(schema["enum"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    (kind,) = [one for one in kinds if one != "null"]
    if "maximum" in schema:
        return f"{kind}, {schema['minimum']:,} to {schema['maximum']:,.0f}"
    if "maxLength" in schema:
        return f"{kind}, 1 to {schema['maxLength']} bytes"
    return f"{kind}, at most {schema['maxItems']}" if "maxItems" in schema else kind


def _rows(schema: dict[str, Any], prefix: str = "") -> list[tuple[str, ...]]:
    rows = []
    for name, field in schema["properties"].items():
        needed = "required" if name in schema.get("required", ()) else field.get("default", "")
        shown = str(needed).lower() if isinstance(needed, bool) else f"{needed}"
        rows.append((f"`{name}`", _type_of(field), shown, FIELDS[prefix + name]))
    return rows


def _payload_rows() -> list[tuple[str, ...]]:
    """What a client may put into an action's payload."""
    schema = msgspec.json.schema(actions.SessionAction)["$defs"]["SessionAction"]["properties"]
    limit = f"string, 1 to {LIMITS.max_id_bytes} bytes"
    rows = [("`session_id`", limit, FIELDS["payload.session_id"])]
    for name, field in schema.items():
        if name in _SET_BY_SERVER:
            continue
        words = [w for one in (field, *field.get("anyOf", ())) for w in one.get("enum", ())]
        kinds = [one.get("type", "") for one in (field, *field.get("anyOf", ()))]
        kind = _words(words) or next(k for k in kinds if k and k != "null")
        rows.append((f"`{name}`", kind, FIELDS[f"payload.{name}"]))
    return rows


def reference() -> str:
    """Text of docs/protocol-reference.md."""
    schema = hint_schema()
    parts = schema["properties"]
    management, control = parts["context_management"], parts["cache_control"]
    edit = management["properties"]["edits"]["items"]
    head = ("field", "type", "default", "meaning")
    statuses = [(f"`{one.value}`", STATUSES[one.value]) for one in actions.ActionStatus]
    kinds = [(f"`{one.value}`", ACTIONS[one.value]) for one in actions.ActionKind]
    limits = msgspec.structs.asdict(LIMITS)
    reasons = ", ".join(f"`{one.value}`" for one in HintReason)
    return f"""# Protocol reference

Written by `scripts/docs_reference.py` from `sam.core`; do not edit. What the fields do is in
[protocol.md](protocol.md), what to do about a reason in [troubleshooting.md](troubleshooting.md).
The same as JSON Schema: [agent-hint.schema.json](agent-hint.schema.json). A null counts as absent,
keys that are not listed are ignored and counted.

## agent_hint
{_table(head, _rows(schema))}

### context_management
{_table(head, _rows(management))}

### edits
{_table(head, _rows(edit, "edits[]."))}

A `session` takes no range. `start` has to be below `end`.

### cache_control
{_table(head, _rows(control, "cache_control."))}

## kv_hints
An envelope is `protocol_version` (`{actions.PROTOCOL_VERSION}`), `message_id` and `actions`; an
action is `action_id`, `action_type`, `action_version` (`{actions.ACTION_VERSION}`) and `payload`.

{_table(("action_type", "what"), kinds)}

{_table(("payload", "type", "meaning"), _payload_rows())}

Tenant and time are set by the server, whatever the client writes; these keys are removed:
{_words([*actions.INTERNAL_KEYS])}.

## Outcomes
An outcome is `action_id`, `action_type`, `status`, `reason`, and where it applies `tokens`
(`device`, `host`, `pool`), `span` and `detail`.

{_table(("status", "means"), statuses)}

Reasons of `rejected` for what is malformed: {reasons}.

## Limits
{_table(("name", "value"), [(f"`{name}`", f"{value:,.10g}") for name, value in limits.items()])}
"""


def settings() -> str:
    """The table of settings, between its two marks."""
    rows = []
    for field in msgspec.structs.fields(SamConfig):
        option = f"--sam-{field.name.replace('_', '-')}"
        default = field.default
        shown = str(default).lower() if isinstance(default, bool) else f"{default}"
        if isinstance(default, float):
            shown = f"{default:g}"
        variable = f"{ENV_PREFIX}{field.name.upper()}"
        rows.append((f"`{option}`", f"`{variable}`", shown, HELP[field.name]))
    table = _table(("option", "variable", "default", "meaning"), rows)
    return f"{_BEGIN}\n{table}\n{_END}"


def wanted() -> dict[Path, str]:
    """Each file with the text that it should have."""
    guide = DOCS / "operating.md"
    before, _, rest = guide.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return {
        DOCS / "protocol-reference.md": reference(),
        DOCS / "agent-hint.schema.json": json.dumps(hint_schema(), indent=1) + "\n",
        guide: before + settings() + after,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="exit codes: 0 current or written; 1 not current",
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    files = wanted()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{'not current' if args.check else 'written'}: {path.relative_to(REPO)}")
        if not args.check:
            path.write_text(files[path])
    return int(bool(stale) and args.check)


if __name__ == "__main__":
    sys.exit(main())
