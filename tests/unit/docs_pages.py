"""The documents as data, for the tests that keep them true: pages, links, anchors, code blocks.

Owns the reading. Must never decide what is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

REPO = Path(__file__).resolve().parents[2]
_OUTSIDE = ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md")
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(.*?)\s*-->", re.S)
_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A fenced block. `not_run`: the reason that the comment before it gives, or empty."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"


def pages() -> list[Path]:
    """Every document, upstream PR texts included."""
    docs = sorted((REPO / "docs").rglob("*.md"))
    inside = [REPO / "sam" / "README.md", REPO / "patches" / "README.md"]
    return [*(REPO / name for name in _OUTSIDE), *docs, *inside]


def links(page: Path) -> Iterator[tuple[int, str]]:
    """(line, target) of every link and image."""
    for token in _PARSER.parse(page.read_text()):
        for part in token.children or ():
            target = part.attrGet("href") or part.attrGet("src")
            if target:
                yield (token.map or [0])[0] + 1, str(target)


def anchors(page: Path) -> set[str]:
    """Ids that a heading gets, as GitHub and the site make them."""
    tokens = _PARSER.parse(page.read_text())
    titles = [
        "".join(p.content for p in after.children or () if p.type in ("text", "code_inline"))
        for token, after in zip(tokens, tokens[1:], strict=False)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks, each with the comment right before it."""
    before = ""
    for token in _PARSER.parse(page.read_text()):
        if token.type == "fence":
            reason = _NOT_RUN.search(before)
            line = (token.map or [0])[0] + 1
            yield Block(page, line, token.info.strip(), token.content, reason[1] if reason else "")
        before = token.content if token.type == "html_block" else ""
