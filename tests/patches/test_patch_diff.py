"""The diff applier: strictness, refusals, and agreement with git on random edits."""

from __future__ import annotations

import difflib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patchlib.diff import DiffError, apply_diff, parse_diffs

BEFORE = "".join(f"line {n}\n" for n in range(1, 21))
PATCH = """\
From: A <a@b.c>
Subject: x

text
---
 a.txt | 2 +-

diff --git a/a.txt b/a.txt
index 1..2 100644
--- a/a.txt
+++ b/a.txt
@@ -8,5 +8,5 @@ heading
 line 8
 line 9
-line 10
+LINE 10
 line 11
 line 12
--\x20
2.39.5

"""


def only(text: str):
    (diff,) = parse_diffs(text.encode())
    return diff


def test_applies_where_it_says():
    after = apply_diff(only(PATCH), BEFORE.encode()).content
    assert after == BEFORE.replace("line 10\n", "LINE 10\n").encode()
    assert apply_diff(only(PATCH).reverse(), after).content == BEFORE.encode()


def test_offset_is_refused_unless_asked_for():
    moved = ("new\n" + BEFORE).encode()
    with pytest.raises(DiffError, match=r"offset of \+1"):
        apply_diff(only(PATCH), moved)
    assert apply_diff(only(PATCH), moved, offsets=True).offsets == (1,)


def test_ambiguous_offset_is_refused():
    with pytest.raises(DiffError, match="2 places"):
        apply_diff(only(PATCH), ("x\n" + BEFORE + "y\n" + BEFORE).encode(), offsets=True)


@pytest.mark.parametrize("offsets", [False, True])
def test_fuzz_is_refused(offsets):
    drifted = BEFORE.replace("line 12\n", "line twelve\n").encode()
    with pytest.raises(DiffError, match="line 12 should be 'line 12' but is 'line twelve'"):
        apply_diff(only(PATCH), drifted, offsets=offsets)


def test_missing_end_of_file_is_seen():
    text = PATCH.replace("@@ -8,5 +8,5 @@", "@@ -8,3 +8,3 @@").replace(
        " line 11\n line 12\n", ""
    )
    with pytest.raises(DiffError, match="goes on where the patch expects its end"):
        apply_diff(only(text), BEFORE.encode())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("@@ -8,5 +8,5 @@", "@@ -8,6 +8,6 @@", "shorter|ends in the middle|does not match"),
        ("@@ -8,5 +8,5 @@", "@@ -8,4 +8,4 @@", "longer"),
        ("@@ -8,5 +8,5 @@", "@@ -8,5 +8,4 @@", "does not match|longer"),
        ("@@ -8,5 +8,5 @@", "@@ nonsense @@", "unreadable"),
        ("index 1..2 100644", "old mode 100644", "file mode"),
        ("index 1..2 100644", "rename from z", "renames"),
        ("index 1..2 100644", "deleted file mode 100644", "deletes"),
        ("index 1..2 100644", "GIT binary patch", "binary"),
        ("+++ b/a.txt", "+++ /dev/null", "deletes"),
        ("+++ b/a.txt", "+++ b/c.txt", "differ"),
        ("+++ b/a.txt", "+++ a.txt", "unusual file name"),
        ("diff --git a/a.txt b/a.txt", "diff --git a/a.txt b/../a.txt", "unusual"),
    ],
)
def test_refused_forms(old, new, message):
    assert old in PATCH
    with pytest.raises(DiffError, match=message):
        parse_diffs(PATCH.replace(old, new).encode())


def test_path_cannot_leave_the_tree():
    with pytest.raises(DiffError, match="unusual"):
        parse_diffs(PATCH.replace("a.txt", "../a.txt").encode())


def test_one_file_twice_is_refused():
    tail = PATCH[PATCH.index("diff --git") :]
    with pytest.raises(DiffError, match="two sections"):
        parse_diffs((PATCH + tail).encode())


def test_wrong_new_side_is_refused():
    text = PATCH.replace("+8,5", "+9,5")
    with pytest.raises(DiffError, match="new side"):
        apply_diff(only(text), BEFORE.encode())


def test_creating_an_existing_file_is_refused():
    text = (
        "diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n"
    )
    assert apply_diff(only(text), None).content == b"x\n"
    with pytest.raises(DiffError, match="exists already"):
        apply_diff(only(text), b"")
    with pytest.raises(DiffError, match="does not exist"):
        apply_diff(only(PATCH), None)


def test_empty_new_file():
    text = "diff --git a/n b/n\nnew file mode 100755\nindex 0..0\n"
    diff = only(text)
    assert diff.executable
    assert apply_diff(diff, None).content == b""
    assert apply_diff(diff.reverse(), b"").content is None


# --- against git ------------------------------------------------------------------------

LINE = st.sampled_from(
    ["a", "b", "c", "", " x", "\tt", "-", "+", "@@ -1 +1 @@", "é", "--- q", "\\ z"]
)
TEXT = st.builds(
    lambda lines, end: "\n".join(lines) + ("\n" if lines and end else ""),
    st.lists(LINE, max_size=30),
    st.booleans(),
)
EDIT = st.tuples(st.integers(0, 30), st.integers(0, 4), st.lists(LINE, max_size=4))


def edit(text: str, edits: list[tuple[int, int, list[str]]]) -> str:
    lines = text.split("\n")
    for at, drop, new in edits:
        lines[at : at + drop] = new
    return "\n".join(lines)


def run_git(where: Path, *args: str) -> subprocess.CompletedProcess[bytes]:
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(where.parent), "LC_ALL": "C"}
    return subprocess.run(["git", *args], cwd=where, capture_output=True, env=env)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(TEXT, st.lists(EDIT, max_size=4), st.integers(1, 4))
def test_agrees_with_git(before, edits, context):
    after = edit(before, edits)
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch)
        for side, text in (("old", before), ("new", after)):
            (where / side).mkdir()
            (where / side / "f").write_bytes(text.encode())
        command = ("diff", "--no-index", "--no-prefix", f"-U{context}", "old/f", "new/f")
        raw = (
            run_git(where, *command).stdout.replace(b"old/f", b"a/f").replace(b"new/f", b"b/f")
        )
        if before == after:
            assert raw == b""
            return
        (diff,) = parse_diffs(raw)
        assert apply_diff(diff, before.encode()).content == after.encode()
        assert apply_diff(diff.reverse(), after.encode()).content == before.encode()
        (where / "f").write_bytes(before.encode())
        (where / "p").write_bytes(raw)
        assert run_git(where, "apply", "p").returncode == 0
        assert (where / "f").read_bytes() == after.encode()


@settings(max_examples=200, deadline=None)
@given(st.lists(LINE, max_size=30), st.lists(EDIT, max_size=4), st.integers(0, 5))
def test_difflib_round_trip_and_shift(lines, edits, shift):
    before = [line + "\n" for line in lines]
    after = [line + "\n" for line in edit("\n".join(lines), edits).split("\n")]
    raw = "".join(difflib.unified_diff(before, after, "a/f", "b/f"))
    if not raw:
        return
    (diff,) = parse_diffs(raw.encode())
    old, new = ("".join(side).encode() for side in (before, after))
    assert apply_diff(diff, old).content == new
    assert apply_diff(diff.reverse(), new).content == old
    head = b"unlike any other\n" * shift
    try:
        moved = apply_diff(diff, head + old, offsets=True)
    except DiffError:
        return
    assert moved.content == head + new
