"""The page's copy of the scheduler: how often it asks, what each viewer gets."""

import asyncio
import json
import shutil
import subprocess

import msgspec
import pytest

pytest.importorskip("sglang")

from sam import web
from sam.srt.entrypoints import page_feed
from sam.srt.entrypoints.page_feed import INTERVAL_S, MAX_WATCHED, MAX_WATCHES, PageFeed


class Scheduler:
    """Answers as `page_report` does, from what the test says."""

    def __init__(self):
        self.asked, self.sessions, self.gone, self.events = [], {}, [], []
        self.epoch, self.seq, self.series, self.gate = "a", 0, [], None
        self.sweep_next, self.n_changed = 1, None

    def record(self, name, **fields):
        self.seq += 1
        self.sessions[name] = {"tenant": "t", "id": name, **fields}

    async def ask(self, **payload):
        self.asked.append(payload)
        if self.gate is not None:
            await self.gate.wait()
        return {
            "epoch": self.epoch,
            "seq": self.seq,
            "now_s": 100.0,
            "n_sessions": len(self.sessions),
            "sessions": list(self.sessions.values()),
            "n_changed": len(self.sessions) if self.n_changed is None else self.n_changed,
            "gone": [["t", name] for name in self.gone],
            "sweep_next": self.sweep_next,
            "first_event": payload["event"],
            "events": self.events[payload["event"] :],
            "series": self.series,
            "stories": [{"key": list(key), "events": [{"t": 1}]} for key in payload["watch"]],
            "summary": {"errors": 0},
            "device_total": 4096,
        }


class Viewer:
    def __init__(self, feed):
        self.feed, self.epoch, self.version, self.event = feed, "", 0, 0
        self.known, self.since = {}, 0

    async def look(self, watch=None):
        news = await self.feed.look(self.epoch, self.version, self.event, 0.0, watch, self.since)
        if news["epoch"] != self.epoch or news["afresh"]:
            self.known = {}
        self.since = news["since"]
        self.epoch, self.version = news["epoch"], news["version"]
        self.event = news["next_event"]
        for row in json.loads(msgspec.json.encode(news["sessions"])):
            self.known[row["id"]] = row
        for _, name in news["gone"]:
            self.known.pop(name, None)
        return news


@pytest.fixture
def rig():
    scheduler, now = Scheduler(), [0.0]
    feed = PageFeed(scheduler.ask, clock=lambda: now[0])

    def later(seconds=INTERVAL_S):
        now[0] += seconds

    return scheduler, feed, later


def test_nothing_is_asked_while_nobody_looks_and_once_a_second_for_all(rig):
    scheduler, feed, later = rig
    scheduler.record("s")
    assert not scheduler.asked

    async def watch():
        viewers = [Viewer(feed) for _ in range(20)]
        for _ in range(5):
            await asyncio.gather(*(viewer.look() for viewer in viewers))
            later(INTERVAL_S / 2)
        assert all(set(viewer.known) == {"s"} for viewer in viewers)

    asyncio.run(watch())
    assert len(scheduler.asked) == 3
    assert scheduler.asked[1]["seq"] == scheduler.seq and scheduler.asked[1]["epoch"] == "a"


def test_a_viewer_gets_what_changed_and_nothing_else(rig):
    scheduler, feed, later = rig

    async def watch():
        viewer = Viewer(feed)
        scheduler.record("a", state="idle")
        scheduler.record("b", state="idle")
        scheduler.events = [{"t": 1}]
        news = await viewer.look()
        assert len(news["sessions"]) == 2 and news["events"] == [{"t": 1}]
        later()
        scheduler.record("b", state="running")
        scheduler.events.append({"t": 2})
        news = await viewer.look()
        assert len(news["sessions"]) == 1 and news["events"] == [{"t": 2}]
        assert viewer.known["b"]["state"] == "running"
        later()
        scheduler.gone = ["a"]
        del scheduler.sessions["a"]
        await viewer.look()
        assert set(viewer.known) == {"b"} and not feed.knows(("t", "a"))

    asyncio.run(watch())


