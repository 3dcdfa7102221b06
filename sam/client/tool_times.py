"""How long each tool takes, learned while the agent runs.

Owns the estimate per tool name. Must never read a clock, and must never grow without bound: the
names that were not used for the longest time are forgotten.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping

_NEW_SHARE = 0.3
_MAX_TOOLS = 1_024


class ToolTimes:
    """Decayed mean of ln(1 + seconds) per tool name: a rare hour does not move it far.

    `known_s` are estimates to start from, e.g. `estimates()` of an earlier run. Thread-safe.
    """

    def __init__(self, known_s: Mapping[str, float] | None = None) -> None:
        self._lock = threading.Lock()
        self._means: OrderedDict[str, float] = OrderedDict()
        for name, seconds in (known_s or {}).items():
            self.learn(name, seconds)

    def learn(self, name: str, seconds: float) -> None:
        """Take in one duration; negative, infinite and NaN ones are ignored."""
        if not (math.isfinite(seconds) and seconds >= 0):
            return
        value = math.log1p(seconds)
        with self._lock:
            mean = self._means.pop(name, value)
            self._means[name] = mean + _NEW_SHARE * (value - mean)
            while len(self._means) > _MAX_TOOLS:
                self._means.popitem(last=False)

    def estimate_s(self, name: str) -> float | None:
        """Expected seconds of the next call; None for a tool that never ran."""
        with self._lock:
            mean = self._means.get(name)
        return None if mean is None else math.expm1(mean)

    def estimates(self) -> dict[str, float]:
        """Seconds by tool name, to keep and to pass to the next `ToolTimes`."""
        with self._lock:
            return {name: math.expm1(mean) for name, mean in self._means.items()}
