"""Ranges of messages, tools and tokens on a real server: what leaves the cache, what stays."""

import json
import time
import urllib.error

import pytest

from sam.testing.random_swarm import manage
from sam.testing.server import ServerProcess
from tests.e2e.conftest import STRICT_ENV

pytestmark = pytest.mark.e2e
SYSTEM = "You are one of several careful agents. " * 30


def tool(name):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": name, "description": f"{name} of a city. " * 6, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("weather"), tool("traffic"), tool("news")]


@pytest.fixture(scope="module", params=["rust", "python"])
def server(server_args, request):
    args = server_args("--radix-cache-backend", "sam", total_tokens=8_192)
    with ServerProcess(args, env={**STRICT_ENV, "SAM_TREE_CORE": request.param}) as process:
        yield process
        assert process.request("/sessions")["summary"]["errors"] == 0
        assert process.request("/sessions")["summary"]["tree_core_mismatches"] == 0
        assert "Traceback" not in process.log_text()


@pytest.fixture(autouse=True)
def empty_cache(server):
    for session in server.request("/sessions?limit=1000")["sessions"]:
        manage(server, {"session_id": session["session_id"]}, "evict")
    server.flush_cache()


def turns(*texts):
    """System text, then user and assistant in turns."""
    roles = ["user", "assistant"]
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": SYSTEM}, *said]


LONG = [f"Part {i} of the work. " + f"Detail {i} matters a lot here. " * 20 for i in range(5)]


