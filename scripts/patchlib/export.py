"""One upstream branch per patch, in a checkout of upstream.

Owns which branch stands on what and that a second run gives the same commits. Works on git
objects alone: must never touch the work tree or the index of the checkout.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from .diff import DiffError
from .errors import Exit, PatchToolError
from .gitcmd import commit_of, git, is_repository, try_git
from .series import Patch, Series, apply_loose, apply_strict, sha256


@dataclass(frozen=True)
class Branch:
    name: str
    commit: str
    patch: str
    stacked: bool
    moved: bool


class Exporter:
    def __init__(self, series: Series, checkout: Path, prefix: str) -> None:
        self._series = series
        self._root = checkout
        self._prefix = prefix
        self._blobs: dict[tuple[str, str], bytes | None] = {}

    def run(self, *, force: bool = False) -> list[Branch]:
        base = self._prove()
        identity = self._identity()
        previous = base
        branches = []
        for patch in self._series.patches:
            chained = self._commit(patch, previous, identity, strict=True)
            assert chained is not None
            alone = None
            if not patch.header.all("Depends-On"):
                alone = self._commit(patch, base, identity, strict=False)
            branches.append(self._branch(patch, alone or chained, stacked=alone is None))
            previous = chained
        self._refuse_overwrite(branches, force)
        for branch in branches:
            git(self._root, "update-ref", f"refs/heads/{branch.name}", branch.commit)
        return branches

    def _prove(self) -> str:
        tag = self._series.upstream.tag
        if not is_repository(self._root):
            raise PatchToolError(
                Exit.USAGE, f"{self._root} is not the top of a git checkout", "clone upstream"
            )
        if git(self._root, "status", "--porcelain").strip():
            raise PatchToolError(
                Exit.MODIFIED,
                f"{self._root} has uncommitted changes",
                "commit or drop them first",
            )
        head = commit_of(self._root, "HEAD")
        tagged = commit_of(self._root, tag)
        if head is None or (tagged is not None and tagged != head):
            raise PatchToolError(
                Exit.WRONG_VERSION, f"{self._root}: HEAD is not {tag}", f"git checkout {tag}"
            )
        for path in self._series.paths():
            self._prove_file(head, path)
        return head

    def _prove_file(self, head: str, path: str) -> None:
        content = self._read(head, path)
        digest = None if content is None else sha256(content)
        if self._series.creates(path):
            expected = None
        else:
            expected = self._series.base_hashes.get(path, "not in BASE.sha256")
        if digest != expected:
            raise PatchToolError(
                Exit.WRONG_VERSION,
                f"{path}: HEAD does not hold what {self._series.upstream.tag} holds",
                f"git checkout {self._series.upstream.tag}; if the patches changed, run"
                " 'patchtool.py lock'",
            )

    def _identity(self) -> dict[str, str]:
        values = {}
        for key in ("name", "email"):
            value = try_git(self._root, "config", f"user.{key}")
            if not value or not value.strip():
                raise PatchToolError(
                    Exit.USAGE, f"git has no user.{key}", f"git config user.{key} ..."
                )
            for role in ("AUTHOR", "COMMITTER"):
                values[f"GIT_{role}_{key.upper()}"] = value.decode().strip()
        return values

    def _read(self, commit: str, path: str) -> bytes | None:
        key = (commit, path)
        if key not in self._blobs:
            self._blobs[key] = try_git(self._root, "cat-file", "blob", f"{commit}:{path}")
        return self._blobs[key]

    def _commit(
        self, patch: Patch, parent: str, identity: dict[str, str], *, strict: bool
    ) -> str | None:
        """None if the patch does not apply there; offsets are fine on the bare base."""
        results: dict[str, bytes | None] = {}
        for diff in patch.diffs:
            before = self._read(parent, diff.path)
            try:
                if strict:
                    results[diff.path] = apply_strict(patch, diff, before)
                else:
                    results[diff.path] = apply_loose(diff, before).content
            except DiffError:
                return None
        return self._write_commit(patch, parent, results, identity)

    def _write_commit(
        self,
        patch: Patch,
        parent: str,
        results: dict[str, bytes | None],
        identity: dict[str, str],
    ) -> str:
        day = patch.header.get("Last-Update")
        if not day:
            raise PatchToolError(
                Exit.USAGE, f"{patch.name}: no Last-Update, so no date for the commit", "add it"
            )
        date = f"{day}T12:00:00+0000"
        with tempfile.TemporaryDirectory() as scratch:
            env = {
                **identity,
                "GIT_INDEX_FILE": str(Path(scratch) / "index"),
                "GIT_AUTHOR_DATE": date,
                "GIT_COMMITTER_DATE": date,
            }
            git(self._root, "read-tree", parent, extra_env=env)
            for path, content in results.items():
                blob = git(self._root, "hash-object", "-w", "--stdin", stdin=content)
                info = f"{self._mode(parent, path)},{blob.decode().strip()},{path}"
                git(self._root, "update-index", "--add", "--cacheinfo", info, extra_env=env)
            tree = git(self._root, "write-tree", extra_env=env).decode().strip()
            message = patch.header.public_message().encode()
            args = ("commit-tree", tree, "-p", parent, "-F", "-")
            return git(self._root, *args, stdin=message, extra_env=env).decode().strip()

    def _mode(self, parent: str, path: str) -> str:
        listed = git(self._root, "ls-tree", parent, "--", path).decode().split()
        if listed:
            return listed[0]
        return "100755" if self._series.executable(path) else "100644"

    def _branch(self, patch: Patch, commit: str, *, stacked: bool) -> Branch:
        name = self._prefix + patch.name.removesuffix(".patch")
        old = commit_of(self._root, f"refs/heads/{name}")
        return Branch(name, commit, patch.name, stacked, old not in (None, commit))

    def _refuse_overwrite(self, branches: list[Branch], force: bool) -> None:
        current = try_git(self._root, "symbolic-ref", "--quiet", "--short", "HEAD") or b""
        for branch in branches:
            if branch.name == current.decode().strip():
                raise PatchToolError(
                    Exit.USAGE, f"{branch.name} is checked out", "git checkout --detach first"
                )
            if branch.moved and not force:
                raise PatchToolError(
                    Exit.USAGE,
                    f"branch {branch.name} exists and holds something else",
                    "pass --force to move it, or another --prefix",
                )
