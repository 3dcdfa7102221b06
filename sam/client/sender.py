"""Management requests, sent beside the agent.

Owns when and on what they travel: a thread for a synchronous client, tasks of the client's own
loop for an asynchronous one. Must never raise into the agent, never make it wait, and never keep
asking a server that does not answer: errors are counted, the first one is logged, and after a few
in a row sending pauses.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import heapq
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

logger = logging.getLogger("sam.client")
FAILURES_BEFORE_PAUSE = 3
PAUSE_S = 60.0
MAX_WAITING = 512
IDLE_THREAD_S = 30.0
MAX_SLEEP_S = 3_600.0
_EXIT_WAIT_S = 2.0


@dataclass
class SendStats:
    """Management requests: answered, failed (error or timeout), dropped unsent. `ignored`: values
    of the agent that no hint can be made of."""

    answered: int = 0
    failed: int = 0
    dropped: int = 0
    ignored: int = 0


@dataclass(order=True)
class Job:
    """One request to send at `when` (monotonic seconds); jobs of a session keep their order."""

    when: float
    number: int
    session_id: str = field(compare=False)
    kwargs: Mapping[str, Any] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)
    on_cancel: Callable[[], None] | None = field(default=None, compare=False)

    def cancel(self) -> None:
        """Do not send it, if it is not under way yet. Any thread may call it."""
        self.cancelled = True
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()


class Sender:
    """What both senders share: the call, the counters, the pause."""

    def __init__(
        self, create: Callable[..., Any], on_reply: Callable[[str, Any], None] | None
    ) -> None:
        self._create = create
        self._on_reply = on_reply
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stats = SendStats()
        self._failed_in_a_row = 0
        self._paused_until = 0.0
        self._logged: set[str] = set()

    @property
    def stats(self) -> SendStats:
        with self._lock:
            return replace(self._stats)

    def send(self, session_id: str, kwargs: Mapping[str, Any], delay_s: float = 0.0) -> Job:
        """Send later or now; returns at once."""
        job = Job(time.monotonic() + delay_s, next(self._numbers), session_id, kwargs)
        try:
            self._accept(job)
        except Exception as error:  # noqa: BLE001 - nothing here may reach the agent
            self._failed(error)
        return job

    def _accept(self, job: Job) -> None:
        raise NotImplementedError

    def _may_send(self, job: Job) -> bool:
        if job.cancelled:
            return False
        with self._lock:
            if time.monotonic() >= self._paused_until:
                return True
            self._stats.dropped += 1
        return False

    def _dropped(self) -> None:
        with self._lock:
            self._stats.dropped += 1

    def _answered(self, job: Job, reply: Any) -> None:
        with self._lock:
            self._stats.answered += 1
            self._failed_in_a_row = 0
        if self._on_reply is not None:
            self._on_reply(job.session_id, reply)

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            self._stats.failed += 1
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= FAILURES_BEFORE_PAUSE:
                self._failed_in_a_row = 0
                self._paused_until = time.monotonic() + PAUSE_S
        self._log("a cache hint was not delivered, the agent goes on: %r", error)

    def ignored(self, why: object) -> None:
        """Count something that no hint can be made of."""
        with self._lock:
            self._stats.ignored += 1
        self._log("the agent goes on without a cache hint: %r", why)

    def _log(self, message: str, why: object) -> None:
        """The first of a kind is a warning."""
        with self._lock:
            level = logging.DEBUG if message in self._logged else logging.WARNING
            self._logged.add(message)
        logger.log(level, message, why)


class ThreadSender(Sender):
    """One daemon thread while there is something to send; what waits at exit gets two seconds."""

    def __init__(self, create: Any, on_reply: Any = None) -> None:
        super().__init__(create, on_reply)
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self._n_under_way = 0
        self._thread: threading.Thread | None = None
        atexit.register(_flush_at_exit, weakref.ref(self))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that is due was sent; False if that takes longer. Must not be called
        by an `on_reply`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._n_under_way or any(self._due(job) for job in self._waiting):
                if not self._changed.wait(min(0.05, deadline - time.monotonic())):
                    if time.monotonic() >= deadline:
                        return False
        return True

    @staticmethod
    def _due(job: Job) -> bool:
        return not job.cancelled and job.when <= time.monotonic()

    def _accept(self, job: Job) -> None:
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting = [other for other in self._waiting if not other.cancelled]
                heapq.heapify(self._waiting)
            if len(self._waiting) >= MAX_WAITING:
                return self._dropped()
            heapq.heappush(self._waiting, job)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="sam-client", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return None

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                if self._may_send(job):
                    self._answered(job, self._create(**job.kwargs))
            except Exception as error:  # noqa: BLE001
                self._failed(error)
            finally:
                with self._changed:
                    self._n_under_way -= 1
                    self._changed.notify_all()

    def _next(self) -> Job | None:
        """The next job when it is due; None, and the thread is over, if none came for a while."""
        with self._changed:
            while not self._waiting or self._waiting[0].when > time.monotonic():
                if self._waiting:
                    wait_s = self._waiting[0].when - time.monotonic()
                    self._changed.wait(min(wait_s, MAX_SLEEP_S))
                elif not self._changed.wait(IDLE_THREAD_S) and not self._waiting:
                    self._thread = None
                    return None
            self._n_under_way += 1
            return heapq.heappop(self._waiting)


class _LoopState:
    """What is on its way on one event loop: the numbers of its jobs, each session's last task."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.waiting: set[int] = set()
        self.last: dict[str, asyncio.Task[None]] = {}

    def take_back(self, number: int, timer: asyncio.TimerHandle) -> None:
        """A job that was cancelled before it was due. Any thread may call it."""
        self.waiting.discard(number)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its timers with it
            self._loop.call_soon_threadsafe(timer.cancel)

    def forget(self, job: Job, task: asyncio.Task[None]) -> None:
        """Its task is over."""
        self.waiting.discard(job.number)
        if self.last.get(job.session_id) is task:
            del self.last[job.session_id]


