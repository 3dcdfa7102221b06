"""Request bodies of the real client (openJiuwen) through the ingress: what is what.

The bodies lie beside the repository (`SAM_SHARED` or ../shared); without them this is skipped.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")
pytest.importorskip("openai.types")

from openai.types.chat import ChatCompletion
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from test_ingress_parts import Server, actions_of, body_of

REPO = Path(__file__).resolve().parents[2]
CAPTURES = Path(os.environ.get("SAM_SHARED", REPO.parent / "shared")) / "captures"


def captured():
    if not CAPTURES.is_dir():
        return [pytest.param(None, id="none", marks=pytest.mark.skip(f"no {CAPTURES}"))]
    records = []
    for path in sorted(CAPTURES.glob("*.json")):
        for i, record in enumerate(json.loads(path.read_text())["records"]):
            if record["path"]:
                records.append(pytest.param(record, id=f"{path.stem}-{i}"))
    return records


@pytest.mark.parametrize("record", captured())
def test_captured_bodies(record):
    server = Server()
    request = ChatCompletionRequest(**record["body"])
    hint = record["body"].get("agent_hint")
    answer = server.openai(request, SimpleNamespace(headers=record["headers"]))
    if record["kind"].startswith("manage"):
        assert answer.status_code == 200
        ChatCompletion.model_validate(body_of(answer))
        statuses = {a["status"] for a in body_of(answer)["kv_hints"]["actions"]}
        assert statuses == {"accepted"}
        edits = hint["context_management"]["edits"]
        assert len(actions_of(server.sent[0])) == len(edits)
    elif hint is None:
        assert answer.kv_hints is None
    else:
        bind = actions_of(answer.kv_hints)[0]
        assert (bind.kind, bind.key.session_id) == ("session.bind", hint["session_id"])
        assert bind.parent_session_id == hint.get("parent_session_id")
        assert not server.sent
    assert server.counts()["rejected_hints"] == 0
