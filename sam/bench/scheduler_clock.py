"""A clock inside a server's scheduler process, for measurements from outside.

Owns: which CPU time counts as the scheduler's, and the file in which a benchmark reads it.
Loaded through SGLang's own plugin mechanism, and only where `clock_env` put it on the path.
Must never change what the scheduler does, and must never count an idle turn of its loop.

Counted is CPU time of the scheduler's thread, turn by turn of its event loop; a turn counts
if it received a request, ran a batch or processed a result. The forward pass (`run_batch`:
model, sampling, copies) is counted apart, and so are all calls from the scheduler into the
tree cache. Being preempted costs no CPU time, so load beside the server hardly shows.
"""

from __future__ import annotations

import functools
import inspect
import json
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import thread_time_ns
from typing import Any, NamedTuple

ENV = "SAM_BENCH_CLOCK_FILE"
_SIZE = 16_384
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_BUILDER = "sglang.srt.mem_cache.registry.create_tree_cache"


class Reading(NamedTuple):
    """CPU time in ns since the server's start; `calls`: (ns, times) by method of the cache."""

    core: str = ""
    n_turns: int = 0
    work_ns: int = 0
    forward_ns: int = 0
    calls: dict[str, tuple[int, int]] = {}

    @property
    def cache_ns(self) -> int:
        return sum(ns for ns, _ in self.calls.values())

    @property
    def n_cache_calls(self) -> int:
        return sum(times for _, times in self.calls.values())

    def since(self, before: Reading) -> Reading:
        calls = {}
        for name, (ns, times) in self.calls.items():
            ns_before, times_before = before.calls.get(name, (0, 0))
            calls[name] = (ns - ns_before, times - times_before)
        return Reading(
            self.core,
            self.n_turns - before.n_turns,
            self.work_ns - before.work_ns,
            self.forward_ns - before.forward_ns,
            calls,
        )


class SchedulerClock:
    """Hooks of one scheduler process. `work` leaves the forward out and the cache in."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: mmap.mmap | None = None
        self._core = ""
        self._turn_start: int | None = None
        self._busy = self._in_call = False
        self._turn_forward_ns = 0
        self._turn_calls: list[tuple[str, int]] = []
        self._n_turns = self._work_ns = self._forward_ns = 0
        self._calls: dict[str, list[int]] = {}

    def ingest(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around the first call of each turn of the event loop."""
        if self._busy and self._turn_start is not None:
            self._end_turn(thread_time_ns())
        self._turn_forward_ns = 0
        self._turn_calls.clear()
        self._turn_start = thread_time_ns()
        received = original(*args, **kwargs)
        self._busy = bool(received)
        return received

    def forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._busy = self._in_call = True
        start = thread_time_ns()
        try:
            return original(*args, **kwargs)
        finally:
            self._turn_forward_ns += thread_time_ns() - start
            self._in_call = False

    def process(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._busy = True
        return original(*args, **kwargs)

    def build(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around the making of the tree cache: time every call into it from outside."""
        from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

        cache = original(*args, **kwargs)
        self._core = type(cache.tree_core).__name__
        for name, _ in inspect.getmembers(BasePrefixCache, inspect.isfunction):
            method = getattr(cache, name, None)
            if not name.startswith("_") and inspect.ismethod(method):
                setattr(cache, name, self._timed(name, method))
        return cache

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._in_call:
                return method(*args, **kwargs)
            self._in_call = True
            start = thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self._turn_calls.append((name, thread_time_ns() - start))
                self._in_call = False

        return call

    def _end_turn(self, now: int) -> None:
        self._n_turns += 1
        self._work_ns += now - self._turn_start - self._turn_forward_ns
        self._forward_ns += self._turn_forward_ns
        for name, ns in self._turn_calls:
            total = self._calls.setdefault(name, [0, 0])
            total[0] += ns
            total[1] += 1
        if self._file is None:
            with open(self._path, "r+b") as file:
                self._file = mmap.mmap(file.fileno(), _SIZE)
        reading = (self._core, self._n_turns, self._work_ns, self._forward_ns, self._calls)
        self._file[:] = json.dumps(reading).encode().ljust(_SIZE)


def register() -> None:
    """Entry point of group `sglang.srt.plugins`, in a folder made by `clock_env`."""
    path = os.environ.get(ENV)
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    clock = SchedulerClock(path)
    for target, hook in (
        (f"{_SCHEDULER}.ingest_requests", clock.ingest),
        (f"{_SCHEDULER}.run_batch", clock.forward),
        (f"{_SCHEDULER}.process_batch_result", clock.process),
        (_BUILDER, clock.build),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


@contextmanager
def clock_env() -> Iterator[tuple[dict[str, str], Callable[[], Reading]]]:
    """Environment for one server that carries the clock, and how to read it meanwhile."""
    with TemporaryDirectory(prefix="sam-clock-") as folder:
        info = Path(folder, "sam_bench_clock-0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sam-bench-clock\nVersion: 0\n")
        entry = "[sglang.srt.plugins]\nsam_bench_clock = sam.bench.scheduler_clock:register\n"
        (info / "entry_points.txt").write_text(entry)
        figures = Path(folder, "clock")
        figures.write_bytes(b" " * _SIZE)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {ENV: str(figures), "PYTHONPATH": os.pathsep.join(paths)}
        yield env, lambda: _read(figures)


def _read(figures: Path) -> Reading:
    """Call it while the server is at rest: a reading in mid-write is not valid JSON."""
    text = figures.read_text().strip()
    return Reading(*json.loads(text)) if text else Reading()
