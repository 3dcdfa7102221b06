"""The tool wait on a real server: a model that is made to call a tool by its grammar."""

import json
import time

import pytest
from openai import OpenAI

from sam.testing.server import ServerProcess
from tests.e2e.conftest import STRICT_ENV

pytestmark = pytest.mark.e2e


def tool(name):
    parameters = {
        "type": "object",
        "properties": {"fast": {"type": "boolean"}},
        "required": ["fast"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather"), tool("search")]
NAMED = {"type": "function", "function": {"name": "search"}}


@pytest.fixture(scope="module")
def server(server_args):
    args = server_args("--radix-cache-backend", "sam", "--tool-call-parser", "qwen25")
    with ServerProcess(args, env=STRICT_ENV) as process:
        yield process
        assert process.request("/sessions")["summary"]["errors"] == 0
        assert "Traceback" not in process.log_text()


@pytest.fixture
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="sk-test", max_retries=0)


def ask(client, session, choice, *, stream=False, text="What is the weather?", **extra):
    """The grammar makes the call; the stop string ends it, as this model never would."""
    extra |= {"no_stop_trim": True}
    if session:
        extra["agent_hint"] = {"session_id": session}
    return client.chat.completions.create(
        model="sam",
        messages=[{"role": "user", "content": text}],
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=200,
        stop=["</tool_call>"],
        temperature=0,
        stream=stream,
        extra_body=extra,
    )


def called(answer, stream):
    """(finish reason, name of the first call) as the client sees it."""
    if not stream:
        choice = answer.choices[0]
        return choice.finish_reason, choice.message.tool_calls[0].function.name
    name = finish = None
    for chunk in answer:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                name = name or call.function.name
            finish = choice.finish_reason or finish
    return finish, name


def session_of(server, session_id):
    sessions = server.request("/sessions?limit=1000")["sessions"]
    return next(s for s in sessions if s["session_id"] == session_id)


def soon(server, session_id, **expected):
    """The session, once it is as expected."""
    deadline = time.monotonic() + 10
    while True:
        session = session_of(server, session_id)
        found = {name: session.get(name) for name in expected}
        if found == expected:
            return session
        assert time.monotonic() < deadline, json.dumps(session)
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_tool_call_marks_the_wait_with_the_tools_name(server, client, stream, choice):
    name = f"s-{stream}-{choice if isinstance(choice, str) else 'named'}"
    finish, tool_name = called(ask(client, name, choice, stream=stream), stream)
    assert finish == "tool_calls" and tool_name in ("weather", "search")
    soon(server, name, waiting_tool=True, tool_name=tool_name)


def test_the_next_request_ends_the_wait(server, client):
    finish, tool_name = called(ask(client, "next", NAMED), False)
    assert (finish, tool_name) == ("tool_calls", "search")
    soon(server, "next", waiting_tool=True, tool_name="search")
    answer = ask(client, "next", "none", text="What is the weather? Thank you.")
    assert answer.choices[0].finish_reason in ("stop", "length")
    soon(server, "next", waiting_tool=False)


def test_other_ways_to_name_a_session_count_too(server, client):
    for field in ("prompt_cache_key", "session_id"):
        answer = ask(client, None, NAMED, stream=True, **{field: f"by-{field}"})
        assert called(answer, True) == ("tool_calls", "search")
        soon(server, f"by-{field}", waiting_tool=True, tool_name="search")


def test_without_a_session_nothing_is_told(server, client):
    before = server.request("/sessions")
    assert called(ask(client, None, NAMED), False) == ("tool_calls", "search")
    after = server.request("/sessions")
    assert len(after["sessions"]) == len(before["sessions"])
