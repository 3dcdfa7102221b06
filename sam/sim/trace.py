"""Traces in memory: sessions of turns, each turn a path through content streams.

Owns the one form that all trace formats are read into. Must never hold text or times of
day, and never depend on a policy.

A *stream* is a run of content, counted in pages. A turn's prompt is a path of
`(stream, pages)`: the first so many pages of one stream, then of the next. Streams >= 0
are private to one run of the session, negative ones are shared by all that name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from sam.core.gaps import LABEL_OTHER

PAGE_TOKENS = 64

Path = tuple[tuple[int, int], ...]


class TraceError(Exception):
    """A trace file that cannot be used; the text says where and why."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `think_s` passes between the answer before it and its arrival.

    `took_s`: from its arrival to its answer, where that was recorded.
    `label`: why the session waits after it (`sam.core.gaps.label_of`). `says_end`: the
    client ends the session after it, truly or not. `says_idle_s`: the idle time that the client
    announces, true or not, whatever else is asked about hints. `subs`: sub-agents, each with
    its start in seconds after the answer before this turn. `order`: place in the file, where
    that decides between equal times.
    """

    path: Path
    input_tokens: int
    output_tokens: int = 0
    think_s: float = 0.0
    took_s: float | None = None
    label: str = LABEL_OTHER
    says_end: bool = False
    says_idle_s: float | None = None
    subs: tuple[tuple[float, Session], ...] = ()
    order: int = 0

    @property
    def pages(self) -> int:
        return sum(pages for _, pages in self.path)


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Turns in their order. `start_s` is used only when replayed as recorded."""

    name: str
    turns: tuple[Turn, ...]
    start_s: float = 0.0
    n_streams: int = 0


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace file. `as_recorded`: its order of requests is to be kept."""

    sessions: list[Session]
    page_tokens: int = PAGE_TOKENS
    as_recorded: bool = False

    @property
    def n_requests(self) -> int:
        return sum(1 for _ in self.turns())

    def turns(self) -> Iterator[Turn]:
        """All turns, sub-agents' among them."""
        for session in self.sessions:
            yield from _turns(session)


def _turns(session: Session) -> Iterator[Turn]:
    for turn in session.turns:
        yield turn
        for _, sub in turn.subs:
            yield from _turns(sub)


class SharedNames:
    """Numbers for shared content: -1, -2, … in the order of first use."""

    def __init__(self) -> None:
        self._ids: dict[object, int] = {}

    def __getitem__(self, name: object) -> int:
        return self._ids.setdefault(name, -1 - len(self._ids))


class ContextBuilder:
    """Paths of one session's prompts from "so much is kept of the one before".

    What follows a cut is new content, even if it is as long as what was cut.
    """

    def __init__(self, shared: int | None = None, shared_pages: int = 0) -> None:
        self._pieces: list[tuple[int, int]] = []
        self._shared = (shared, shared_pages) if shared is not None and shared_pages else None
        self.n_streams = 0
        self.pages = 0

    def turn(self, keep_pages: int, pages: int) -> Path:
        """The next prompt: `keep_pages` of the last one, new content up to `pages`."""
        if self._shared is not None:
            name, shared_pages = self._shared
            self._pieces.append((name, min(shared_pages, pages)))
            self.pages = keep_pages = self._pieces[0][1]
            self._shared = None
        keep_pages = min(keep_pages, pages, self.pages)
        grows = keep_pages == self.pages and bool(self._pieces) and self._pieces[-1][0] >= 0
        self._cut(self.pages - keep_pages)
        new = pages - keep_pages
        if grows and new:
            stream, length = self._pieces[-1]
            self._pieces[-1] = (stream, length + new)
        elif new:
            self._pieces.append((self.n_streams, new))
            self.n_streams += 1
        self.pages = pages
        return tuple(self._pieces)

    def _cut(self, pages: int) -> None:
        while pages:
            stream, length = self._pieces.pop()
            if length > pages:
                self._pieces.append((stream, length - pages))
                return
            pages -= length


def without_empty(sessions: Iterable[Session], where: str) -> list[Session]:
    """Sessions that have turns. Raises TraceError if none is left."""
    kept = [session for session in sessions if session.turns]
    if not kept:
        raise TraceError(f"{where}: no session with a request in it")
    return kept
