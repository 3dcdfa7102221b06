"""Unified diffs in git's format: parse, apply, reverse.

Owns the meaning of a hunk. Works on bytes and on one file at a time. Must never touch
the file system and never guess: a hunk whose context is not there word for word is an
error, and a moved hunk is accepted only where the caller asks for offsets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_UNSUPPORTED = (
    (b"rename ", "renames a file"),
    (b"copy ", "copies a file"),
    (b"old mode ", "changes a file mode"),
    (b"GIT binary patch", "is binary"),
    (b"Binary files ", "is binary"),
    (b"deleted file mode ", "deletes a file"),
)


class DiffError(Exception):
    """The text is no diff we accept, or it does not fit the content."""


@dataclass(frozen=True)
class Hunk:
    old_start: int
    new_start: int
    lines: tuple[tuple[str, bytes], ...]

    def side(self, sign: str) -> tuple[bytes, ...]:
        return tuple(text for tag, text in self.lines if tag in (" ", sign))

    @property
    def old_index(self) -> int:
        return self.old_start - 1 if self.side("-") else self.old_start

    @property
    def new_index(self) -> int:
        return self.new_start - 1 if self.side("+") else self.new_start

    def reverse(self) -> Hunk:
        flip = {" ": " ", "-": "+", "+": "-"}
        lines = tuple((flip[tag], text) for tag, text in self.lines)
        return Hunk(self.new_start, self.old_start, lines)


@dataclass(frozen=True)
class FileDiff:
    path: str
    creates: bool = False
    removes: bool = False
    executable: bool = False
    hunks: tuple[Hunk, ...] = ()

    def reverse(self) -> FileDiff:
        hunks = tuple(hunk.reverse() for hunk in self.hunks)
        return replace(self, creates=self.removes, removes=self.creates, hunks=hunks)

    def added(self) -> list[bytes]:
        return [text for hunk in self.hunks for tag, text in hunk.lines if tag == "+"]

    def changed_count(self) -> int:
        return sum(tag != " " for hunk in self.hunks for tag, _ in hunk.lines)


@dataclass(frozen=True)
class Applied:
    content: bytes | None
    offsets: tuple[int, ...] = ()


def split_lines(content: bytes) -> list[bytes]:
    return _LINE.findall(content)


# --- applying ---------------------------------------------------------------------------


def apply_diff(diff: FileDiff, content: bytes | None, *, offsets: bool = False) -> Applied:
    """The content after `diff`; None stands for an absent file on both sides."""
    if diff.creates and content is not None:
        raise DiffError(f"{diff.path}: the patch creates this file but it exists already")
    if not diff.creates and content is None:
        raise DiffError(f"{diff.path}: the patch changes this file but it does not exist")
    old = split_lines(content or b"")
    new: list[bytes] = []
    done = 0
    shifts: list[int] = []
    for number, hunk in enumerate(diff.hunks, 1):
        at = _place(diff, number, hunk, old, done, shifts, offsets)
        shifts.append(at - hunk.old_index)
        new += old[done:at]
        if not offsets and len(new) != hunk.new_index:
            raise DiffError(f"{diff.path}: hunk {number}: header of the new side is wrong")
        new += hunk.side("+")
        done = at + len(hunk.side("-"))
    new += old[done:]
    if diff.removes:
        if new:
            raise DiffError(f"{diff.path}: lines are left in a file that should be gone")
        return Applied(None, tuple(shifts))
    return Applied(b"".join(new), tuple(shifts))


def _place(
    diff: FileDiff,
    number: int,
    hunk: Hunk,
    old: Sequence[bytes],
    done: int,
    shifts: Sequence[int],
    offsets: bool,
) -> int:
    at = hunk.old_index
    if not offsets and at >= done and _fits(hunk, old, at):
        return at
    hint = at + (shifts[-1] if shifts else 0)
    places = [place for place in range(done, len(old) + 1) if _fits(hunk, old, place)]
    where = f"{diff.path}: hunk {number} (line {hunk.old_start})"
    if not places:
        raise DiffError(f"{where}: context not found; {_first_difference(hunk, old, hint)}")
    if not offsets:
        nearest = min(places, key=lambda place: abs(place - at))
        raise DiffError(f"{where}: fits only at an offset of {nearest - at:+d} lines")
    if len(places) > 1 and hint not in places:
        raise DiffError(f"{where}: moved, and fits at {len(places)} places")
    return hint if hint in places else places[0]


def _fits(hunk: Hunk, old: Sequence[bytes], at: int) -> bool:
    want = hunk.side("-")
    end = at + len(want)
    if at < 0 or end > len(old) or tuple(old[at:end]) != want:
        return False
    # No context on one side means that the hunk was made at that end of the file.
    touches_start = hunk.old_start <= 1
    touches_end = bool(hunk.lines) and hunk.lines[-1][0] != " "
    return not (touches_start and at != 0) and not (touches_end and end != len(old))


def _first_difference(hunk: Hunk, old: Sequence[bytes], at: int) -> str:
    for step, want in enumerate(hunk.side("-")):
        have = old[at + step] if 0 <= at + step < len(old) else None
        if have != want:
            found = "the end of the file" if have is None else repr(_show(have))
            return f"line {at + step + 1} should be {_show(want)!r} but is {found}"
    return "the file goes on where the patch expects its end"


def _show(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\n")


# --- parsing ----------------------------------------------------------------------------


def parse_diffs(data: bytes) -> list[FileDiff]:
    """Every file section of a patch; text outside of sections is skipped."""
    parser = _Parser(data.split(b"\n"))
    diffs = parser.run()
    paths = [diff.path for diff in diffs]
    for path in paths:
        if paths.count(path) > 1:
            raise DiffError(f"{path}: two sections for one file")
    return diffs


def diff_start(data: bytes) -> int:
    """Offset of the first file section, or the length of `data`."""
    match = re.search(rb"^(?:diff --git |--- [^\n]+\n\+\+\+ )", data, re.MULTILINE)
    return match.start() if match else len(data)


@dataclass
class _Parser:
    lines: list[bytes]
    at: int = 0
    diffs: list[FileDiff] = field(default_factory=list)

    def run(self) -> list[FileDiff]:
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.startswith(b"diff --git "):
                self.diffs.append(self._section())
            elif self._names_follow():
                self.diffs.append(self._body(self._peek_name(), executable=False))
            elif self.diffs and self._stray(line):
                raise DiffError(f"line {self.at + 1}: hunk is longer than its header says")
            else:
                self.at += 1
        return self.diffs

    @staticmethod
    def _stray(line: bytes) -> bool:
        return line[:1] in (b"+", b"-", b" ") and line not in (b"-- ", b"--", b"---")

    def _names_follow(self) -> bool:
        pair = self.lines[self.at : self.at + 2]
        return len(pair) == 2 and pair[0].startswith(b"--- ") and pair[1].startswith(b"+++ ")

    def _section(self) -> FileDiff:
        match = re.fullmatch(rb"diff --git a/(\S+) b/(\S+)", self.lines[self.at])
        if not match or match[1] != match[2]:
            raise DiffError(f"line {self.at + 1}: unusual file names in 'diff --git'")
        name = match[1].decode()
        executable = creates = False
        self.at += 1
        while self.at < len(self.lines):
            line = self.lines[self.at]
            for start, what in _UNSUPPORTED:
                if line.startswith(start):
                    raise DiffError(f"{name}: the patch {what}, which is not supported")
            if line.startswith(b"new file mode "):
                creates, executable = True, line.endswith(b"755")
            elif not line.startswith(b"index "):
                break
            self.at += 1
        if self._names_follow():
            return self._body(name, executable=executable)
        if not creates:
            raise DiffError(f"{name}: a section without hunks")
        return FileDiff(name, creates=True, executable=executable)

    def _peek_name(self) -> str:
        for line in self.lines[self.at : self.at + 2]:
            name = _file_name(line[4:])
            if name is not None:
                return name
        raise DiffError(f"line {self.at + 1}: both sides are /dev/null")

    def _body(self, name: str, *, executable: bool) -> FileDiff:
        old, new = (_file_name(line[4:]) for line in self.lines[self.at : self.at + 2])
        if new is None:
            raise DiffError(f"{name}: the patch deletes a file, which is not supported")
        if new != name or old not in (None, name):
            raise DiffError(f"{name}: file names of one section differ")
        self.at += 2
        hunks = []
        while self.at < len(self.lines) and self.lines[self.at].startswith(b"@@ "):
            hunks.append(self._hunk())
        if not hunks:
            raise DiffError(f"{name}: a section without hunks")
        return FileDiff(name, old is None, False, executable, tuple(hunks))

    def _hunk(self) -> Hunk:
        match = _HUNK.match(self.lines[self.at])
        if not match:
            raise DiffError(f"line {self.at + 1}: unreadable hunk header")
        old_left, new_left = (int(n) if n is not None else 1 for n in (match[2], match[4]))
        self.at += 1
        lines: list[tuple[str, bytes]] = []
        while old_left or new_left or self._no_newline():
            if self._no_newline():
                if not lines:
                    raise DiffError(f"line {self.at + 1}: a hunk starts with a marker")
                tag, text = lines[-1]
                lines[-1] = (tag, text[:-1])
                self.at += 1
                continue
            tag, text = self._hunk_line()
            old_left -= tag != "+"
            new_left -= tag != "-"
            if old_left < 0 or new_left < 0:
                raise DiffError(f"line {self.at}: hunk does not match its header")
            lines.append((tag, text))
        return Hunk(int(match[1]), int(match[3]), tuple(lines))

    def _no_newline(self) -> bool:
        return self.at < len(self.lines) and self.lines[self.at].startswith(b"\\ ")

    def _hunk_line(self) -> tuple[str, bytes]:
        # The last element of the split is what follows the final newline, no line.
        if self.at >= len(self.lines) - 1:
            raise DiffError("the patch ends in the middle of a hunk")
        line = self.lines[self.at]
        self.at += 1
        tag = line[:1].decode("latin-1") or " "
        if tag not in " +-":
            raise DiffError(f"line {self.at}: hunk is shorter than its header says")
        return tag, line[1:] + b"\n"


def _file_name(text: bytes) -> str | None:
    name = text.split(b"\t", 1)[0].decode()
    if name == "/dev/null":
        return None
    if not re.fullmatch(r"[ab]/[^\s\"\\]+", name) or ".." in name.split("/"):
        raise DiffError(f"unusual file name {name!r} (paths start with a/ and b/)")
    return name[2:]
