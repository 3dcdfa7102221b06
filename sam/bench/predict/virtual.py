"""An asyncio loop whose time is simulated: sleeping costs nothing.

Owns the clock. Must never wait for real input: with nothing left to wake up, it is a deadlock
and an error.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Stuck(RuntimeError):
    """Everybody waits and nobody will wake them."""


class _Selector(selectors.SelectSelector):
    """Instead of waiting for input, moves the time on."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("nothing is scheduled any more")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and jumps to whatever is scheduled next, in seconds."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run(main: Coroutine[Any, Any, Any]) -> float:
    """Run to the end; returns how many seconds it would have taken. Raises Stuck."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)
        return runner.get_loop().time()
