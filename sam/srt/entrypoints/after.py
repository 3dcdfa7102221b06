"""When a request is over, as the server process sees it.

Owns the waiting for that. Must never keep a request longer than upstream does.
"""

from __future__ import annotations

import asyncio
from typing import Any

_LOOK_EVERY_S = 0.2


class RequestEnds:
    """Waits for ends of requests. A finished one is announced; one that was aborted before
    it ran is not, so upstream's table of requests is looked at as well."""

    def __init__(self, tokenizer_manager: Any) -> None:
        self._manager = tokenizer_manager
        self._ends: dict[str, asyncio.Event] = {}

    def announce(self, name: str) -> None:
        """The request of that name has finished."""
        end = self._ends.get(name)
        if end is not None:
            end.set()

    def expect(self, name: str) -> None:
        """Call before the request can finish."""
        self._ends[name] = asyncio.Event()

    async def wait(self, name: str, obj: Any) -> None:
        """Return when the expected request `name` is over, however it ended.

        `obj` is its GenerateReqInput; upstream gives it its `rid` and takes it up before the
        event loop runs anything else.
        """
        end = self._ends[name]
        try:
            while not end.is_set() and obj.rid in self._manager.rid_to_state:
                try:
                    await asyncio.wait_for(end.wait(), _LOOK_EVERY_S)
                except TimeoutError:
                    continue
        finally:
            del self._ends[name]
