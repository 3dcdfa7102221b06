"""Counts and levels by time: the newest minutes in buckets of seconds.

Owns nothing but numbers. Must never hold more than its buckets. Time comes in as an argument.
"""

from __future__ import annotations

from collections import deque

BUCKET_S = 5
N_BUCKETS = 180


class TimeSeries:
    """`N_BUCKETS` times `BUCKET_S` seconds. A bucket is a flat dict: `t` (its start, seconds),
    counts added within it, and the last level set within it; what is absent did not happen."""

    def __init__(self) -> None:
        self._buckets: deque[dict[str, float]] = deque(maxlen=N_BUCKETS)
        self._ends_s = float("-inf")

    def add(self, now_s: float, **counts: int) -> None:
        """Add to the counts of the bucket at hand."""
        bucket = self._at(now_s)
        for name, n in counts.items():
            if n:
                bucket[name] = bucket.get(name, 0) + n

    def add_one(self, now_s: float, name: str, n: int) -> None:
        """Add to one count of the bucket at hand."""
        bucket = self._at(now_s)
        bucket[name] = bucket.get(name, 0) + n

    def level(self, now_s: float, **levels: float) -> None:
        """Set levels of the bucket at hand."""
        self._at(now_s).update(levels)

    def knows(self, now_s: float, name: str) -> bool:
        """Whether the bucket at hand has such a count or level."""
        return now_s < self._ends_s and name in self._buckets[-1]

    def since(self, time_s: float) -> list[dict[str, float]]:
        """Buckets that began at `time_s` or later, oldest first."""
        return [dict(bucket) for bucket in self._buckets if bucket["t"] >= time_s]

    def _at(self, now_s: float) -> dict[str, float]:
        if now_s >= self._ends_s:
            start_s = now_s // BUCKET_S * BUCKET_S
            self._ends_s = start_s + BUCKET_S
            self._buckets.append({"t": start_s})
        return self._buckets[-1]
