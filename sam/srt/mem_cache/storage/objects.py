"""Small objects beside the pages of a pool, by name.

Owns how each backend keeps them. Must never touch a page, nor write what a reader could see
half done.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from sam.srt import upstream

logger = logging.getLogger(__name__)

SUFFIX = ".manifest"
MAX_READ_BYTES = 1 << 25


class PoolObjects(Protocol):
    """Called on the pool's worker thread; any error is the caller's to count."""

    def read(self, name: str) -> bytes | None:
        """The newest content, None if there is none."""

    def write(self, name: str, data: bytes) -> bool:
        """Replace the content; False if the pool refused."""

    def remove(self, name: str) -> None:
        """No-op where there is nothing."""

    def sizes(self) -> list[tuple[str, int]]:
        """Names and bytes of what nobody but us bounds, the oldest first."""


class FileObjects:
    """Files in the folder of the `file` backend, whose own are named otherwise."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def read(self, name: str) -> bytes | None:
        try:
            with (self._folder / f"{name}{SUFFIX}").open("rb") as file:
                return file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> bool:
        temporary = self._folder / f".{uuid4().hex}{SUFFIX}.tmp"
        try:
            temporary.write_bytes(data)
            os.replace(temporary, self._folder / f"{name}{SUFFIX}")
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return False
        return True

    def remove(self, name: str) -> None:
        (self._folder / f"{name}{SUFFIX}").unlink(missing_ok=True)

    def sizes(self) -> list[tuple[str, int]]:
        found = []
        if not self._folder.is_dir():
            return []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    status = entry.stat()
                    name = entry.name.removesuffix(SUFFIX)
                    found.append((status.st_mtime, name, status.st_size))
        return [(name, size) for _, name, size in sorted(found)]


class MooncakeObjects:
    """Keys of a Mooncake Store, which never replaces: the former one is removed first."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def read(self, name: str) -> bytes | None:
        if self._store.is_exist(name) != 1:
            return None
        data = self._store.get(name)
        return bytes(data) if data else None

    def write(self, name: str, data: bytes) -> bool:
        self.remove(name)
        return self._store.put(name, data) == 0

    def remove(self, name: str) -> None:
        if self._store.is_exist(name) == 1:
            self._store.batch_remove([name], True)

    def sizes(self) -> list[tuple[str, int]]:
        """None: the store drops what is not used."""
        return []


def objects_of(backend: Any) -> PoolObjects | None:
    """Where the backend keeps small objects; None if we do not know how."""
    backend = upstream.real_storage(backend)
    if isinstance(backend, HiCacheFile):
        return FileObjects(backend.file_path)
    if type(backend).__name__ == "MooncakeStore":
        return MooncakeObjects(backend.store)
    return None