class LoopSender(Sender):
    """Tasks on the loop that the agent's calls run on; each session's requests in order. What a
    loop did not send before it was closed is gone."""

    def __init__(self, create: Any, on_reply: Any = None) -> None:
        super().__init__(create, on_reply)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._states: dict[asyncio.AbstractEventLoop, _LoopState] = {}

    def note_loop(self) -> None:
        """Remember the running loop, for hints from threads that have none."""
        self._loop = asyncio.get_running_loop()

    async def flush(self, timeout_s: float, session_id: str | None = None) -> bool:
        """Wait until what was asked for so far, by one session or all, was sent."""
        await asyncio.sleep(0)
        last = self._here().last
        tasks = [task for id, task in last.items() if session_id in (None, id)]
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=timeout_s)
        return not pending

    def _accept(self, job: Job) -> None:
        try:
            self.note_loop()
        except RuntimeError:
            if self._loop is None or self._loop.is_closed():
                return self._dropped()
            self._loop.call_soon_threadsafe(self._plan, job)
        else:
            self._plan(job)
        return None

    def _here(self) -> _LoopState:
        """The state of the running loop; that of loops closed meanwhile is let go."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._states:
                alive = {old: s for old, s in self._states.items() if not old.is_closed()}
                self._states = {**alive, loop: _LoopState(loop)}
            return self._states[loop]

    def _plan(self, job: Job) -> None:
        here = self._here()
        if len(here.waiting) >= MAX_WAITING:
            self._dropped()
            return
        here.waiting.add(job.number)
        delay_s = job.when - time.monotonic()
        if delay_s <= 0:
            return self._due(job)
        timer = asyncio.get_running_loop().call_later(delay_s, self._due, job)
        job.on_cancel = lambda: here.take_back(job.number, timer)
        if job.cancelled:
            job.cancel()
        return None

    def _due(self, job: Job) -> None:
        here = self._here()
        job.on_cancel = None
        if job.cancelled:
            here.waiting.discard(job.number)
            return
        task = asyncio.get_running_loop().create_task(
            self._send(job, here.last.get(job.session_id))
        )
        here.last[job.session_id] = task
        task.add_done_callback(lambda done: here.forget(job, done))

    async def _send(self, job: Job, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            if self._may_send(job):
                self._answered(job, await self._create(**job.kwargs))
        except Exception as error:  # noqa: BLE001
            self._failed(error)


def _flush_at_exit(sender: weakref.ref[ThreadSender]) -> None:
    alive = sender()
    if alive is not None:
        alive.flush(_EXIT_WAIT_S)
