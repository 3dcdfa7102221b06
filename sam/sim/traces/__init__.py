"""Trace formats by name: every module here reads one, or makes traces up.

Owns: which format a file has, opening it, and errors that name file and line. A format
module defines `ABOUT`, `matches(first_record) -> bool` and `read(records, where) -> Trace`;
`records` yields (line number, decoded object).
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path as FilePath
from typing import Any

import msgspec

from sam.sim.trace import Trace, TraceError

FORMATS = ("sessions", "mooncake", "kv_cache_tester", "openai_log")
SYNTHETIC = "synthetic:"
Records = Iterator[tuple[int, Any]]


def load(trace: str, *, form: str | None = None, seed: int = 0) -> Trace:
    """A trace from a file (.jsonl, .json, either .gz), or made up: `synthetic:NAME[:SESSIONS]`.

    `form`: one of FORMATS; None: told by the first record. Raises TraceError.
    """
    if trace.startswith(SYNTHETIC):
        return import_module(f"{__name__}.synthetic").make(trace[len(SYNTHETIC) :], seed)
    records = _records(FilePath(trace))
    try:
        first = next(records, None)
        if first is None:
            raise TraceError(f"{trace}: empty")
        form = _form_of(first[1], trace) if form is None else form
        module = import_module(f"{__name__}.{form}")
        return module.read(chain([first], records), trace)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{trace}: cannot be read: {error}") from error


def about() -> str:
    """One line for each format."""
    lines = [f"  {form:22}{import_module(f'{__name__}.{form}').ABOUT}" for form in FORMATS]
    made_up = import_module(f"{__name__}.synthetic")
    return "\n".join([*lines, *(f"  {SYNTHETIC + n:22}{a}" for n, a in made_up.ABOUT.items())])


def _form_of(record: Any, where: str) -> str:
    for form in FORMATS:
        if isinstance(record, dict) and import_module(f"{__name__}.{form}").matches(record):
            return form
    keys = ", ".join(list(record)[:8]) if isinstance(record, dict) else type(record).__name__
    raise TraceError(f"{where}: no known trace format (first record: {keys}); see --help")


def _records(path: FilePath) -> Records:
    try:
        opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    whole = path.with_suffix("") if path.suffix == ".gz" else path
    decode = msgspec.json.decode
    with opened as lines:
        if whole.suffix == ".json":
            lines = [lines.read()]
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield number, decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}: line {number}: {error}") from error
