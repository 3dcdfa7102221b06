"""Request bodies of the real client (openJiuwen) through the ingress, with SGLang's chat handler.

The bodies lie beside the repository (`SAM_SHARED` or ../shared); without them this is skipped.
Each is looked at in full: what the client gets, what the scheduler gets, and when.
"""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("sglang")
pytest.importorskip("openai.types")

from openai.types.chat import ChatCompletion
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from test_ingress_parts import Server, actions_of, body_of, caller
from test_ranges_parts import chat_handler

REPO = Path(__file__).resolve().parents[2]
CAPTURES = Path(os.environ.get("SAM_SHARED", REPO.parent / "shared")) / "captures"
KINDS = {"evict": "session.evict", "offload": "session.demote", "prefetch": "session.prefetch"}


def captured():
    if not CAPTURES.is_dir():
        return [pytest.param(None, id="none", marks=pytest.mark.skip(f"no {CAPTURES}"))]
    records = []
    for path in sorted(CAPTURES.glob("*.json")):
        for i, record in enumerate(json.loads(path.read_text())["records"]):
            if record["path"]:
                records.append(pytest.param(record, id=f"{path.stem}-{i}"))
    return records


def selects(edit, body):
    """Whether an edit selects anything of its body's lists."""
    if edit["target"] == "session":
        return True
    return (edit.get("start") or 0) < len(body.get(edit["target"]) or ())


def check_edit(action, edit, body, handler):
    """An action as the scheduler decodes it, against the edit that it comes from."""
    assert action.kind == KINDS[edit["type"]]
    hint = body["agent_hint"]
    assert action.key.session_id == hint["session_id"]
    assert action.parent_session_id == hint.get("parent_session_id")
    if edit["target"] == "session":
        assert (action.target, action.token_ids) == ("session", None)
        root = hint["parent_session_id"] == hint["session_id"]
        assert action.scope == ("subtree" if root or edit["type"] == "evict" else "session")
        return
    assert (action.target, action.source, action.scope) == ("tokens", edit["target"], "session")
    n_items = len(body[edit["target"]])
    open_end = edit["target"] == "tools" or edit["end"] >= n_items
    assert (action.end is None) == open_end
    n_tokens = action.start if open_end else action.end
    tokenizer = handler.tokenizer_manager.tokenizer
    ids = memoryview(action.token_ids).cast("i").tolist()
    assert len(ids) >= n_tokens > 0
    kept = tokenizer.decode(ids[: action.start])
    if edit["target"] == "tools":
        assert all(tool["function"]["description"] not in kept for tool in body["tools"])
        return
    for message in body["messages"][: edit["start"]]:
        if message["role"] != "system":
            assert (message["content"] or "") in kept
    window = handler._convert_to_internal_request(ChatCompletionRequest(**body))[0].input_ids
    assert ids == window


@pytest.mark.parametrize("record", captured())
def test_captured_bodies(record):
    handler = chat_handler("qwen")
    server = Server(handler=handler)
    body = record["body"]
    raw = caller(record["headers"].get("authorization"), json.dumps(body).encode())
    answer = server.openai(ChatCompletionRequest(**body), raw)
    hint = body.get("agent_hint")
    edits = ((hint or {}).get("context_management") or {}).get("edits") or []
    wanted = [edit for edit in edits if selects(edit, body)]
    if hint is None:
        assert answer.kv_hints is None and not server.sent
        return
    if record["kind"].startswith("manage"):
        assert answer.status_code == 200
        ChatCompletion.model_validate(body_of(answer))
        shown = body_of(answer)["kv_hints"]["actions"]
        at_once = []
    else:
        shown = server.shown(answer)["actions"][1:]
        bind, *at_once = actions_of(answer.kv_hints)
        assert (bind.kind, bind.key.session_id) == ("session.bind", hint["session_id"])
        assert bind.parent_session_id == hint.get("parent_session_id")
    expected = ["accepted" if edit in wanted else "rejected" for edit in edits]
    assert [action["status"] for action in shown] == expected
    assert {a["reason"] for a in shown} <= {"", "empty_range"}
    sent = [*at_once, *(action for one in server.sent for action in actions_of(one))]
    for action, edit in zip(sent, wanted, strict=True):
        check_edit(action, edit, body, handler)
    rejected = server.counts()["rejected_by_reason"]
    assert rejected == ({"empty_range": len(edits) - len(wanted)} if edits != wanted else {})
