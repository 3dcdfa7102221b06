"""What the documents say of the protocol and the settings is what the code does."""

import sys

import jsonschema
import pytest

from sam.core.hints import HintError, parse_agent_hint
from tests.unit.docs_pages import REPO

sys.path.insert(0, str(REPO / "scripts"))

import docs_reference  # noqa: E402

EDIT = {"type": "evict", "target": "session"}


def hint(**extra):
    return {"session_id": "s", **extra}


def with_edit(**changes):
    return hint(context_management={"edits": [EDIT | changes]})


HINTS = [
    hint(),
    hint(parent_session_id=None, expected_idle_s=0, cache_control={"type": "ephemeral"}),
    hint(context_management={"manage_request": True, "edits": [EDIT] * 64}),
    with_edit(type="offload", release="now"),
    with_edit(target="messages", start=0, end=2**31, release=None),
    hint(expected_idle_s=86_400, unknown=1),
    hint(cache_control={"type": "ephemeral", "ttl": 3600}),
    {},
    hint(session_id=""),
    hint(session_id="x" * 513),
    hint(parent_session_id=7),
    hint(expected_idle_s=-1),
    hint(expected_idle_s=86_401),
    hint(expected_idle_s=True),
    hint(context_management=[]),
    hint(context_management={"manage_request": "yes"}),
    hint(context_management={"edits": [EDIT] * 65}),
    hint(context_management={"edits": {}}),
    with_edit(type="drop"),
    with_edit(target="images"),
    with_edit(target="tokens", start=-1),
    with_edit(target="tokens", start=0.5),
    with_edit(target="tokens", end=2**31 + 1),
    with_edit(release="later"),
    hint(cache_control={"ttl": 3}),
    hint(cache_control={"type": "ephemeral", "ttl": 3601}),
    hint(**{f"k{i}": i for i in range(64)}),
]


def parses(raw):
    try:
        parse_agent_hint(raw)
    except HintError:
        return False
    return True


def test_reference_schema_and_settings_are_current(capsys):
    assert docs_reference.main(["--check"]) == 0, (
        f"{capsys.readouterr().out}run scripts/docs_reference.py and commit what it writes"
    )


@pytest.mark.parametrize("raw", HINTS, ids=range(len(HINTS)))
def test_the_schema_says_what_the_parser_does(raw):
    validator = jsonschema.Draft202012Validator(docs_reference.hint_schema())
    assert validator.is_valid(raw) == parses(raw)


def test_half_of_the_examples_are_wrong():
    assert 5 < sum(parses(raw) for raw in HINTS) < len(HINTS) - 5


def keys_of(schema, prefix=""):
    for name, field in schema.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from keys_of(field, f"{prefix}{name}.")
        yield from keys_of(field.get("items", {}), f"{prefix}{name}.")


def test_no_key_of_the_schema_is_unknown_to_the_parser():
    filled = hint(
        parent_session_id="p",
        expected_idle_s=1,
        cache_control={"type": "ephemeral", "ttl": 1},
        context_management={
            "manage_request": True,
            "edits": [EDIT | {"target": "tokens", "start": 0, "end": 9, "release": "now"}],
        },
    )
    assert parse_agent_hint(filled).unknown_keys == ()
    assert len(list(keys_of(docs_reference.hint_schema()))) == 14
