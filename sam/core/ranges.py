"""Ranges of messages and tools as spans of tokens: clamping, common prefixes, what is certain.

Owns when two renderings of a window prove an offset. Must never render or tokenise itself
(a `Window` does), count marker tokens, or answer where the renderings do not agree: what is
not certain is a HintError with reason `unresolvable_range`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from sam.core.validation import TOKEN_BYTES, HintError, HintReason

SEAM_TOKENS = 16
"""How far tokens may differ at a cut because its two sides were merged or closed there."""
_BLOCK_TOKENS = 1_024


class Unrenderable(Exception):
    """The template refuses this conversation; the text says why."""


class Window(Protocol):
    """A conversation that can be rendered in part. Each method returns token ids and raises
    Unrenderable; `number` is 0-based."""

    def full(self) -> Sequence[int]:
        """As inference renders it, the generation prompt included."""

    def messages_before(self, number: int) -> Sequence[int]:
        """The messages before `number` and all tools, no generation prompt."""

    def other_message(self, number: int) -> tuple[Sequence[int], str]:
        """The same with another message `number`, in a conversation of another length; and
        the text that the other message starts with."""

    def tools_before(self, number: int) -> Sequence[int]:
        """All messages and the tools before `number`, as inference would render that."""

    def text_of(self, tokens: Sequence[int]) -> str:
        """The tokens' text, special tokens included."""

    def is_markup(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens are special ones and white space only."""


class TokenSpan(msgspec.Struct, frozen=True, kw_only=True):
    """[start, end) in tokens of the full window; None: to the end of the branch.

    `token_ids`: the whole window, as little-endian int32: pages reach beyond a boundary.
    """

    start: int
    end: int | None
    token_ids: bytes


def clamp_range(start: int | None, end: int | None, n_items: int) -> tuple[int, int]:
    """Half-open item range inside [0, n_items). Raises HintError `empty_range`."""
    first = start or 0
    last = n_items if end is None else min(end, n_items)
    if first >= last:
        detail = f"[{first}, {last}) of {n_items} selects nothing"
        raise HintError(HintReason.EMPTY_RANGE, detail)
    return first, last


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length in tokens of the longest common prefix."""
    n = min(len(a), len(b))
    low = 0
    while low < n and a[low : low + _BLOCK_TOKENS] == b[low : low + _BLOCK_TOKENS]:
        low += _BLOCK_TOKENS
    for i in range(low, min(n, low + _BLOCK_TOKENS)):
        if a[i] != b[i]:
            return i
    return n


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    packed = array("i", tokens)
    if packed.itemsize != TOKEN_BYTES:
        raise RuntimeError(f"C int has {packed.itemsize} bytes here")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class RangeResolver:
    """Spans of one window; renders each boundary once."""

    def __init__(self, window: Window, *, n_messages: int, n_tools: int) -> None:
        self._window = window
        self._n = {"messages": n_messages, "tools": n_tools}
        self._full: Sequence[int] | None = None
        self._token_ids: bytes | None = None
        self._starts: dict[tuple[str, int], int] = {}

    @property
    def n_boundaries(self) -> int:
        """Boundaries rendered so far."""
        return len(self._starts)

    def resolve(
        self, target: Literal["messages", "tools"], start: int | None, end: int | None
    ) -> TokenSpan:
        """The span of a range. Raises HintError `empty_range` or `unresolvable_range`.

        A range up to the last message is open: what was generated after it goes as well. So
        is every range of tools: nothing behind the first changed tool is valid any more.
        """
        first, last = clamp_range(start, end, self._n[target])
        lower = self._boundary(target, first)
        if target == "tools" or last == self._n[target]:
            return TokenSpan(start=lower, end=None, token_ids=self._packed())
        upper = self._boundary(target, last)
        if upper <= lower:
            raise _unresolvable(f"messages {first} and {last} start at the same token")
        return TokenSpan(start=lower, end=upper, token_ids=self._packed())

    def _packed(self) -> bytes:
        if self._token_ids is None:
            self._token_ids = pack_tokens(self._rendered())
        return self._token_ids

    def _rendered(self) -> Sequence[int]:
        if self._full is None:
            try:
                self._full = self._window.full()
            except Unrenderable as error:
                raise _unresolvable(str(error)) from None
        return self._full

    def _boundary(self, target: str, number: int) -> int:
        known = self._starts.get((target, number))
        if known is None:
            find = self._tool_start if target == "tools" else self._message_start
            known = self._starts[target, number] = find(number)
        return known

    def _tool_start(self, number: int) -> int:
        full = self._rendered()
        try:
            without = self._window.tools_before(number)
        except Unrenderable as error:
            raise _unresolvable(str(error)) from None
        start = common_prefix(full, without)
        if start == len(full):
            raise HintError(HintReason.EMPTY_RANGE, "the template does not render these tools")
        return start

    def _message_start(self, number: int) -> int:
        """Where the cut window ends, if the full one goes on from there. If it does not, the
        template treats what is before the cut by what is behind it: then what a window of
        another length with another message there has in common; but for that message's
        opening, where all that the cut window has more is a closing."""
        full = self._rendered()
        closed_at: int | None = None
        try:
            before = self._window.messages_before(number)
            cut = common_prefix(full, before)
            if self._continues(full, before, cut):
                return cut
            if self._window.is_markup(before[cut : cut + SEAM_TOKENS + 1]):
                closed_at = cut
        except Unrenderable:
            pass
        try:
            other, mark = self._window.other_message(number)
        except Unrenderable as error:
            raise _unresolvable(str(error)) from None
        split = common_prefix(full, other)
        if not self._splits_at(full, other, split, mark):
            raise _unresolvable(f"the template rewrites what is before message {number}")
        if closed_at is not None and 0 <= split - closed_at <= SEAM_TOKENS:
            return closed_at
        return split

    def _continues(self, full: Sequence[int], before: Sequence[int], cut: int) -> bool:
        """Whether the full window starts with the cut one, but for merges at the seam."""
        rest = before[cut:]
        if len(rest) > SEAM_TOKENS:
            return False
        ahead = full[cut : cut + 2 * SEAM_TOKENS]
        return self._window.text_of(ahead).startswith(self._window.text_of(rest))

    def _splits_at(self, full: Sequence[int], other: Sequence[int], split: int, mark: str) -> bool:
        """Whether two windows are the same up to the text of the message that was swapped."""
        there = self._window.text_of(other[split : split + SEAM_TOKENS])
        here = self._window.text_of(full[split : split + SEAM_TOKENS])
        at = there.find(mark)
        opener = there[:at]
        return 0 <= at <= len(mark) and (here.startswith(opener) or opener.isspace())


def _unresolvable(detail: str) -> HintError:
    return HintError(HintReason.UNRESOLVABLE_RANGE, detail)
