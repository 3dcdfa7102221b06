"""`Model.invoke/stream/evict_kvc/offload_kvc/prefetch_kvc` of the real client, every target."""

import threading
import time

import pytest

from tests.client.conftest import OLD

SYSTEM = "You are one of several careful agents. " * 30
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something with care",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read_file", "search", "run_tests")
]


def talk(*texts):
    """A window: system, then user and assistant in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": SYSTEM}, *turns]


def window(topic, turns=5):
    return talk(*(f"{topic} {i}: " + "some words of this turn " * 12 for i in range(turns)))


def key(sid, name="s", parent="team"):
    return {"session_id": f"{sid}:{name}", "parent_session_id": f"{sid}:{parent}"}


def cached(answer):
    return answer["usage"]["cache_tokens"]


def prompt(answer):
    return answer["usage"]["input_tokens"]


def only_action(server, client):
    """The single edit of the one management request since the last look."""
    (told,) = client("told")
    (action,) = server.outcomes([told])
    return action


def test_invoke_and_stream_belong_to_the_session(server, client, sid):
    answer = client("invoke", messages=window("a"), **key(sid))
    streamed = client("stream", messages=window("a"), **key(sid))
    assert streamed["text"] == answer["text"]
    session = server.sessions()[f"{sid}:s"]
    assert (session["parent_session_id"], session["state"]) == (f"{sid}:team", "idle")
    assert session["tokens"]["device"]["private"] >= prompt(answer)
    assert server.sessions()[f"{sid}:team"]["state"] == "named"


def test_a_stream_that_is_left_early_leaves_no_running_session(server, client, sid):
    kwargs = {"max_tokens": 400, "stop_after": 2}
    client("stream", messages=window("left"), **key(sid), **kwargs)
    deadline = time.monotonic() + 20
    while server.sessions()[f"{sid}:s"]["n_running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    client("invoke", messages=window("left"), **key(sid))
    assert server.settled()["device"]["protected"] == 0


def test_evict_frees_what_only_the_session_used(server, client, sid):
    client("invoke", messages=window("stays"), **key(sid, "stays"))
    client("invoke", messages=window("goes"), **key(sid, "goes"))
    private = server.device(f"{sid}:goes")["private"]
    before = server.settled()["device"]
    client("told")
    assert client("kvc", action="evict", **key(sid, "goes")) is True
    action = only_action(server, client)
    assert (action["status"], action["tokens"]["device"]) == ("done", private)
    after = server.summary()["device"]
    assert private > 0 and after["free"] - before["free"] == private
    assert server.sessions()[f"{sid}:goes"]["state"] == "ended"


def test_a_sibling_finds_the_shared_prefix_untouched(server, client, sid):
    first = client("invoke", messages=window("one"), tools=TOOLS, **key(sid, "one"))
    client("invoke", messages=window("two"), tools=TOOLS, **key(sid, "two"))
    shared = server.device(f"{sid}:two")["shared"]
    assert shared > 500
    assert client("kvc", action="evict", **key(sid, "two")) is True
    server.settled()
    again = client("invoke", messages=window("one"), tools=TOOLS, **key(sid, "one"))
    assert again["text"] == first["text"]
    assert cached(again) == prompt(again) - 1
    third = client("invoke", messages=window("three"), tools=TOOLS, **key(sid, "three"))
    assert cached(third) >= shared


def test_an_offloaded_session_comes_back_from_the_host(server, client, sid):
    first = client("invoke", messages=window("down"), **key(sid))
    total = server.device(f"{sid}:s")["private"]
    client("told")
    assert client("kvc", action="offload", **key(sid)) is True
    assert only_action(server, client)["status"] == "done"
    assert server.host(f"{sid}:s")["private"] == total
    assert server.sessions()[f"{sid}:s"]["state"] == "offloaded"
    server.press()
    assert server.device(f"{sid}:s")["private"] == 0
    host_hits = server.hit_tokens("host")
    again = client("invoke", messages=window("down"), **key(sid))
    assert again["text"] == first["text"]
    assert cached(again) == prompt(again) - 1
    assert server.hit_tokens("host") - host_hits == prompt(again) - 1


def test_a_prefetched_session_is_on_the_device_when_it_resumes(server, client, sid):
    first = client("invoke", messages=window("up"), **key(sid))
    total = server.device(f"{sid}:s")["private"]
    assert client("kvc", action="offload", **key(sid)) is True
    server.press()
    client("told")
    assert client("kvc", action="prefetch", **key(sid)) is True
    action = only_action(server, client)
    assert (action["status"], action["tokens"]["device"]) == ("done", total)
    assert server.device(f"{sid}:s")["private"] == total
    before = {tier: server.hit_tokens(tier) for tier in ("device", "host")}
    again = client("invoke", messages=window("up"), **key(sid))
    assert again["text"] == first["text"]
    assert server.hit_tokens("device") - before["device"] == prompt(again) - 1
    assert server.hit_tokens("host") == before["host"]


def test_a_session_nobody_knows_is_no_error(server, client, sid):
    for action in ("prefetch", "offload", "evict"):
        assert client("kvc", action=action, **key(sid, "after-restart", "after-restart")) is True
        assert only_action(server, client)["status"] == "missing"


def test_a_team_that_only_its_members_know_is_released_as_a_whole(server, client, sid):
    free = server.settled()["device"]["free"]
    client("invoke", messages=window("m1"), **key(sid, "m1"))
    client("invoke", messages=window("m2"), **key(sid, "m2", "m1"))
    assert client("kvc", action="evict", **key(sid, "team")) is True
    assert server.settled()["device"]["free"] == free
    assert {server.sessions()[f"{sid}:{m}"]["state"] for m in ("m1", "m2")} == {"ended"}


def test_an_evicted_id_is_used_again(server, client, sid):
    for turn in range(3):
        answer = client("invoke", messages=window(f"round {turn}"), **key(sid))
        assert answer["usage"]["output_tokens"] > 0
        assert client("kvc", action="evict", **key(sid)) is True
        server.settled()
        assert server.sessions()[f"{sid}:s"]["state"] == "ended"


@pytest.mark.parametrize("action", ["evict", "offload", "prefetch"])
@pytest.mark.parametrize("target", ["messages", "tools", "messages and tools"])
def test_every_range_is_answered_in_the_clients_time(server, client, sid, action, target):
    """Within 1.5 s, whatever becomes of it: else the client never sends one again."""
    body = {"messages": window("range"), "tools": TOOLS, **key(sid, f"{action}-{target[:3]}")}
    client("invoke", **body)
    client("told")
    assert client("kvc", action=action, **body, **_range(target)) is True
    told = client("told")
    n_edits = 2 if " and " in target else 1
    assert len(told) == 1 and len(told[0]["actions"]) == n_edits


@pytest.mark.parametrize("action", ["evict", "offload", "prefetch"])
@pytest.mark.parametrize("target", ["messages", "tools", "messages and tools"])
def test_every_range_is_carried_out(server, client, sid, action, target):
    body = {"messages": window("range"), "tools": TOOLS, **key(sid, f"{action}-{target[:3]}")}
    client("invoke", **body)
    client("told")
    client("kvc", action=action, **body, **_range(target))
    for outcome in server.outcomes(client("told")):
        assert outcome["status"] in ("done", "clipped") or outcome["reason"] == "already_on_device"


def test_evicted_messages_are_freed_from_the_first_changed_one_on(server, client, sid):
    body = {"messages": window("compress", 7), **key(sid)}
    first = client("invoke", **body)
    before = server.device(f"{sid}:s")["private"]
    client("told")
    span = {"target": "messages", "msg_start": 2, "msg_end": len(body["messages"])}
    assert client("kvc", action="evict", **body, **span) is True
    action = only_action(server, client)
    assert action["status"] in ("done", "clipped") and action["tokens"]["device"] > 200
    after = server.device(f"{sid}:s")["private"]
    assert before - after == action["tokens"]["device"]
    again = client("invoke", **body)
    assert again["text"] == first["text"]
    assert after - 1 <= cached(again) <= after


def test_evicted_tools_take_everything_after_them_along(server, client, sid):
    body = {"messages": window("tools"), "tools": TOOLS, **key(sid)}
    client("invoke", **body)
    span = {"target": "tools", "tools_start": 0, "tools_end": len(TOOLS)}
    client("told")
    assert client("kvc", action="evict", **body, **span) is True
    assert only_action(server, client)["status"] in ("done", "clipped")
    left = server.device(f"{sid}:s")
    assert left["private"] + left["shared"] < prompt(client("invoke", **body)) / 2


def test_a_tail_attachment_is_answered_first_and_evicted_then(server, client, sid):
    """`manage_request: false` with the last message: the attachment does not stay."""
    messages = window("attached", 4) + [{"role": "user", "content": "the attachment " * 40}]
    client("told")
    answer = client(
        "invoke",
        messages=messages,
        **key(sid),
        kv_action="evict",
        target="messages",
        manage_request=False,
        msg_start=len(messages) - 1,
        msg_end=len(messages),
    )
    assert answer["text"]
    bind, edit = server.outcomes(client("told"))
    assert bind["status"] == "done" and edit["status"] in ("done", "clipped")
    assert server.device(f"{sid}:s")["private"] < prompt(answer) - 60


def test_a_tail_attachment_never_fails_the_inference(client, sid):
    messages = window("attached", 4)
    span = {"msg_start": len(messages) - 1, "msg_end": len(messages)}
    edit = {"kv_action": "evict", "target": "messages", "manage_request": False, **span}
    assert client("invoke", messages=messages, **key(sid), **edit)["usage"]["output_tokens"] > 0


def test_management_keeps_the_clients_deadlines_while_the_server_is_busy(server, client, sid):
    """The client measures: an action that is late raises in it."""
    body = {"text": "work", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    work = [threading.Thread(target=server.request, args=("/generate", body)) for _ in range(12)]
    for thread in work:
        thread.start()
    messages = window("busy")
    for i in range(10):
        for action in ("offload", "prefetch", "evict"):
            assert client("kvc", action=action, **key(sid, f"s{i % 3}")) is True
        span = {"target": "messages", "msg_start": 1, "msg_end": len(messages)}
        assert client("kvc", action="evict", messages=messages, **key(sid), **span) is True
    still_busy = any(thread.is_alive() for thread in work)
    for thread in work:
        thread.join()
    assert still_busy, "the server was done before the management requests were"


def test_ordered_signals_of_the_older_client(server, client, sid):
    if client.version != OLD:
        pytest.skip("the newer client has a runtime instead")
    first = client("invoke", messages=window("signals"), **key(sid))
    client("told")
    assert client("signals", actions=["offload", "prefetch"], **key(sid)) == [True, True]
    actions = server.outcomes(client("told"))
    assert [action["action_type"] for action in actions] == ["session.demote", "session.prefetch"]
    again = client("invoke", messages=window("signals"), **key(sid))
    assert cached(again) == prompt(first) - 1


def _range(target):
    messages = {"msg_start": 2, "msg_end": 6}
    tools = {"tools_start": 1, "tools_end": len(TOOLS)}
    if target == "messages":
        return {"target": "messages", **messages}
    if target == "tools":
        return {"target": "tools", **tools}
    return {"target": "messages", "include_tools": True, **messages, **tools}