def test_many_rows_come_in_parts_that_are_all(rig, monkeypatch):
    scheduler, feed, later = rig
    monkeypatch.setattr(page_feed, "ROWS_PER_REPLY", 10)
    for i in range(35):
        scheduler.record(f"s{i}")

    async def watch():
        viewer, n_looks = Viewer(feed), 0
        while (await viewer.look())["more"]:
            n_looks += 1
        assert n_looks == 3 and len(viewer.known) == 35

    asyncio.run(watch())
    assert len(scheduler.asked) == 1


def test_a_busy_scheduler_is_told_and_old_news_shown(rig, monkeypatch):
    scheduler, feed, later = rig
    monkeypatch.setattr(page_feed, "PATIENCE_S", 0.01)
    scheduler.record("s")

    async def watch():
        viewer = Viewer(feed)
        await viewer.look()
        scheduler.gate = asyncio.Event()
        for seconds in (1.0, 2.0):
            later(seconds)
            news = await viewer.look()
        assert news["age_s"] == 3.0 and len(scheduler.asked) == 2
        scheduler.gate.set()
        await asyncio.sleep(0.01)
        assert (await viewer.look())["age_s"] == 0.0

        async def too_busy(**payload):
            raise TimeoutError

        feed._ask = too_busy
        later()
        assert (await viewer.look())["problem"] == "busy" and viewer.known

    asyncio.run(watch())


def test_nothing_known_and_no_answer_is_a_timeout():
    async def too_busy(**payload):
        raise TimeoutError

    with pytest.raises(TimeoutError):
        asyncio.run(PageFeed(too_busy).look("", 0, 0, 0.0, None))


def test_another_scheduler_starts_over(rig):
    scheduler, feed, later = rig

    async def watch():
        viewer = Viewer(feed)
        scheduler.record("old")
        await viewer.look()
        later()
        scheduler.sessions, scheduler.epoch = {}, "b"
        scheduler.record("new")
        await viewer.look()
        assert set(viewer.known) == {"new"}

    asyncio.run(watch())


def test_a_story_is_asked_for_while_somebody_reads_it(rig):
    scheduler, feed, later = rig
    scheduler.record("s")

    async def watch():
        viewer = Viewer(feed)
        assert (await viewer.look(watch=("t", "s")))["story"] == [{"t": 1}]
        for _ in range(7):
            later()
            await viewer.look()
        assert [len(payload["watch"]) for payload in scheduler.asked] == [1] * 5 + [0] * 3

    asyncio.run(watch())


def test_what_the_sweep_misses_twice_is_gone(rig):
    scheduler, feed, later = rig
    scheduler.sweep_next = 0

    async def watch():
        viewer = Viewer(feed)
        scheduler.record("kept")
        scheduler.record("lost")
        await viewer.look()
        del scheduler.sessions["lost"]
        for _ in range(3):
            later()
            await viewer.look()
        assert set(viewer.known) == {"kept"}

    asyncio.run(watch())


def test_the_last_bucket_is_replaced_not_repeated(rig):
    scheduler, feed, later = rig

    async def watch():
        viewer = Viewer(feed)
        scheduler.series = [{"t": 5.0, "prompt": 1}]
        await viewer.look()
        later()
        scheduler.series = [{"t": 5.0, "prompt": 4}, {"t": 10.0}]
        assert (await viewer.look())["series"] == scheduler.series

    asyncio.run(watch())
    assert scheduler.asked[1]["bucket_s"] == 5.0


def drop(scheduler, *names):
    scheduler.gone = list(names)
    for name in names:
        del scheduler.sessions[name]


def test_who_looked_long_ago_starts_afresh(rig, monkeypatch):
    scheduler, feed, later = rig
    monkeypatch.setattr(page_feed, "MAX_ROWS", 4)

    async def watch():
        asleep, awake = Viewer(feed), Viewer(feed)
        scheduler.record("old")
        scheduler.record("kept")
        await asleep.look()
        for step in range(6):
            later()
            scheduler.record(f"s{step}")
            await awake.look()
            later()
            drop(scheduler, f"s{step}", *(["old"] if step == 0 else []))
            assert not (await awake.look())["afresh"]
        assert set(asleep.known) == {"old", "kept"}
        assert (await asleep.look())["afresh"] and set(asleep.known) == {"kept"}
        assert not (await asleep.look())["afresh"]

    asyncio.run(watch())


