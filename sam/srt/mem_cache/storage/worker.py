"""One thread that talks to the pool, and jobs whose ends all ranks see alike.

Owns the queue, its bound and the thread. Must never be waited for by the scheduler, and must
never let a failing job stop the next one.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any

logger = logging.getLogger(__name__)

MAX_LOGGED_ERRORS = 10


class Job:
    """Work for the pool. `ready`: the scheduler may look at `result`, which is None where
    the work failed; set in the same step on all ranks. `same_on_ranks`: the result counts
    only where all ranks got the same one."""

    __slots__ = ("finished", "name", "ready", "result", "run", "same_on_ranks")

    def __init__(
        self, run: Callable[[], Any], name: Hashable = None, *, same_on_ranks: bool = False
    ) -> None:
        self.run = run
        self.name = name
        self.same_on_ranks = same_on_ranks
        self.result: Any = None
        self.finished = False
        self.ready = False


class PoolWorker:
    """Jobs run one by one in the order of `submit`; at most `max_jobs` of each sort wait."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._wake = threading.Condition()
        self._queue: deque[Job] = deque()
        self._latest: dict[Hashable, Job] = {}
        self._tracked: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.n_errors = 0
        self.n_refused = 0

    @property
    def n_waiting(self) -> int:
        return len(self._queue)

    @property
    def takes_names(self) -> bool:
        """Whether `submit_latest` has room for a new name."""
        return len(self._latest) < self._max_jobs

    @property
    def n_tracked(self) -> int:
        """Jobs that the scheduler has not yet seen the end of."""
        return len(self._tracked)

    def submit(self, run: Callable[[], Any], *, same_on_ranks: bool = False) -> Job | None:
        """Queue work whose end matters; None if too much waits already."""
        if len(self._tracked) >= self._max_jobs:
            self.n_refused += 1
            return None
        job = Job(run, same_on_ranks=same_on_ranks)
        self._tracked.append(job)
        self._put(job)
        return job

    def submit_latest(self, name: Hashable, run: Callable[[], Any]) -> bool:
        """Queue work that replaces what waits under the same name; its end is not reported.
        False if too many names wait: it is left out."""
        with self._wake:
            job = self._latest.get(name)
            if job is not None:
                job.run = run
                return True
            if len(self._latest) >= self._max_jobs:
                self.n_refused += 1
                return False
            job = self._latest[name] = Job(run, name)
        self._put(job)
        return True

    def seal(self, name: Hashable) -> None:
        """What is queued under the name from now on runs after what is queued already."""
        with self._wake:
            self._latest.pop(name, None)

    def n_finished(self) -> int:
        """How many of the oldest tracked jobs are over on this rank."""
        n_jobs = 0
        for job in self._tracked:
            if not job.finished:
                break
            n_jobs += 1
        return n_jobs

    def take(self, n_jobs: int) -> list[Job]:
        """Make the oldest tracked jobs, which are over on all ranks, ready."""
        taken = [self._tracked.popleft() for _ in range(n_jobs)]
        for job in taken:
            job.ready = True
        return taken

    def stop(self, timeout_s: float) -> None:
        """Let the thread do what waits, and end; what is not done in time is dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout_s)
            with self._wake:
                self._queue.clear()
                self._latest.clear()

    # -- inside -------------------------------------------------------------------

    def _put(self, job: Job) -> None:
        with self._wake:
            self._queue.append(job)
            self._wake.notify()
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._work, daemon=True, name="sam-pool")
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._stopping:
                    self._wake.wait()
                if not self._queue:
                    return
                job = self._queue.popleft()
                if self._latest.get(job.name) is job:
                    del self._latest[job.name]
                run = job.run
            try:
                job.result = run()
            except Exception as error:
                self.n_errors += 1
                if self.n_errors <= MAX_LOGGED_ERRORS:
                    logger.warning("sam: pool work failed (%d times): %r", self.n_errors, error)
            job.finished = True


class BoundedNames:
    """Names with sizes in bytes, the oldest first to go over a bound. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def put(self, name: str, n_bytes: int) -> list[str]:
        """Note the newest size; return the names that are over the bound now."""
        self.pop(name)
        self._sizes[name] = n_bytes
        self.n_bytes += n_bytes
        dropped = []
        while self.n_bytes > self.max_bytes:
            oldest = next(iter(self._sizes))
            self.pop(oldest)
            dropped.append(oldest)
        return dropped

    def pop(self, name: str) -> None:
        self.n_bytes -= self._sizes.pop(name, 0)
