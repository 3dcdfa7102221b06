"""What a pool took and gave: the outcomes of SGLang's own transfers, and what to do about them.

Owns the watch over the controller's storage threads, one log line when a pool starts to refuse
writes and one when it takes them again, and the removal of page files that are cut short:
SGLang never writes a key that exists, so such a page would stay a miss for ever. Must never
change what a transfer returns or raises, nor block its thread for more than a look at the
files it failed on.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from sam.srt import upstream

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0


class TransferWatch:
    """Counts by the storage threads, read by everybody; pages of this rank."""

    def __init__(self) -> None:
        self.n_taken_pages = 0
        self.n_refused_pages = 0
        self.n_damaged_pages = 0
        self.refused: set[int] = set()
        """Ids of refused writes whose end the scheduler has not yet seen."""
        self._refuses: dict[str, bool] = {}
        self._logged_s: dict[str, float] = {}

    def watch(self, controller: Any) -> None:
        """From now on see each write and read of the controller's threads."""
        write, read = controller._page_backup, controller._page_transfer_kv_batch

        def page_backup(operation: Any) -> None:
            try:
                write(operation)
            finally:
                self._wrote(controller, operation)

        def page_transfer_kv_batch(operation: Any, hashes: list[str], *args: Any) -> int:
            n_pages = 0
            try:
                n_pages = read(operation, hashes, *args)
            finally:
                if n_pages < len(hashes) and not operation.is_terminated():
                    self._remove_damaged(controller, hashes)
            return n_pages

        controller._page_backup = page_backup
        controller._page_transfer_kv_batch = page_transfer_kv_batch

    # -- on the storage threads ---------------------------------------------------

    def _wrote(self, controller: Any, operation: Any) -> None:
        if controller.backup_skip:
            return
        n_taken = operation.completed_tokens // controller.page_size
        n_taken -= self._cut_short(controller, operation.hash_value[:n_taken])
        n_refused = len(operation.hash_value) - n_taken
        self.n_taken_pages += n_taken
        self.n_refused_pages += n_refused
        if n_refused:
            self.refused.add(operation.id)
        self.took("pages", not n_refused, controller.storage_backend)

    def took(self, what: str, taken: bool, backend: Any) -> None:
        """One line when the pool begins to refuse, whatever it is, and one when it takes
        everything again."""
        if self._refuses.get(what, False) is not taken:
            return
        self._refuses[what] = not taken
        if not any(self._refuses.values()):
            if self._may_log("takes"):
                logger.info("sam: the pool takes %s again", what)
        elif not taken and self._may_log("refuses"):
            logger.warning(
                "sam: the pool refuses %s (%s); requests go on, what it lacks is computed again. "
                "All of it is counted; the next such line comes in %.0f s at the earliest",
                what,
                why_not(backend),
                LOG_EVERY_S,
            )

    def _remove_damaged(self, controller: Any, hashes: list[str]) -> None:
        n_pages = self._cut_short(controller, hashes)
        self.n_damaged_pages += n_pages
        if n_pages and self._may_log("damaged"):
            logger.warning(
                "sam: page files of the wrong length were removed from the pool (%d so far); "
                "they are computed and written again",
                self.n_damaged_pages,
            )

    def _cut_short(self, controller: Any, hashes: list[str]) -> int:
        """How many of the pages were not whole; they are removed. SGLang takes a write for
        done whose end a full disk swallowed."""
        n_bytes = controller.storage_host_pool.size_per_token * controller.page_size
        try:
            return remove_damaged(controller.storage_backend, hashes, n_bytes)
        except Exception as error:
            logger.debug("sam: damaged pages stay: %r", error)
            return 0

    def _may_log(self, what: str) -> bool:
        now_s = time.monotonic()
        if now_s - self._logged_s.get(what, -LOG_EVERY_S) < LOG_EVERY_S:
            return False
        self._logged_s[what] = now_s
        return True


def why_not(backend: Any) -> str:
    """What an operator should look at, as far as it can be seen from here."""
    real = upstream.real_storage(backend)
    if not isinstance(real, HiCacheFile):
        return f"{type(real).__name__}: see its own log"
    folder = real.file_path
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if status.f_flag & os.ST_RDONLY:
        return f"{folder}: read-only file system"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder}: not writable for this process"
    free = status.f_bavail * status.f_frsize
    return f"{folder}: {free} bytes and {status.f_favail} inodes are free there"


def remove_damaged(backend: Any, keys: list[str], n_bytes: int) -> int:
    """Take page files out that do not have `n_bytes`; how many. `file` backend only."""
    real = upstream.real_storage(backend)
    if not isinstance(real, HiCacheFile):
        return 0
    damaged = [key for key in keys if upstream.file_size(real, key) not in (None, n_bytes)]
    return real.batch_remove(damaged) or 0 if damaged else 0