def test_starting_afresh_ends_where_rows_come_in_parts(rig, monkeypatch):
    """The oldest rows changed long before what was forgotten; the first part ends there."""
    scheduler, feed, later = rig
    monkeypatch.setattr(page_feed, "MAX_ROWS", 8)
    monkeypatch.setattr(page_feed, "ROWS_PER_REPLY", 2)
    for i in range(5):
        scheduler.record(f"kept{i}")

    async def watch():
        await Viewer(feed).look()
        for step in range(20):
            scheduler.gone = []
            scheduler.record(f"s{step}")
            later()
            await Viewer(feed).look()
            drop(scheduler, f"s{step}")
            later()
            await Viewer(feed).look()
        viewer = Viewer(feed)
        answers = [await viewer.look()]
        drop(scheduler, "kept0")
        later()
        while answers[-1]["more"]:
            answers.append(await viewer.look())
        assert [news["afresh"] for news in answers] == [True, False, False]
        assert set(viewer.known) == {f"kept{i}" for i in range(1, 5)}

    asyncio.run(watch())


def test_a_session_that_came_back_is_no_longer_gone(rig):
    scheduler, feed, later = rig

    async def watch():
        old = Viewer(feed)
        scheduler.record("s", state="ended")
        await old.look()
        later()
        scheduler.gone = [scheduler.sessions.popitem()[0]]
        await Viewer(feed).look()
        later()
        scheduler.gone = []
        scheduler.record("s", state="idle")
        for viewer in (old, Viewer(feed)):
            news = await viewer.look()
            assert news["gone"] == [] and viewer.known["s"]["state"] == "idle"

    asyncio.run(watch())


def test_above_the_bound_what_is_unchanged_displaces_nothing(rig, monkeypatch):
    scheduler, feed, later = rig
    monkeypatch.setattr(page_feed, "MAX_ROWS", 10)
    for i in range(15):
        scheduler.record(f"s{i}")
    scheduler.n_changed = 0

    async def watch():
        viewer = Viewer(feed)
        await viewer.look()
        version = viewer.version
        for _ in range(3):
            later()
            assert (await viewer.look())["version"] == version
        assert set(viewer.known) == {f"s{i}" for i in range(10)}
        scheduler.sessions = {"new": {"tenant": "t", "id": "new"}} | scheduler.sessions
        scheduler.n_changed = 1
        later()
        await viewer.look()
        fresh = Viewer(feed)
        await fresh.look()
        assert set(fresh.known) == set(viewer.known) == {f"s{i}" for i in range(1, 10)} | {"new"}

    asyncio.run(watch())


def test_all_stories_have_their_turn_and_no_more_than_a_few_are_remembered(rig):
    scheduler, feed, later = rig

    async def watch():
        viewer, n = Viewer(feed), MAX_WATCHED + 2
        for _ in range(3 * n):
            for i in range(n):
                await viewer.look(watch=("t", f"s{i}"))
                later(INTERVAL_S / n)
        turns = [key[1] for payload in scheduler.asked[-n:] for key in payload["watch"]]
        assert {turns.count(f"s{i}") for i in range(n)} == {MAX_WATCHED}
        for i in range(3 * MAX_WATCHES):
            await viewer.look(watch=("t", f"many{i}"))
        assert len(feed._watched) == MAX_WATCHES

    asyncio.run(watch())


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_browser_keeps_what_is_both_gone_and_there():
    source = web.find("feed.js").body.decode()
    check = """
    globalThis.sessionStorage = { getItem: () => "" };
    globalThis.document = { addEventListener() {}, hidden: true };
    globalThis.addEventListener = () => {};
    const feed = new Feed(() => {});
    feed.take({ sessions: [{ tenant: "t", id: "s" }], gone: [["t", "s"], ["t", "u"]],
      events: [], series: [], version: 3, next_event: 0 }, null);
    const first = [...feed.rows.values()];
    feed.take({ sessions: [{ tenant: "t", id: "v" }], gone: [], afresh: true, since: 9,
      events: [], series: [], version: 8, next_event: 0 }, null);
    console.log(JSON.stringify([first, [...feed.rows.values()], feed.since]));
    """
    done = subprocess.run(
        ["node", "--input-type=module", "-"],
        input=source + check,
        capture_output=True,
        text=True,
        check=True,
    )
    first, afresh, since = json.loads(done.stdout)
    assert (first, afresh) == ([{"tenant": "t", "id": "s"}], [{"tenant": "t", "id": "v"}])
    assert since == 9
