"""What a server says about itself around a run: counters, hints, CPU time, pool bytes.

Owns: reading only. Must never change a server beyond asking it, and never count what a warm-up
did: figures are differences.
"""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

COUNTERS = {
    "queued_s": "sglang:queue_time_seconds_sum",
    "load_back_tokens": "sglang:load_back_tokens_total",
    "load_back_s": "sglang:load_back_duration_seconds_sum",
    "evicted_tokens": "sglang:evicted_tokens_total",
    "evict_s": "sglang:eviction_duration_seconds_sum",
    "host_backup_bytes": "sglang:hicache_backup_bytes_total",
    "dropped_tokens": "sglang:hicache_dropped_tokens_total",
    "pool_read_tokens": "sglang:prefetched_tokens_total",
    "pool_write_tokens": "sglang:backuped_tokens_total",
}
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)")
_SAMPLE_EVERY_S = 0.5


def counters(text: str) -> dict[str, float]:
    """The wanted counters of a Prometheus page, summed over labels; absent ones are left out."""
    totals: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            totals[match[1]] += float(match[2])
    return {key: totals[name] for key, name in COUNTERS.items() if name in totals}


def read_counters(url: str) -> dict[str, float]:
    """Of a live server; empty if it has no metrics."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
            return counters(response.read().decode())
    except (urllib.error.URLError, OSError):
        return {}


def since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {key: round(value - before.get(key, 0.0), 6) for key, value in after.items()}


def hint_outcomes(report: Mapping[str, Any] | None) -> dict[str, int]:
    """`action:status` counts of `/sessions`, short; {} for a server that knows no sessions."""
    actions = ((report or {}).get("summary") or {}).get("actions") or {}
    return {key.removeprefix("session."): n for key, n in sorted(actions.items())}


class PeakBytes:
    """Context manager: the largest of what `size` says meanwhile, in bytes."""

    def __init__(self, size: Callable[[], int]) -> None:
        self._size, self.peak_bytes = size, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_EVERY_S):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._size())


def folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # removed meanwhile
            continue
    return total


def metric_bytes(text: str, name: str) -> int:
    """A gauge of a Prometheus page, summed over labels; 0 if it is not there."""
    found = (_LINE.match(line) for line in text.splitlines())
    return round(sum(float(match[2]) for match in found if match and match[1] == name))
