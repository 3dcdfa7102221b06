"""What a client may not do, against a real server: flood, wrong bodies, several prompts at once."""

import json
import threading
import time

import pytest

from sam.testing.server import ServerProcess
from tests.e2e.conftest import STRICT_ENV

pytestmark = pytest.mark.e2e
PROMPT = "A prompt that is long enough to be cached. " * 12
MAX_ACTIONS = 67


@pytest.fixture(scope="module")
def server(server_args):
    args = server_args(
        "--radix-cache-backend", "sam", "--sam-hint-rate-per-s", "50", "--sam-hint-burst", "100"
    )
    with ServerProcess(args, env=STRICT_ENV) as process:
        yield process
        assert process.request("/sessions")["summary"]["errors"] == 0
        assert "Traceback" not in process.log_text()


def generate(server, text, **hints):
    body = {"text": text, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    return server.request("/generate", body | hints)


def flood(server, number):
    """Evicts of sessions that nobody knows, of a client by its own."""
    actions = [
        {
            "action_id": f"a{i}",
            "action_type": "session.evict",
            "action_version": "0.1",
            "payload": {"session_id": f"nobody-{number}-{i}"},
        }
        for i in range(MAX_ACTIONS)
    ]
    envelope = {"protocol_version": "0.1", "message_id": f"flood-{number}", "actions": actions}
    reply = server.request("/kv_hints", envelope | {"cache_salt": "flood"})
    return {(action["status"], action["reason"]) for action in reply["actions"]}


def settled(server, message_id, seconds=20):
    deadline = time.monotonic() + seconds
    while True:
        actions = server.request(f"/kv_hints/{message_id}")["actions"]
        if all(a["status"] not in ("accepted", "deferred") for a in actions):
            return {a["action_type"]: a["status"] for a in actions}
        assert time.monotonic() < deadline, actions
        time.sleep(0.05)


def test_a_flood_of_hints_is_limited_and_harms_nobody(server):
    """(22)"""
    expected = generate(server, PROMPT)["text"]
    calm = {"session_id": "calm"}
    found, answers = [], [generate(server, PROMPT, agent_hint=calm)]

    def many(first):
        found.extend(flood(server, first + i) for i in range(12))

    threads = [threading.Thread(target=many, args=(100 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        answers.append(generate(server, PROMPT, agent_hint=calm))
    assert len(found) == 36 and ("dropped", "rate_limited") in set().union(*found)
    assert {answer["text"] for answer in answers} == {expected}
    report = server.request("/sessions")
    assert report["ingress"]["rejected_by_reason"]["rate_limited"] > 0
    assert report["n_sessions"] == 1 and report["summary"]["pending_actions"] == 0
    statuses = {a["status"] for a in answers[-1]["meta_info"]["kv_hints"]["actions"]}
    assert statuses <= {"done", "accepted"}


def test_edits_of_several_prompts_run_once_after_the_last(server):
    texts = [f"{i} {PROMPT}" for i in range(3)]
    edits = [{"type": "evict", "target": "session"}]
    hint = {"session_id": "batch", "context_management": {"edits": edits}}
    replies = generate(server, texts, agent_hint=hint)
    (message_id,) = {reply["meta_info"]["kv_hints"]["message_id"] for reply in replies}
    assert settled(server, message_id) == {"session.bind": "done", "session.evict": "done"}
    sessions = server.request("/sessions")["sessions"]
    (batch,) = [one for one in sessions if one["session_id"] == "batch"]
    assert (batch["state"], batch["generation"]) == ("ended", 1)
    cold = generate(server, texts)
    assert [reply["text"] for reply in cold] == [reply["text"] for reply in replies]
    assert max(reply["meta_info"]["cached_tokens"] for reply in cold) < 20


@pytest.mark.parametrize(
    "body", [{"message_id": "x"}, {"protocol_version": "0.1", "message_id": "x", "actions": 3}]
)
def test_a_malformed_envelope_is_rejected_with_200(server, body):
    (action,) = server.request("/kv_hints", body)["actions"]
    assert action["status"] == "rejected" and json.dumps(action["detail"])
