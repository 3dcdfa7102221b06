"""The mail-format header of a patch: subject, reasons, trailers.

Owns how a header is read and how it becomes an upstream commit message. Must never judge
what it reads: rules are the lint's.
"""

from __future__ import annotations

import email.parser
import email.policy
import re
from dataclasses import dataclass

KINDS = ("seam", "fix", "backport")
REQUIRED = (
    "Kind",
    "Upstream-Base",
    "Forwarded",
    "Remove-When",
    "Used-By",
    "Test",
    "Last-Update",
)
OPTIONAL = ("Marker", "Depends-On")
PRIVATE = frozenset(
    ("Used-By", "Last-Update", "Forwarded", "Remove-When", "Marker", "Depends-On")
)

_TRAILER = re.compile(r"([A-Z][A-Za-z]*(?:-[A-Za-z]+)*):(?:[ \t]+(.*))?$")
_TAG = re.compile(r"^\s*\[[^\]]*\bPATCH\b[^\]]*\]\s*")


@dataclass(frozen=True)
class Header:
    author: str
    subject: str
    body: str
    trailers: tuple[tuple[str, str], ...]

    def get(self, key: str) -> str:
        return ", ".join(self.all(key))

    def all(self, key: str) -> list[str]:
        return [value for name, value in self.trailers if name == key]

    def public_message(self) -> str:
        """The commit message for upstream: our own bookkeeping left out."""
        kept = [f"{key}: {value}" for key, value in self.trailers if key not in PRIVATE]
        parts = [self.subject, self.body, "\n".join(kept)]
        return "\n\n".join(part for part in parts if part) + "\n"


def parse_header(text: str) -> Header:
    """Reads what precedes the first diff section."""
    message = email.parser.HeaderParser(policy=email.policy.default).parsestr(text)
    subject = _TAG.sub("", " ".join(str(message.get("Subject", "")).split()))
    payload = message.get_payload()
    body = re.split(r"^---[ \t]*$", payload, maxsplit=1, flags=re.MULTILINE)[0]
    paragraphs = [part for part in re.split(r"\n[ \t]*\n", body.strip("\n")) if part.strip()]
    trailers: tuple[tuple[str, str], ...] = ()
    if paragraphs:
        trailers = _trailers(paragraphs[-1])
        if trailers:
            paragraphs.pop()
    author = str(message.get("From", ""))
    return Header(author, subject, "\n\n".join(paragraphs), trailers)


def _trailers(paragraph: str) -> tuple[tuple[str, str], ...]:
    """The trailers if every line of the paragraph is one, else nothing."""
    found: list[tuple[str, str]] = []
    for line in paragraph.splitlines():
        match = _TRAILER.match(line)
        if match:
            found.append((match[1], (match[2] or "").strip()))
        elif found and line[:1] in (" ", "\t"):
            key, value = found[-1]
            found[-1] = (key, f"{value} {line.strip()}".strip())
        else:
            return ()
    return tuple(found)
