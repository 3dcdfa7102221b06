"""What is generated in the patches directory: README.md and BASE.sha256; and `refresh`.

Owns their format. Must never be edited around: change a patch, then generate again.
"""

from __future__ import annotations

import re
from pathlib import Path

from .diff import DiffError, FileDiff
from .errors import Exit, PatchToolError
from .series import Patch, Series, apply_loose, is_package_path, is_test_path
from .target import Target

_INTRO = """\
# Patches

Generated from the headers by `scripts/patchtool.py index`; do not edit.

Base: {project} {version} (`{tag}`), wheel `{wheel}`.
The order is that of `series`. Each patch is one idea and one future pull request; its
header says why nothing short of a patch would do.

Lines are the changed ones in files that exist upstream, then those of new files; tests are
not counted. {total}

"""
_COLUMNS = (
    *("#", "patch", "subject", "kind", "lines", "existing files"),
    *("forwarded", "remove when", "used by", "test"),
)


def changed_lines(patch: Patch) -> tuple[int, int]:
    """(in existing files, in new files); upstream-style tests are not counted."""
    counted = [diff for diff in patch.diffs if not is_test_path(diff.path)]
    existing = sum(diff.changed_count() for diff in counted if not diff.creates)
    return existing, sum(diff.changed_count() for diff in counted if diff.creates)


def existing_files(patch: Patch) -> list[str]:
    return [
        diff.path for diff in patch.diffs if not diff.creates and not is_test_path(diff.path)
    ]


def render_index(series: Series) -> str:
    sums = [sum(changed_lines(patch)) for patch in series.patches]
    total = f"{len(sums)} patches, {sum(sums)} lines in all."
    text = _INTRO.format(
        project=series.upstream.project,
        version=series.upstream.version,
        tag=series.upstream.tag,
        wheel=series.upstream.wheel,
        total=total,
    )
    text += "| " + " | ".join(_COLUMNS) + " |\n" + "|---" * len(_COLUMNS) + "|\n"
    return text + "".join(_row(n, patch) for n, patch in enumerate(series.patches, 1))


def _row(number: int, patch: Patch) -> str:
    header = patch.header
    existing, new = changed_lines(patch)
    files = "<br>".join(f"`{path}`" for path in existing_files(patch)) or "none"
    cells = [
        str(number),
        f"[{patch.name}]({patch.name})",
        header.subject,
        header.get("Kind"),
        f"{existing} + {new}",
        files,
        header.get("Forwarded"),
        header.get("Remove-When"),
        header.get("Used-By"),
        header.get("Test"),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def render_lock(series: Series, target: Target) -> str:
    """The base hashes of all existing files that the series touches, in sha256sum's format."""
    lines = []
    for path in series.paths():
        if series.creates(path):
            continue
        if target.kind == "wheel" and not is_package_path(path):
            digest = series.base_hashes.get(path)
        else:
            digest = target.base_hash(path)
        if digest is None:
            raise PatchToolError(
                Exit.DOES_NOT_APPLY,
                f"{path}: the base has no such file, or the wheel cannot prove it",
                "a patch may change files of the wheel and create others, nothing else",
            )
        lines.append(f"{digest}  {path}\n")
    return "".join(lines)


def write_or_compare(path: Path, text: str, *, compare: bool) -> bool:
    """True if `path` holds `text` (afterwards, unless only comparing)."""
    same = path.is_file() and path.read_text(encoding="utf-8") == text
    if not same and not compare:
        path.write_text(text, encoding="utf-8")
    return same or not compare


def refreshed(series: Series, base: dict[str, bytes | None]) -> dict[str, bytes]:
    """Patches whose hunks moved, with the line numbers put right; context must be exact."""
    contents = dict(base)
    changed = {}
    for patch in series.patches:
        starts: list[tuple[int, int]] = []
        for diff in patch.diffs:
            starts += _moved(patch, diff, contents)
        raw = _renumber(patch.raw, starts)
        if raw != patch.raw:
            changed[patch.name] = raw
    return changed


def _moved(
    patch: Patch, diff: FileDiff, contents: dict[str, bytes | None]
) -> list[tuple[int, int]]:
    try:
        applied = apply_loose(diff, contents.get(diff.path))
    except DiffError as error:
        raise PatchToolError(
            Exit.DOES_NOT_APPLY, f"{patch.name}: {error}", "only pure offsets can be refreshed"
        ) from None
    contents[diff.path] = applied.content
    starts = []
    grown = 0
    for hunk, offset in zip(diff.hunks, applied.offsets, strict=True):
        at = hunk.old_index + offset
        old, new = len(hunk.side("-")), len(hunk.side("+"))
        starts.append((at + bool(old), at + grown + bool(new)))
        grown += new - old
    return starts


def _renumber(raw: bytes, starts: list[tuple[int, int]]) -> bytes:
    pending = iter(starts)

    def replace(match: re.Match[bytes]) -> bytes:
        old, new = next(pending)
        return b"@@ -%d%s +%d%s @@" % (old, match[1] or b"", new, match[2] or b"")

    pattern = rb"^@@ -\d+(,\d+)? \+\d+(,\d+)? @@"
    return re.sub(pattern, replace, raw, flags=re.MULTILINE)
