"""When a request is over, as the server process sees it.

Owns the waiting for that. Must never keep a request longer than upstream does, nor take the
end of one request for that of another: clients choose message ids, so only `rid` tells.
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
        self._ends: dict[str, list[RequestEnd]] = {}

    def announce(self, rid: object) -> None:
        """The request of that id has finished."""
        for end in self._ends.get(rid, ()) if isinstance(rid, str) else ():
            end.finished.set()

    def expect(self, obj: Any) -> RequestEnd:
        """The end of the request of `obj`, a GenerateReqInput; call before it can finish and
        after upstream gave it its `rid`, which it does before the event loop runs anything
        else. Whoever expects it must wait for it."""
        end = RequestEnd(self, obj.rid)
        for rid in end.rids:
            self._ends.setdefault(rid, []).append(end)
        return end

    def is_known(self, rid: str) -> bool:
        """Whether upstream has the request."""
        return rid in self._manager.rid_to_state

    def forget(self, end: RequestEnd) -> None:
        for rid in end.rids:
            self._ends[rid].remove(end)
            if not self._ends[rid]:
                del self._ends[rid]


class RequestEnd:
    """One request, or several that upstream made of one body, until none of them is known."""

    __slots__ = ("_ends", "finished", "rids")

    def __init__(self, ends: RequestEnds, rid: object) -> None:
        self._ends = ends
        rids = rid if isinstance(rid, list) else [rid]
        self.rids = list(dict.fromkeys(one for one in rids if isinstance(one, str)))
        self.finished = asyncio.Event()

    async def wait(self) -> None:
        """Return when the request is over, however it ended."""
        try:
            while any(map(self._ends.is_known, self.rids)):
                try:
                    await asyncio.wait_for(self.finished.wait(), _LOOK_EVERY_S)
                except TimeoutError:
                    continue
                if len(self.rids) == 1:
                    return
                self.finished.clear()
        finally:
            self._ends.forget(self)