def chat(server, messages, session=None, *edits, tools=None, manage_request=False, **fields):
    body = {"model": "sam", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    if tools:
        body |= {"tools": tools}
    if session is not None:
        body["agent_hint"] = {"session_id": session}
        if edits:
            management = {"manage_request": manage_request, "edits": list(edits)}
            body["agent_hint"]["context_management"] = management
    return server.request("/v1/chat/completions", body)


def edit(server, messages, session, *edits, **fields):
    """A management request on ranges; its outcomes once they are final."""
    reply = chat(server, messages, session, *edits, manage_request=True, **fields)
    assert reply["choices"][0]["message"]["content"] == ""
    return outcomes(server, reply["kv_hints"]["message_id"])


def outcomes(server, message_id, query=""):
    deadline = time.monotonic() + 10
    while True:
        actions = server.request(f"/kv_hints/{message_id}{query}")["actions"]
        if all(action["status"] not in ("accepted", "deferred") for action in actions):
            return actions
        assert time.monotonic() < deadline, json.dumps(actions)
        time.sleep(0.02)


def cut(kind, target, start, end=None, **extra):
    ends = {} if end is None else {"end": end}
    return {"type": kind, "target": target, "start": start, **ends, **extra}


def tokens_of(server, session_id):
    sessions = server.request("/sessions?limit=1000")["sessions"]
    found = next(s for s in sessions if s["session_id"] == session_id)
    return {tier: sum(n.values()) for tier, n in found["tokens"].items()}


def free_of(server):
    return server.request("/sessions")["summary"]["device"]["free"]


def prompt_tokens(reply):
    usage = reply["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def settle(server, session, messages, **fields):
    """One inference, over by now."""
    chat(server, messages, session, **fields)
    assert free_of(server) > 0


def test_evict_from_a_message_on_frees_the_rest_and_keeps_what_is_before(server):
    messages = turns(*LONG)
    settle(server, "s", messages)
    sibling = [*messages[:2], {"role": "assistant", "content": "Another way."}]
    chat(server, [*sibling, {"role": "user", "content": "Go on."}], "sibling")
    free, held = free_of(server), tokens_of(server, "s")["device"]

    (action,) = edit(server, messages, "s", cut("evict", "messages", 3, len(messages)))

    freed = action["tokens"]["device"]
    start, end = action["span"]
    assert action["status"] == "done" and freed == end - start > 0
    assert action["tokens"]["host"] == freed
    assert free_of(server) - free == freed
    assert tokens_of(server, "s")["device"] == held - freed == start
    total, cached = prompt_tokens(chat(server, messages, "s"))
    assert cached == start < total
    total, cached = prompt_tokens(chat(server, [*sibling, *turns("Go on.")[1:]], "sibling"))
    assert cached == total - 1


def test_the_next_turn_after_compression_computes_only_what_is_new(server):
    messages = turns(*LONG)
    settle(server, "s", messages)
    (action,) = edit(server, messages, "s", cut("evict", "messages", 2, len(messages)))
    compressed = [*messages[:2], *turns("A summary.", "Go on.")[1:]]
    compressed[2]["role"], compressed[3]["role"] = "assistant", "user"
    _, cached = prompt_tokens(chat(server, compressed, "s"))
    assert cached >= action["span"][0] > 0


def test_evict_of_tools_takes_all_that_follows(server):
    messages = turns(*LONG[:2], "And now?")
    settle(server, "s", messages, tools=TOOLS)
    free = free_of(server)
    (action,) = edit(server, messages, "s", cut("evict", "tools", 1), tools=TOOLS)
    start, _ = action["span"]
    assert action["status"] == "done" and free_of(server) - free == action["tokens"]["device"]
    assert tokens_of(server, "s")["device"] == start
    _, cached = prompt_tokens(chat(server, messages, "s", tools=TOOLS[:1]))
    assert cached == start


def test_what_only_others_use_stays(server):
    """A range that another live session uses too frees nothing of it."""
    messages = turns(*LONG[:3])
    settle(server, "a", messages)
    chat(server, messages, "b")
    (action,) = edit(server, messages, "a", cut("evict", "messages", 2))
    assert action["tokens"]["device"] <= 8
    total, cached = prompt_tokens(chat(server, messages, "b"))
    assert cached == total - 1


@pytest.mark.parametrize("release", ["now", "lazy"])
def test_offload_of_a_range_and_its_way_back(server, release):
    messages = turns(*LONG)
    settle(server, "s", messages)
    before, free = tokens_of(server, "s"), free_of(server)
    (action,) = edit(server, messages, "s", cut("offload", "messages", 3, release=release))
    start, end = action["span"]
    after = tokens_of(server, "s")
    assert action["status"] == "done" and after["host"] == before["host"]
    gone = end - start if release == "now" else 0
    assert before["device"] - after["device"] == gone == free_of(server) - free
    (back,) = edit(server, messages, "s", cut("prefetch", "messages", 3))
    assert back["status"] == "done"
    assert tokens_of(server, "s")["device"] == before["device"]
    total, cached = prompt_tokens(chat(server, messages, "s"))
    assert cached == total - 1


def test_a_range_that_stops_short_is_clipped_and_says_where(server):
    messages = turns(*LONG)
    settle(server, "s", messages)
    (action,) = edit(server, messages, "s", cut("evict", "messages", 2, 3))
    assert (action["status"], action["reason"]) == ("clipped", "what_follows_too")
    assert tokens_of(server, "s")["device"] == action["span"][0]


def test_the_answer_comes_first_then_the_edit(server):
    messages = turns(*LONG[:3])
    reply = chat(server, messages, "s", cut("evict", "messages", 3, len(messages)))
    assert reply["usage"]["completion_tokens"] == 4
    actions = outcomes(server, reply["kv_hints"]["message_id"])
    assert [a["action_type"] for a in actions] == ["session.bind", "session.evict"]
    start = actions[1]["span"][0]
    assert actions[1]["status"] == "done" and tokens_of(server, "s")["device"] == start
    assert 0 < start < reply["usage"]["prompt_tokens"]


def test_a_streams_edit_follows_it_too(server):
    messages = turns(*LONG[:3])
    events = chat(server, messages, "s", cut("evict", "messages", 3), stream=True)
    datas = [line.removeprefix("data: ") for line in events.split("\n\n") if line]
    (kv_hints,) = [found for data in datas[:-1] if (found := json.loads(data).get("kv_hints"))]
    assert outcomes(server, kv_hints["message_id"])[1]["status"] == "done"


def test_both_doors_do_the_same(server):
    """agent_hint, kv_hints with an inference, POST /kv_hints: the same span."""
    messages = turns(*LONG)
    settle(server, "s", messages)
    (first,) = edit(server, messages, "s", cut("evict", "messages", 3))
    settle(server, "s", messages)
    payload = {"session_id": "s", "target": "messages", "start": 3}
    action = {"action_id": "e", "action_type": "session.evict", "action_version": "0.1"}
    envelope = {"protocol_version": "0.1", "actions": [action | {"payload": payload}]}
    posted = envelope | {"message_id": "posted", "messages": messages, "model": "sam"}
    assert server.request("/kv_hints", posted)["actions"][0]["status"] == "accepted"
    (second,) = outcomes(server, "posted")
    reply = chat(server, messages, "s", kv_hints=envelope | {"message_id": "beside"})
    assert reply["kv_hints"]["message_id"] == "beside"
    third = outcomes(server, "beside")[-1]
    assert [a["status"] for a in (first, second, third)] == ["done"] * 3
    assert first["span"] == second["span"] == third["span"]


def test_token_ranges_on_generate(server):
    prompt = list(range(100, 400))
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    hint = {"session_id": "t"}
    server.request("/generate", body | {"agent_hint": hint})
    management = {"manage_request": True, "edits": [cut("evict", "tokens", 120)]}
    reply = server.request("/generate", {"agent_hint": hint | {"context_management": management}})
    (action,) = outcomes(server, reply["meta_info"]["kv_hints"]["message_id"])
    assert action["status"] in ("done", "clipped") and tokens_of(server, "t")["device"] <= 300
    bad = {"manage_request": True, "edits": [cut("evict", "messages", 1)]}
    reply = server.request("/generate", {"agent_hint": hint | {"context_management": bad}})
    (action,) = reply["meta_info"]["kv_hints"]["actions"]
    assert (action["status"], action["reason"]) == ("rejected", "unsupported_target")


@pytest.mark.parametrize("path", ["/release_kv_cache", "/v1/release_kv_cache"])
def test_release_mode_evicts_from_the_index_on(server, path):
    messages = turns(*LONG[:3])
    salted = {"cache_salt": "salted", "cache_sharing": True}
    chat(server, messages, **salted)
    held = tokens_of(server, "salted")["device"]
    body = {"model": "sam", "messages": messages, "messages_released_index": 2, **salted}
    message_id = server.request(path, body)["kv_hints"]["message_id"]
    (action,) = outcomes(server, message_id, "?cache_salt=salted")
    assert action["status"] == "done" and action["tokens"]["device"] > 0
    left = tokens_of(server, "salted")["device"]
    assert left == held - action["tokens"]["device"] == action["span"][0]
    _, cached = prompt_tokens(chat(server, messages, **salted))
    assert cached == left


def test_ranges_that_cannot_be_served_are_answered(server):
    messages = turns(*LONG[:2])
    settle(server, "s", messages)
    cases = [
        ([cut("evict", "messages", 9)], "s", ("rejected", "empty_range")),
        ([cut("evict", "messages", 2)], "nobody", ("missing", "unknown_session")),
        ([cut("evict", "tools", 0)], "s", ("rejected", "empty_range")),
    ]
    for edits, session, expected in cases:
        (action,) = edit(server, messages, session, *edits)
        assert (action["status"], action["reason"]) == expected
    other = turns("This conversation never ran here.", "Yes.", "No.")
    (action,) = edit(server, other, "s", cut("evict", "messages", 3))
    assert (action["status"], action["reason"]) == ("missing", "not_cached")


def test_strict_hints_are_refused_with_the_reason(server_args):
    args = server_args("--radix-cache-backend", "sam", "--sam-strict-hints", hicache=False)
    bad = cut("evict", "messages", 3, 3)
    with ServerProcess(args, env=STRICT_ENV) as strict:
        messages = turns("Hello.")
        for manage_request in (True, False):
            with pytest.raises(urllib.error.HTTPError) as error:
                chat(strict, messages, "s", bad, manage_request=manage_request)
            assert error.value.code == 400 and "bad_range" in error.value.read().decode()
        released = {"messages": messages, "messages_released_index": -1, "cache_salt": "x"}
        with pytest.raises(urllib.error.HTTPError) as error:
            strict.request("/release_kv_cache", released)
        assert error.value.code == 400
        assert chat(strict, messages, "s")["usage"]["completion_tokens"] == 4
