"""Exit codes of `sam`, and the one exception that carries them.

Owns the contract with scripts that call `sam`. Must never print or exit.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    FINDING = 1
    USAGE = 2
    NO_SERVER = 3
    REFUSED = 4
    NOT_SAM = 5
    UNKNOWN = 6
    PENDING = 7
    INTERRUPTED = 130


MEANINGS = {
    Exit.OK: "it is so, or it was done (a hint: done, or clipped to a part)",
    Exit.FINDING: "a check failed; a hint was dropped, rejected or expired",
    Exit.USAGE: "wrong usage, or the server calls the request malformed",
    Exit.NO_SERVER: "no answer: no server there, too slow, or it failed",
    Exit.REFUSED: "the API key is missing or wrong (401, 403)",
    Exit.NOT_SAM: "what answers is no SGLang server with --radix-cache-backend sam",
    Exit.UNKNOWN: "no such session, or nothing of it is in the cache",
    Exit.PENDING: "the outcome of a hint was still open when --wait was over",
    Exit.INTERRUPTED: "interrupted",
}


class CliError(Exception):
    """What ends a command: an exit code, what is wrong, and what to do about it."""

    def __init__(self, code: Exit, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy
