"""The rules a series must keep, each as a small function that yields findings.

Owns the limits and what is legal in a header. Must never change a patch.
"""

from __future__ import annotations

import ast
import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .conditions import ConditionError, parse_condition, parse_symbol
from .diff import DiffError, apply_diff
from .errors import PatchToolError
from .header import KINDS, OPTIONAL, REQUIRED
from .index import changed_lines, existing_files, render_index, render_lock
from .series import Patch, Series, is_package_path, is_test_path, read_series_names
from .symbols import symbol_exists
from .target import Target
from .trees import EditedTree, Tree

TARGET_LINES, MAX_LINES = 30, 80
TARGET_FILES, MAX_FILES = 2, 4
MAX_NEW_LINES = 200
MAX_PATCHES = 10
MAX_SERIES_LINES = 500
MAX_SUBJECT = 72
MIN_BODY = 120

_NAME = re.compile(r"[a-z0-9][a-z0-9-]*\.patch")
_OURS = re.compile(r"(?<![A-Za-z0-9])sam(?![A-Za-z0-9])", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    place: str
    text: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {'warning: ' if self.warning else ''}{self.text}"


def lint(
    series: Series, repo: Path, base: Tree | None = None, target: Target | None = None
) -> list[Finding]:
    """Every finding; `base` and `target` allow the rules that need upstream's files."""
    findings = list(_series_rules(series))
    for patch in series.patches:
        findings += _header_rules(patch, series)
        findings += _size_rules(patch)
        findings += _text_rules(patch)
        findings += _reference_rules(patch, series, repo)
    if base is not None:
        findings += _base_rules(series, base)
    findings += _generated_rules(series, target)
    return findings


def _series_rules(series: Series) -> Iterator[Finding]:
    names = read_series_names(series.directory)
    present = {path.name for path in series.directory.glob("*.patch")}
    for name in sorted(present - set(names)):
        yield Finding("series", f"{name} lies in patches/ but is not listed")
    for at, patch in enumerate(series.patches):
        for name in patch.header.all("Depends-On"):
            if name not in names[:at]:
                yield Finding(patch.name, f"Depends-On {name}: not before it in the series")
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Finding("series", f"{name} is listed twice")
    for name in names:
        if not _NAME.fullmatch(name):
            yield Finding("series", f"{name}: names are lower-case words with dashes, .patch")
    if len(names) > MAX_PATCHES:
        yield Finding("series", f"{len(names)} patches, at most {MAX_PATCHES} are allowed")
    lines = sum(sum(changed_lines(patch)) for patch in series.patches)
    if lines > MAX_SERIES_LINES:
        yield Finding(
            "series", f"{lines} changed lines, at most {MAX_SERIES_LINES} are allowed"
        )


# --- one patch --------------------------------------------------------------------------


def _header_rules(patch: Patch, series: Series) -> Iterator[Finding]:
    header = patch.header
    if not header.subject:
        yield Finding(patch.name, "no Subject")
    elif len(header.subject) > MAX_SUBJECT:
        yield Finding(patch.name, f"Subject is longer than {MAX_SUBJECT} characters", True)
    if len(header.body) < MIN_BODY:
        yield Finding(patch.name, "the body must say why, and why the rungs above a patch fail")
    for key in REQUIRED:
        if not header.get(key):
            yield Finding(patch.name, f"trailer {key} is missing or empty")
    if header.get("Kind") and header.get("Kind") not in KINDS:
        yield Finding(patch.name, f"Kind {header.get('Kind')!r} is none of {', '.join(KINDS)}")
    if header.get("Kind") == "seam" and not header.get("Marker"):
        yield Finding(patch.name, "a seam without Marker cannot be checked at start-up", True)
    tag = series.upstream.tag
    if header.get("Upstream-Base") not in ("", tag):
        yield Finding(patch.name, f"Upstream-Base is {header.get('Upstream-Base')}, not {tag}")
    for key in dict(header.trailers):
        if key not in (*REQUIRED, *OPTIONAL) and not key.endswith("-by"):
            yield Finding(patch.name, f"trailer {key} is unknown", True)
    yield from _value_rules(patch)


def _value_rules(patch: Patch) -> Iterator[Finding]:
    header = patch.header
    if len(header.get("Forwarded").split()) > 1:
        yield Finding(patch.name, "Forwarded is 'no' or one reference")
    date = header.get("Last-Update")
    try:
        if date:
            datetime.date.fromisoformat(date)
    except ValueError:
        yield Finding(patch.name, f"Last-Update {date!r} is not YYYY-MM-DD")
    for text in header.all("Remove-When"):
        try:
            if text:
                parse_condition(text)
        except ConditionError as error:
            yield Finding(patch.name, f"Remove-When {error}")
    for text in header.all("Marker"):
        try:
            parse_symbol(text)
        except ConditionError as error:
            yield Finding(patch.name, f"Marker {error}")


def _size_rules(patch: Patch) -> Iterator[Finding]:
    existing, new = changed_lines(patch)
    files = len(existing_files(patch))
    if not patch.diffs:
        yield Finding(patch.name, "changes nothing")
    if existing > MAX_LINES:
        yield Finding(patch.name, f"{existing} changed lines, at most {MAX_LINES} are allowed")
    elif existing > TARGET_LINES:
        yield Finding(patch.name, f"{existing} changed lines, aim for {TARGET_LINES}", True)
    if files > MAX_FILES:
        yield Finding(patch.name, f"{files} existing files, at most {MAX_FILES} are allowed")
    elif files > TARGET_FILES:
        yield Finding(patch.name, f"{files} existing files, aim for {TARGET_FILES}", True)
    if new > MAX_NEW_LINES:
        yield Finding(
            patch.name, f"{new} lines of new files, at most {MAX_NEW_LINES} are allowed"
        )
    for diff in patch.diffs:
        if not (is_package_path(diff.path) or is_test_path(diff.path)):
            yield Finding(patch.name, f"{diff.path}: only python/sglang/ and test/ are patched")


def _text_rules(patch: Patch) -> Iterator[Finding]:
    for where, text in _own_text(patch):
        if _OURS.search(text):
            yield Finding(patch.name, f"{where} mentions the overlay: {text.strip()!r}")
    for diff in patch.diffs:
        for line in diff.added():
            if line.rstrip(b"\r\n") != line.rstrip(b"\r\n").rstrip(b" \t"):
                yield Finding(patch.name, f"{diff.path}: trailing whitespace is added")
                break


def _own_text(patch: Patch) -> Iterator[tuple[str, str]]:
    """What we wrote and what could reach upstream; who uses a seam stays with us."""
    header = patch.header
    yield "Subject", header.subject
    for line in header.body.splitlines():
        yield "body", line
    for key, value in header.trailers:
        if key != "Used-By":
            yield key, value
    for diff in patch.diffs:
        yield "file name", diff.path
        for line in diff.added():
            yield diff.path, line.decode("utf-8", "replace")


def _reference_rules(patch: Patch, series: Series, repo: Path) -> Iterator[Finding]:
    brought = set(series.paths())
    for value in patch.header.all("Test"):
        for item in value.replace(",", " ").split():
            path = item.split("::")[0]
            if path not in brought and not (repo / path).exists():
                yield Finding(
                    patch.name, f"Test {path} is neither in the series nor in the tree"
                )
    for diff in patch.diffs:
        if is_test_path(diff.path) and not series.creates(diff.path):
            yield Finding(
                patch.name, f"{diff.path}: the wheel cannot prove it; create a file instead"
            )


# --- against the base -------------------------------------------------------------------


def _base_rules(series: Series, base: Tree) -> Iterator[Finding]:
    """Every prefix applies, compiles, brings its marker, and is not superfluous yet."""
    tree = EditedTree(base)
    for patch in series.patches:
        before = EditedTree(base)
        before.edits = dict(tree.edits)
        failed = False
        for diff in patch.diffs:
            try:
                tree.edits[diff.path] = apply_diff(diff, tree.read(diff.path)).content
            except DiffError as error:
                yield Finding(patch.name, f"does not apply after its predecessors: {error}")
                failed = True
        if not failed:
            yield from _result_rules(patch, series, before, tree)


def _result_rules(
    patch: Patch, series: Series, before: Tree, after: EditedTree
) -> Iterator[Finding]:
    for path in patch.paths:
        if not path.endswith(".py"):
            continue
        try:
            ast.parse(after.read(path) or b"")
        except SyntaxError as error:
            yield Finding(patch.name, f"{path}: does not compile: {error}")
            return
    try:
        for text in patch.header.all("Marker"):
            module, name = parse_symbol(text)
            if not symbol_exists(after, module, name):
                yield Finding(patch.name, f"Marker {text} is not there after the patch")
            elif symbol_exists(before, module, name):
                yield Finding(patch.name, f"Marker {text} is there without the patch")
        for text in filter(None, patch.header.all("Remove-When")):
            if parse_condition(text).holds(before, series.upstream.version):
                yield Finding(patch.name, f"Remove-When holds already: {text}")
    except ConditionError:
        return  # reported by the header rules


def _generated_rules(series: Series, target: Target | None) -> Iterator[Finding]:
    for name, expected, command in _expected(series, target):
        path = series.directory / name
        if not path.is_file() or path.read_text(encoding="utf-8") != expected:
            yield Finding(name, f"out of date: run 'patchtool.py {command}'")


def _expected(series: Series, target: Target | None) -> Iterator[tuple[str, str, str]]:
    yield "README.md", render_index(series), "index"
    if target is not None:
        try:
            yield "BASE.sha256", render_lock(series, target), "lock"
        except PatchToolError:
            return  # reported as a patch that does not apply
