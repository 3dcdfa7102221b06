"""sam.client with the real OpenAI SDK against a real server: what its hints do there."""

import asyncio
import time

import pytest
from openai import AsyncOpenAI, OpenAI

from sam.client import AgentSessions, Timing, ToolTimes
from sam.testing.random_swarm import settled_summary
from sam.testing.server import ServerProcess
from tests.e2e.conftest import STRICT_ENV

pytestmark = pytest.mark.e2e
SYSTEM = {"role": "system", "content": "You are one of several careful agents. " * 40}
PATIENT = Timing(request_timeout_s=10.0)


@pytest.fixture(scope="module")
def server(server_args):
    args = server_args("--radix-cache-backend", "sam", total_tokens=8_192)
    with ServerProcess(args, env=STRICT_ENV) as process:
        yield process
        assert settled_summary(process)["errors"] == 0
        assert "Traceback" not in process.log_text()


@pytest.fixture
def sam(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="sk-client", max_retries=0) as client:
        yield AgentSessions(client, timing=PATIENT)


def ask(text):
    return {
        "model": "sam",
        "messages": [SYSTEM, {"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
    }


def session_of(server, session_id):
    settled_summary(server)
    sessions = server.request("/sessions?limit=1000")["sessions"]
    return next(s for s in sessions if s["session_id"] == session_id)


def cached_tokens(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


def test_the_life_of_a_task(server, sam):
    free = settled_summary(server)["device"]["free"]
    with sam.session("life") as task:
        first = task.create(**ask("plan"))
        with task.child("coder") as coder:
            coder.create(**ask("write it"))
            assert session_of(server, "life:coder")["parent_session_id"] == "life"
            coder.offload()
            assert sam.flush()
            assert session_of(server, "life:coder")["state"] == "offloaded"
            coder.resume()
            assert sam.flush()
            assert session_of(server, "life:coder")["tokens"]["device"]["private"] > 0
        assert sam.flush()
        assert session_of(server, "life:coder")["state"] == "ended"
        again = task.create(**ask("plan"))
        assert again.choices[0].message == first.choices[0].message
        assert cached_tokens(again) == again.usage.prompt_tokens - 1
    assert sam.flush()
    assert session_of(server, "life")["state"] == "ended"
    assert settled_summary(server)["device"]["free"] == free
    assert (sam.stats.answered, sam.stats.failed) == (4, 0)


def test_the_end_of_a_root_ends_what_is_below(server, sam):
    with sam.session("root") as root:
        for name in ("a", "b"):
            root.child(name).create(**ask(name))
        root.child("a").child("deep").create(**ask("deep"))
    assert sam.flush()
    states = {session_of(server, s)["state"] for s in ("root:a", "root:b", "root:a:deep")}
    assert states == {"ended"}


def test_a_long_tool_moves_the_session_down_and_back(server, sam):
    timing = Timing(min_wait_s=0.1, offload_after_s=0.5, lead_s=0.7, request_timeout_s=10)
    sam = AgentSessions(sam_client(server), timing=timing, tool_times=ToolTimes({"build": 1.5}))
    task, before = sam.session("tool"), n_expected(server)
    task.create(**ask("build it"))
    seen = []
    with task.tool("build"):
        until = time.monotonic() + 10
        while seen[-1:] != ["resuming"] and time.monotonic() < until:
            state = session_of(server, "tool")["state"]
            if seen[-1:] != [state]:
                seen.append(state)
            time.sleep(0.02)
    assert seen[-2:] == ["offloaded", "resuming"]
    answer = task.create(**ask("build it"))
    assert cached_tokens(answer) == answer.usage.prompt_tokens - 1
    assert sam.stats.failed == 0
    assert n_expected(server) == before + 1


def n_expected(server):
    return settled_summary(server)["actions"].get("session.expect:done", 0)


def sam_client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="sk-client", max_retries=0)


def test_answers_are_those_without_a_session(server, sam):
    plain = sam_client(server).chat.completions.create(**ask("the same?"))
    with sam.session("same") as task:
        hinted = task.create(**ask("the same?"), expected_idle_s=3)
        stream = task.create(**ask("the same?"), stream=True)
        text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert hinted.choices[0].message == plain.choices[0].message
    assert text == plain.choices[0].message.content


def test_many_async_sessions(server):
    async def agent(sam, i):
        async with sam.session("swarm").child(str(i)) as session:
            answer = await session.acreate(**ask(f"task {i % 3}"))
            async with session.tool("short", expected_s=0.6):
                await asyncio.sleep(0)
            return answer.choices[0].message.content

    async def main():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sk-client") as client:
            sam = AgentSessions(client, timing=PATIENT)
            answers = await asyncio.gather(*(agent(sam, i) for i in range(12)))
            assert await sam.aflush(20)
            return answers, sam.stats

    answers, stats = asyncio.run(main())
    assert len(set(answers)) <= 3
    assert stats.failed == 0 and stats.answered == 24
    assert {session_of(server, f"swarm:{i}")["state"] for i in range(12)} == {"ended"}


def test_a_server_without_sam_refuses_and_the_agent_goes_on(server_args):
    with ServerProcess(server_args(hicache=False)) as stock:
        sam = AgentSessions(sam_client(stock), timing=PATIENT)
        with sam.session("s") as task:
            assert task.create(**ask("hello")).usage.completion_tokens == 4
            for _ in range(5):
                task.offload()
            assert sam.flush()
            assert task.create(**ask("hello")).usage.completion_tokens == 4
    assert sam.stats.answered == 0 and sam.stats.failed == 3
