"""Finished runs on disk, so that a comparison can go on where it was stopped.

Owns: the state file, one JSON line per finished run of one arm and seed. Must never mix runs of
different settings: a file belongs to one fingerprint. Runs of other code are kept and named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[2]


def fingerprint(settings: Mapping[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def code_version() -> str:
    """A hash over sam's sources: which code a run measured."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(_PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class State:
    """Runs by (seed, arm). `fresh`: forget what an earlier start left."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.path = folder / f"replay-{fingerprint(settings)}.jsonl"
        self.runs: dict[tuple[int, str], dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if fresh:
            self.path.unlink(missing_ok=True)
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                run = json.loads(line)
            except ValueError:  # cut off in mid-write: that run is measured again
                continue
            self.runs[run["seed"], run["arm"]] = run

    def add(self, run: dict[str, Any]) -> None:
        self.runs[run["seed"], run["arm"]] = run
        with open(self.path, "a") as file:
            file.write(json.dumps(run) + "\n")

    def __contains__(self, key: tuple[int, str]) -> bool:
        return key in self.runs
