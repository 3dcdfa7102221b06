"""sam.client on an asynchronous client: hints taken back, and one client on many loops."""

import asyncio
from types import SimpleNamespace

import pytest

from sam.client import AgentSessions
from sam.client.sender import MAX_WAITING

ASK = {"model": "m", "messages": []}


@pytest.fixture
def sent():
    return []


@pytest.fixture
def sam(sent):
    """On a client that answers at once: what counts here never leaves the process."""

    async def create(**kwargs):
        sent.append(kwargs["extra_body"]["agent_hint"])
        return "answer"

    completions = SimpleNamespace(create=create)
    return AgentSessions(SimpleNamespace(chat=SimpleNamespace(completions=completions)))


async def plan_a_prefetch(sam, name):
    session = sam.session(name)
    await session.acreate(**ASK)
    async with session.tool("t", expected_s=3_600):
        pass
    return session


def evicted(sent):
    edits = [(h["session_id"], h.get("context_management", {}).get("edits")) for h in sent]
    return [id for id, found in edits if found and found[0]["type"] == "evict"]


def test_prefetches_taken_back_leave_room(sam, sent):
    async def work():
        for i in range(MAX_WAITING + 50):
            session = await plan_a_prefetch(sam, f"s{i}")
            await session.acreate(**ASK)
            await asyncio.sleep(0)
        sam.session("q").end()
        assert await sam.aflush()
        timers = [t for t in asyncio.get_running_loop()._scheduled if not t.cancelled()]
        assert len(timers) < 5

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(work())
    assert sam.stats.dropped == 0 and evicted(sent) == ["q"]


def test_prefetches_not_taken_back_still_count(sam):
    async def work():
        held = []
        for i in range(MAX_WAITING + 50):
            held.append(await plan_a_prefetch(sam, f"s{i}"))
            await sam.aflush()

    asyncio.run(work())
    assert sam.stats.dropped > 50


def test_a_prefetch_is_taken_back_from_a_thread(sam, sent):
    async def work():
        for i in range(20):
            session = await plan_a_prefetch(sam, f"s{i}")
            await asyncio.to_thread(session.end)
        await asyncio.sleep(0)
        assert await sam.aflush()
        assert not sam._sender._here().waiting

    asyncio.run(work())
    assert len(evicted(sent)) == 20 and sam.stats.dropped == 0


def test_a_loop_that_is_over_takes_no_room_on_the_next(sam, sent):
    held = []
    for i in range(MAX_WAITING + 10):

        async def work(name=f"s{i}"):
            held.append(await plan_a_prefetch(sam, name))

        asyncio.run(work())

    async def last():
        for session in held:
            session.end()
            await sam.aflush()

    asyncio.run(last())
    assert sam.stats.dropped == 0 and len(evicted(sent)) == len(held)
    assert len(sam._sender._states) == 1


def test_flush_asks_only_its_own_loop(sam):
    """A loop closed with its tasks unfinished leaves nothing for another to wait for."""
    loop = asyncio.new_event_loop()

    async def ask():
        sam.session("s").end()

    loop.run_until_complete(ask())
    loop.close()
    assert asyncio.run(sam.aflush(1.0))
