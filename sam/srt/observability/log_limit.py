"""SGLang logs each page that a pool refuses; of each such line one a minute says it as well.

Owns a filter on the loggers of SGLang's storage code. Must never hold back a line that was not
just seen from the same place, nor one below a warning.
"""

from __future__ import annotations

import logging
import time

PERIOD_S = 60.0
LOGGERS = (
    "sglang.srt.managers.cache_controller",
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.mem_cache.storage.file.lru_file_evictor",
    "sglang.srt.mem_cache.storage.mooncake_store.mooncake_store",
)


class OncePerPlace(logging.Filter):
    """Warnings and worse: one per line of code and period; the next one says how many were
    left out."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        super().__init__()
        self.period_s = period_s
        self._places: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        place, now_s = (record.pathname, record.lineno), time.monotonic()
        since_s, n_left_out = self._places.get(place, (now_s - self.period_s, 0))
        if now_s - since_s < self.period_s:
            self._places[place] = (since_s, n_left_out + 1)
            return False
        self._places[place] = (now_s, 0)
        if n_left_out:
            record.msg = f"{record.getMessage()} ({n_left_out} more like this were left out)"
            record.args = None
        return True


def limit_storage_logs() -> None:
    """From now on; more calls change nothing."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(found, OncePerPlace) for found in logger.filters):
            logger.addFilter(OncePerPlace())
