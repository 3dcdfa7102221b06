"""Exit codes and the one exception of the patchset scripts.

Owns the contract between the scripts and whoever calls them. Must never print or exit.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    INTERNAL = 1
    USAGE = 2
    WRONG_VERSION = 3
    MODIFIED = 4
    HALF_APPLIED = 5
    READ_ONLY = 6
    DOES_NOT_APPLY = 7
    NOT_APPLIED = 8
    OUTDATED = 9


EXIT_HELP = """\
exit codes:
  0  ok: applied and proven (status, check), or the command did what it says
  1  a finding, or an unexpected error
  2  wrong usage, or an unreadable patches directory
  3  the engine is not installed, or it is another version or build
  4  a file that the patches touch is not what the wheel or tag holds
  5  half applied: an earlier run was cut off, or only some files are patched
  6  the target cannot be written
  7  a patch does not apply (fuzz and offsets are refused)
  8  not applied (status, check)
  9  another series, or another state of this one, is applied (status, check)
"""


class PatchToolError(Exception):
    """A refusal: nothing was changed, or everything was put back."""

    def __init__(self, code: Exit, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message
