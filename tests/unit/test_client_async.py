"""sam.client on an asynchronous client, and what it learns about tools."""

import asyncio
import math

import pytest
from openai import AsyncOpenAI, OpenAI

from sam.client import AgentSessions, Timing, ToolTimes
from sam.client.hint import with_hint
from sam.client.sender import MAX_WAITING
from sam.core.hints import parse_agent_hint
from tests.unit.client_endpoint import endpoint

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def server():
    with endpoint() as server:
        yield server
        for hint in server.hints:
            assert parse_agent_hint(hint).unknown_keys == ()


def run(server, work, **options):
    async def main():
        async with AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
            sam = AgentSessions(client, **options)
            await work(sam)
            return sam

    return asyncio.run(main())


def test_a_whole_life(server):
    async def work(sam):
        async with sam.session("task") as task:
            answer = await task.acreate(**ASK)
            assert answer.choices[0].message.content == "hello"
            async with task.child("x") as child:
                await child.acreate(**ASK)
                async with child.tool("t", expected_s=2):
                    pass
            stream = await task.acreate(**ASK, stream=True)
            texts = [chunk.choices[0].delta.content async for chunk in stream]
            assert "".join(texts) == "hello"

    sam = run(server, work)
    assert server.managed()[0][:2] == ("task:x", "")
    assert server.managed()[1:] == [("task:x", "evict", None), ("task", "evict", None)]
    assert sam.stats.answered == 3


def test_hints_of_a_session_keep_their_order(server):
    async def work(sam):
        for i in range(20):
            session = sam.session(f"s{i % 4}")
            session.offload()
            session.resume()
        assert await sam.aflush()

    run(server, work)
    for i in range(4):
        edits = [e for s, e, _ in server.managed() if s == f"s{i}"]
        assert edits == ["offload", "prefetch"] * 5


def test_hints_from_a_thread_without_a_loop(server):
    async def work(sam):
        session = sam.session("s")
        await session.acreate(**ASK)
        await asyncio.to_thread(session.offload)
        assert await sam.aflush()

    run(server, work)
    assert server.managed() == [("s", "offload", None)]


def test_without_any_loop_a_hint_is_counted_as_dropped():
    client = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="k")
    sam = AgentSessions(client)
    sam.session("s").offload()
    assert sam.stats.dropped == 1


def test_a_slow_server_holds_nobody_up(server):
    async def work(sam):
        server.delay_s = 5.0
        async with sam.session("s") as session:
            session.offload()
        assert await sam.aflush()

    sam = run(server, work, timing=Timing(request_timeout_s=0.1))
    assert sam.stats.failed == 2


def test_a_cancelled_tool_teaches_nothing(server):
    async def work(sam):
        async def tool():
            async with sam.session("s").tool("cancelled"):
                await asyncio.sleep(60)

        task = asyncio.create_task(tool())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ValueError):
            async with sam.session("s").tool("failed"):
                raise ValueError

    assert list(run(server, work).tool_times.estimates()) == ["failed"]


def test_tool_times_follow_and_forgive_outliers():
    times = ToolTimes({"pytest": 10.0})
    times.learn("pytest", 3600.0)
    assert 10 < times.estimate_s("pytest") < 100
    for _ in range(30):
        times.learn("pytest", 20.0)
    assert times.estimate_s("pytest") == pytest.approx(20, rel=0.01)
    assert times.estimate_s("other") is None


def test_tool_times_survive_nonsense_and_many_names():
    times = ToolTimes()
    for seconds in (math.nan, math.inf, -1.0):
        times.learn("odd", seconds)
    assert times.estimates() == {}
    for i in range(3_000):
        times.learn(f"tool-{i}", 1.0)
    estimates = times.estimates()
    assert len(estimates) == 1_024 and "tool-2999" in estimates
    assert ToolTimes(estimates).estimates() == pytest.approx(estimates)


def test_hints_do_not_pile_up_before_a_server_that_is_too_slow(server):
    async def work(sam):
        server.delay_s = 0.5
        for _ in range(MAX_WAITING + 50):
            sam.session("s").offload()
        assert sam.stats.dropped == 50

    run(server, work)


def test_a_client_of_the_other_kind(server):
    """Mixing the two up costs no answer, and what cannot work says so."""

    async def blocking():
        with OpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
            sam = AgentSessions(client)
            async with sam.session("s") as session:
                answer = await session.acreate(**ASK)
                session.offload()
            assert await sam.aflush()
            return answer

    async def work(sam):
        answer = await sam.session("t").create(**ASK)
        assert answer.choices[0].message.content == "hello"
        with pytest.raises(TypeError, match="aflush"):
            sam.flush()

    assert asyncio.run(blocking()).choices[0].message.content == "hello"
    assert server.managed() == [("s", "offload", None), ("s", "evict", None)]
    run(server, work)


def test_an_extra_body_that_is_no_object_is_the_client_s_own_affair():
    assert with_hint({"extra_body": [1]}, {"session_id": "s"}) == {"extra_body": [1]}
