"""Changes files of a target all or nothing, and remembers what was there before.

Owns the state directory inside the target: `state.json` (what is applied), `blobs/` (the
originals, by sha256), and while a change is under way `journal.json`. Until the journal is
gone, `recover` puts every file back. Must never know what a patch is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import Exit, PatchToolError
from .series import sha256

DENIED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV)


@dataclass(frozen=True)
class Change:
    """One file, as a path relative to the root of the target; None = absent."""

    path: str
    before: bytes | None
    after: bytes | None
    executable: bool = False


@dataclass(frozen=True)
class Store:
    root: Path
    directory: Path

    @property
    def _state(self) -> Path:
        return self.directory / "state.json"

    @property
    def _journal(self) -> Path:
        return self.directory / "journal.json"

    def state(self) -> dict[str, Any] | None:
        return _read_json(self._state)

    def interrupted(self) -> bool:
        return self._journal.exists()

    def original(self, digest: str) -> bytes | None:
        path = self.directory / "blobs" / digest
        content = path.read_bytes() if path.is_file() else None
        return content if content is not None and sha256(content) == digest else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One change at a time, whichever processes ask."""
        handle = os.open(self.directory.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    # --- changing -----------------------------------------------------------------------

    def commit(
        self,
        changes: Sequence[Change],
        state: dict[str, Any] | None,
        *,
        originals: Sequence[bytes] = (),
        drop_dirs: Sequence[str] = (),
    ) -> None:
        """All of `changes` and the new state (None = forget), or an error and no change."""
        self._check_writable(changes)
        try:
            self._prepare(changes, originals)
            for change in changes:
                self._put(change.path, change.after, change.executable)
            self._remove_empty(drop_dirs)
            self._verify(changes)
            self._write_state(state)
        except BaseException as error:
            if not self.recover() and self.state() is None:
                shutil.rmtree(self.directory, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in DENIED:
                raise _read_only(str(error)) from None
            raise
        self._journal.unlink()
        self._clean(state)

    def recover(self) -> bool:
        """Finishes the rollback of a change that was cut off; True if there was one."""
        journal = _read_json(self._journal)
        if journal is None:
            return False
        self._refuse_foreign(journal)
        for entry in journal["changes"]:
            before = entry["before"]
            content = None if before is None else self._blob(before)
            if _hash_of(self.root / entry["path"]) != before:
                self._put(entry["path"], content, entry["executable"])
        self._remove_empty(journal["new_dirs"])
        self._write_state(journal["state"])
        self._journal.unlink()
        self._clean(journal["state"])
        return True

    def _refuse_foreign(self, journal: dict[str, Any]) -> None:
        for entry in journal["changes"]:
            known = (entry["before"], entry["after"])
            if _hash_of(self.root / entry["path"]) not in known:
                raise PatchToolError(
                    Exit.HALF_APPLIED,
                    f"{entry['path']}: changed by somebody else after a run was cut off",
                    f"re-install the engine, then remove {self.directory}",
                )

    def _blob(self, digest: str) -> bytes:
        content = self.original(digest)
        if content is None:
            raise PatchToolError(
                Exit.HALF_APPLIED,
                f"the saved original {digest[:12]} is missing or damaged",
                f"re-install the engine, then remove {self.directory}",
            )
        return content

    def _prepare(self, changes: Sequence[Change], originals: Sequence[bytes]) -> None:
        self.directory.mkdir(exist_ok=True)
        (self.directory / "blobs").mkdir(exist_ok=True)
        # Keeps the directory out of `git status` in a checkout.
        (self.directory / ".gitignore").write_text("*\n", encoding="utf-8")
        before = [change.before for change in changes if change.before is not None]
        for content in (*originals, *before):
            self._write(self.directory / "blobs" / sha256(content), content)
        entries = [
            {
                "path": change.path,
                "before": _digest(change.before),
                "after": _digest(change.after),
                "executable": change.executable,
            }
            for change in changes
        ]
        journal = {
            "changes": entries,
            "new_dirs": self.new_dirs(changes),
            "state": self.state(),
        }
        self._write(self._journal, _to_json(journal))

    def new_dirs(self, changes: Sequence[Change]) -> list[str]:
        """Directories that the changes bring in, outermost first."""
        found: set[str] = set()
        for change in changes:
            parent = Path(change.path).parent
            while change.after is not None and not (self.root / parent).is_dir():
                found.add(str(parent))
                parent = parent.parent
        return sorted(found)

    def _put(self, path: str, content: bytes | None, executable: bool) -> None:
        location = self.root / path
        if content is None:
            location.unlink(missing_ok=True)
        else:
            location.parent.mkdir(parents=True, exist_ok=True)
            old = location.stat() if location.exists() else None
            self._write(location, content, like=old, executable=executable)
        _drop_bytecode(location)

    def _write(
        self,
        location: Path,
        content: bytes,
        *,
        like: os.stat_result | None = None,
        executable: bool = False,
    ) -> None:
        staged = self.directory / "staged"
        with staged.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.chmod(like.st_mode & 0o7777 if like else 0o755 if executable else 0o644)
        if like is not None:
            with contextlib.suppress(OSError):
                os.chown(staged, like.st_uid, like.st_gid)
            # Bytecode is matched by whole seconds: never keep the old one.
            now = time.time()
            if int(now) == int(like.st_mtime):
                os.utime(staged, (now + 1, now + 1))
        os.replace(staged, location)

    def _verify(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if _hash_of(self.root / change.path) != _digest(change.after):
                raise PatchToolError(
                    Exit.INTERNAL, f"{change.path}: read back differs from what was written"
                )

    def _write_state(self, state: dict[str, Any] | None) -> None:
        if state is None:
            self._state.unlink(missing_ok=True)
        else:
            self._write(self._state, _to_json(state))

    def _clean(self, state: dict[str, Any] | None) -> None:
        """Drops what nothing refers to any more; never an error."""
        if state is None:
            shutil.rmtree(self.directory, ignore_errors=True)
            return
        needed = {entry["base"] for entry in state["files"].values()}
        for blob in (self.directory / "blobs").iterdir():
            if blob.name not in needed:
                blob.unlink(missing_ok=True)
        (self.directory / "staged").unlink(missing_ok=True)

    def _remove_empty(self, directories: Sequence[str]) -> None:
        for name in sorted(directories, reverse=True):
            for path in (self.root / name / "__pycache__", self.root / name):
                with contextlib.suppress(OSError):
                    path.rmdir()

    # --- permission ---------------------------------------------------------------------

    def _check_writable(self, changes: Sequence[Change]) -> None:
        """Asks the kernel before anything is touched; holds for root on a read-only mount."""
        places = {self.directory.parent} | {(self.root / c.path).parent for c in changes}
        for place in sorted(places):
            while not place.is_dir():
                place = place.parent
            if not os.access(place, os.W_OK | os.X_OK):
                raise _read_only(f"{place} is not writable")


def _read_only(what: str) -> PatchToolError:
    return PatchToolError(
        Exit.READ_ONLY,
        f"read-only target: {what}; nothing was changed",
        "run as the owner of the installation, or patch a virtual environment of your own",
    )


def _drop_bytecode(location: Path) -> None:
    for path in (location.parent / "__pycache__").glob(f"{location.stem}.*.pyc"):
        with contextlib.suppress(OSError):
            path.unlink()


def _hash_of(path: Path) -> str | None:
    return sha256(path.read_bytes()) if path.is_file() else None


def _digest(content: bytes | None) -> str | None:
    return None if content is None else sha256(content)


def _to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise PatchToolError(
            Exit.HALF_APPLIED,
            f"{path} is damaged",
            f"re-install the engine, then remove {path.parent}",
        ) from None
