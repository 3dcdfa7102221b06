"""apply, status, check and revert.

Owns the order of the steps: finish what was cut off, prove the base, compute everything,
change everything. Must never print.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

from .errors import Exit, PatchToolError
from .series import Series, sha256
from .store import Change, Store
from .survey import VERDICT_EXIT, FileFact, Survey, Verdict, survey
from .target import Target


@dataclass
class Report:
    code: Exit
    verdict: str
    notes: list[str] = field(default_factory=list)
    found: Survey | None = None

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "exit_code": int(self.code),
            "verdict": self.verdict,
            "notes": self.notes,
        }
        if self.found is not None:
            value |= _describe(self.found)
        return value


def _describe(found: Survey) -> dict[str, Any]:
    state = found.state or {"patches": [], "files": {}}
    recorded = {entry["name"]: entry["sha256"] for entry in state["patches"]}
    return {
        "target": {
            "kind": found.target.kind,
            "root": str(found.target.root),
            "version": found.target.version(),
            "state_dir": str(found.target.state_dir),
        },
        "patches": [
            {
                "name": patch.name,
                "subject": patch.header.subject,
                "sha256": patch.sha256,
                "recorded": recorded.get(patch.name) == patch.sha256,
            }
            for patch in found.series.patches
        ],
        "files": [
            {
                "path": fact.path,
                "kind": fact.kind,
                "as_wanted": fact.done and fact.kind != "modified",
                "sha256": None if fact.current is None else sha256(fact.current),
            }
            for fact in found.facts
        ],
        "skipped": found.skipped,
    }


def store_of(target: Target) -> Store:
    return Store(target.root, target.state_dir)


def status(series: Series, target: Target) -> Report:
    """What is there; quick, and says so even where the patches themselves are broken."""
    target.prove_version(series)
    found = survey(series, target, store_of(target))
    notes = _notes(found)
    if found.error is not None:
        notes.append(f"the series does not apply: {found.error.message}")
    return Report(VERDICT_EXIT[found.verdict], found.verdict.value, notes, found)


def check(series: Series, target: Target) -> Report:
    """As `status`, and a series that would not apply is an error."""
    target.prove_version(series)
    found = survey(series, target, store_of(target))
    notes = _notes(found)
    if found.verdict is not Verdict.HALF_APPLIED and found.error is not None:
        raise found.error
    if found.verdict is Verdict.NOT_APPLIED:
        notes.append("base proven, every patch applies: 'apply' will work")
    if found.verdict is Verdict.APPLIED:
        notes.append(
            "every patched file has exactly the bytes that the series makes of the base"
        )
    return Report(VERDICT_EXIT[found.verdict], found.verdict.value, notes, found)


def _notes(found: Survey) -> list[str]:
    notes = []
    verdict = found.verdict
    if verdict is Verdict.HALF_APPLIED:
        notes.append("an earlier run was cut off: 'apply' or 'revert' finishes the rollback")
    if verdict is Verdict.NOT_APPLIED and found.state is not None:
        notes.append("patched before, but the engine was re-installed since: run 'apply' again")
    if verdict is Verdict.APPLIED and not found.recorded:
        notes.append("patched, but without a record of this series: 'apply' writes it")
    if verdict is Verdict.OUTDATED:
        notes.append("another series is applied: 'apply' moves to this one in one step")
    if verdict is Verdict.PARTIAL:
        notes.append("only some files are patched: 'apply' completes, 'revert' undoes")
    if verdict is Verdict.MODIFIED:
        notes.append("changed by somebody else: " + ", ".join(found.modified()))
    if found.skipped:
        notes.append("outside of the wheel, skipped: " + ", ".join(found.skipped))
    return notes


def apply(series: Series, target: Target) -> Report:
    target.prove_version(series)
    store = store_of(target)
    with store.locked():
        notes = _recover(store)
        found = survey(series, target, store)
        found.require_unmodified()
        if found.error is not None:
            raise found.error
        if found.verdict is Verdict.APPLIED and found.recorded:
            return Report(Exit.OK, "already applied", notes + _skips(found), found)
        _commit_series(found, store)
        after = survey(series, target, store)
    return Report(Exit.OK, Verdict.APPLIED.value, notes + _skips(after), after)


def _recover(store: Store) -> list[str]:
    return ["rolled back a run that was cut off"] if store.recover() else []


def _skips(found: Survey) -> list[str]:
    if not found.skipped:
        return []
    return ["outside of the wheel, skipped: " + ", ".join(found.skipped)]


def _commit_series(found: Survey, store: Store) -> None:
    changes = [_change(found, fact, fact.wanted) for fact in found.facts if not fact.done]
    touched = [fact for fact in found.facts if fact.wanted != fact.base]
    old_dirs = (found.state or {}).get("dirs", [])
    new_dirs = sorted({*old_dirs, *store.new_dirs(changes)})
    state = {
        "format": 1,
        "version": found.series.upstream.version,
        "kind": found.target.kind,
        "applied_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "patches": [{"name": p.name, "sha256": p.sha256} for p in found.series.patches],
        "files": {
            fact.path: {"base": _digest(fact.base), "result": _digest(fact.wanted)}
            for fact in touched
        },
        "dirs": new_dirs,
    }
    originals = [fact.base for fact in touched if fact.base is not None]
    store.commit(changes, state, originals=originals)


def _change(found: Survey, fact: FileFact, after: bytes | None) -> Change:
    location = found.target.locate(fact.path)
    assert location is not None
    path = str(location.relative_to(found.target.root))
    return Change(path, fact.current, after, found.series.executable(fact.path))


def _digest(content: bytes | None) -> str | None:
    return None if content is None else sha256(content)


def revert(series: Series, target: Target) -> Report:
    """Back to the base, byte for byte; also for a series that is not ours any more."""
    store = store_of(target)
    with store.locked():
        notes = _recover(store)
        state = store.state()
        if state is not None:
            return _revert_recorded(target, store, state, notes)
        target.prove_version(series)
        found = survey(series, target, store)
        if found.verdict is Verdict.NOT_APPLIED:
            return Report(Exit.OK, "not applied, nothing to revert", notes, found)
        found.require_unmodified()
        changes = [
            _change(found, fact, fact.base) for fact in found.facts if fact.current != fact.base
        ]
        store.commit(changes, None)
    return Report(Exit.OK, "reverted", notes)


def _revert_recorded(
    target: Target, store: Store, state: dict[str, Any], notes: list[str]
) -> Report:
    files = {path: target.read(path) for path in state["files"]}
    entries = state["files"]
    patched = [path for path in files if _digest(files[path]) == entries[path]["result"]]
    # After a re-install or upgrade only the files that the patches added are still ours.
    replaced = not any(entries[path]["base"] for path in patched)
    foreign = [
        path
        for path in files
        if path not in patched and _digest(files[path]) != entries[path]["base"]
    ]
    if foreign and not (replaced and all(entries[path]["base"] for path in foreign)):
        raise PatchToolError(
            Exit.MODIFIED,
            "changed since the patches were applied: " + ", ".join(foreign),
            "save those changes, then re-install the engine and remove "
            f"{store.directory}; nothing was changed",
        )
    changes = [_restore(target, store, path, files[path], entries[path]) for path in patched]
    store.commit(changes, None, drop_dirs=state["dirs"])
    if replaced and foreign:
        notes = [*notes, "the engine was replaced since: only added files were removed"]
    return Report(Exit.OK, "reverted", notes)


def _restore(
    target: Target, store: Store, path: str, current: bytes | None, entry: dict[str, Any]
) -> Change:
    location = target.locate(path)
    assert location is not None
    base = None if entry["base"] is None else store.original(entry["base"])
    if entry["base"] is not None and base is None:
        raise PatchToolError(
            Exit.HALF_APPLIED,
            f"{path}: its saved original is missing or damaged",
            f"re-install the engine, then remove {store.directory}",
        )
    return Change(str(location.relative_to(target.root)), current, base)
