"""Compares a target with the series: what each touched file is, and what it should be.

Owns the verdict on a target. Read-only: must never change a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .diff import DiffError
from .errors import Exit, PatchToolError
from .series import Series, same_series, sha256
from .store import Store
from .target import Target


class Verdict(Enum):
    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    OUTDATED = "outdated"
    PARTIAL = "partly applied"
    MODIFIED = "modified"
    HALF_APPLIED = "half applied"


VERDICT_EXIT = {
    Verdict.APPLIED: Exit.OK,
    Verdict.NOT_APPLIED: Exit.NOT_APPLIED,
    Verdict.OUTDATED: Exit.OUTDATED,
    Verdict.PARTIAL: Exit.HALF_APPLIED,
    Verdict.MODIFIED: Exit.MODIFIED,
    Verdict.HALF_APPLIED: Exit.HALF_APPLIED,
}


@dataclass(frozen=True)
class FileFact:
    path: str
    kind: str  # base | patched | modified
    base: bytes | None
    current: bytes | None
    wanted: bytes | None

    @property
    def done(self) -> bool:
        return self.current == self.wanted


@dataclass
class Survey:
    series: Series
    target: Target
    state: dict[str, Any] | None
    facts: list[FileFact] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    error: PatchToolError | None = None
    interrupted: bool = False

    @property
    def recorded(self) -> bool:
        """The state file speaks of exactly this series."""
        return self.state is not None and same_series(self.state["patches"], self.series)

    @property
    def verdict(self) -> Verdict:
        kinds = {fact.kind for fact in self.facts}
        if self.interrupted:
            return Verdict.HALF_APPLIED
        if "modified" in kinds:
            return Verdict.MODIFIED
        done = self.error is None and all(fact.done for fact in self.facts)
        if done and (self.facts or self.recorded):
            return Verdict.APPLIED
        if kinds <= {"base"} or self._reinstalled():
            return Verdict.NOT_APPLIED
        if self.state is not None and not self.recorded:
            return Verdict.OUTDATED
        return Verdict.PARTIAL

    def _reinstalled(self) -> bool:
        """A re-install puts changed files back but leaves those that the patches added."""
        changed = [fact for fact in self.facts if fact.base is not None]
        return bool(changed) and all(fact.kind == "base" for fact in changed)

    def modified(self) -> list[str]:
        return [fact.path for fact in self.facts if fact.kind == "modified"]

    def require_unmodified(self) -> None:
        names = self.modified()
        if names:
            raise PatchToolError(
                Exit.MODIFIED,
                "not what the base holds, nor what the patches made of it: " + ", ".join(names),
                _restore_hint(self.target, self.series, names),
            )


def _restore_hint(target: Target, series: Series, names: list[str]) -> str:
    if target.kind == "checkout":
        return f"git checkout {series.upstream.tag} -- {' '.join(names)}"
    return (
        f"pip install --no-deps --force-reinstall sglang=={series.upstream.version}"
        " (files that are not the engine's own must be removed by hand)"
    )


def survey(series: Series, target: Target, store: Store) -> Survey:
    result = Survey(series, target, store.state(), interrupted=store.interrupted())
    recorded = (result.state or {"files": {}})["files"]
    for path in sorted({*series.paths(), *recorded}):
        if target.locate(path) is None:
            result.skipped.append(path)
        else:
            result.facts.append(_fact(result, store, path, recorded.get(path)))
    return result


def _fact(result: Survey, store: Store, path: str, entry: dict[str, Any] | None) -> FileFact:
    current = result.target.read(path)
    kind, base = _recognise(result, store, path, entry, current)
    wanted: bytes | None = None
    try:
        if kind != "modified":
            wanted = result.series.fold(path, base)
    except PatchToolError as error:
        result.error = result.error or error
        wanted = base
    return FileFact(path, kind, base, current, wanted)


def _recognise(
    result: Survey,
    store: Store,
    path: str,
    entry: dict[str, Any] | None,
    current: bytes | None,
) -> tuple[str, bytes | None]:
    proof = result.target.base_hash(path)
    digest = None if current is None else sha256(current)
    if digest == proof:
        return "base", current
    if entry is not None and entry["base"] == proof and entry["result"] == digest:
        base = None if proof is None else store.original(proof)
        if proof is None or base is not None:
            return "patched", base
    try:
        base = result.series.unfold(path, current)
    except DiffError:
        return "modified", None
    if (None if base is None else sha256(base)) == proof:
        return "patched", base
    return "modified", None
