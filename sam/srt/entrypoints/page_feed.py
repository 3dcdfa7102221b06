"""What the live page shows, kept in the server process while somebody looks.

Owns the copy of the scheduler's sessions, and how often the scheduler is asked: at most once a
second for all viewers together, and never while nobody looks. Must never make a viewer wait
for a busy scheduler once there is something to show.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
PATIENCE_S = 0.4
"""How long a viewer waits for news before it gets what is known."""
SWEEP, SWEEP_WHILE_FILLING = 100, 500
MAX_ROWS = 10_000
ROWS_PER_REPLY = 2_000
MAX_EVENTS = 400
FIRST_EVENTS = 120
MAX_BUCKETS = 180
WATCH_S = 5.0
MAX_WATCHED = 8
"""Stories that are asked for at once; the others have their turn next."""
MAX_WATCHES = 64

Key = tuple[str, str]
_encode = msgspec.json.Encoder().encode


class _Row:
    """One session as JSON; `version`: the number of its last change, among all changes; `lap`
    of the sweep in which it was last seen."""

    __slots__ = ("json", "lap", "version")

    def __init__(self, json: bytes, version: int, lap: int) -> None:
        self.json = json
        self.version = version
        self.lap = lap


class PageFeed:
    """`ask(**payload)` queries the scheduler for `page_report`; it may raise TimeoutError."""

    def __init__(
        self,
        ask: Callable[..., Awaitable[dict[str, Any]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")
        self._answered_at: float | None = None
        self.n_asked = 0
        self.problem = ""
        self._watched: OrderedDict[Key, float] = OrderedDict()
        """Until when each is of interest; who waited longest for a story comes first."""
        self._start_over("")

    def _start_over(self, epoch: str) -> None:
        """Another scheduler, or the first: nothing is known of it."""
        self.epoch = epoch
        self.version = 0
        self._rows: OrderedDict[Key, _Row] = OrderedDict()
        self._gone: deque[tuple[int, Key]] = deque()
        self._forgotten = 0
        """The number of the newest change that took a row away and is no longer in `_gone`."""
        self._events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_EVENTS)
        self._series: deque[dict[str, float]] = deque(maxlen=MAX_BUCKETS)
        self._stories: dict[Key, list[dict[str, Any]]] = {}
        self._cursor = {"seq": 0, "event": 0, "sweep_at": 0, "bucket_s": 0.0}
        self._lap = 0
        self._now_s = 0.0
        self._n_sessions = 0
        self._summary: dict[str, Any] | None = None
        self._device_total = 0

    def knows(self, key: Key) -> bool:
        """Whether the session is one that the page shows."""
        return key in self._rows

    async def look(
        self,
        epoch: str,
        version: int,
        event: int,
        bucket_s: float,
        watch: Key | None,
        since: int = 0,
    ) -> dict[str, Any]:
        """News for one viewer, who gives back what the last answer called `epoch`, `version`,
        `since`, `next_event` and `bucket_s`; where the answer is `afresh`, the viewer's rows are
        void. Raises TimeoutError if nothing is known yet."""
        if watch is not None:
            self._watch(watch)
        await self._refresh()
        if self._summary is None:
            raise TimeoutError
        if epoch != self.epoch:
            version, since, event, bucket_s = 0, 0, 0, 0.0
        afresh = max(version, since) < self._forgotten or not version
        if afresh:
            version, since = 0, self.version
        rows, gone, latest = self._changes_since(version)
        events = [(n, e) for n, e in self._events if n >= event][-FIRST_EVENTS:]
        return {
            "epoch": self.epoch,
            "afresh": afresh,
            "since": since,
            "version": latest,
            "more": latest < self.version,
            "now_s": self._now_s,
            "age_s": round(self._clock() - (self._answered_at or 0.0), 3),
            "problem": self.problem,
            "n_sessions": self._n_sessions,
            "n_known": len(self._rows),
            "sessions": rows,
            "gone": gone,
            "next_event": self._cursor["event"],
            "events": [e for _, e in events],
            "series": [b for b in self._series if b["t"] >= bucket_s],
            "story": None if watch is None else self._stories.get(watch),
            "summary": self._summary,
            "device_total": self._device_total,
        }

    # -- inside -------------------------------------------------------------------

    def _watch(self, key: Key) -> None:
        """Somebody reads the story of `key`; one that nobody read before is next."""
        is_new = key not in self._watched
        self._watched[key] = self._clock() + WATCH_S
        if is_new:
            self._watched.move_to_end(key, last=False)
        if len(self._watched) > MAX_WATCHES:
            self._watched.popitem()

    def _next_watched(self) -> list[Key]:
        """Whose stories are to be asked for now; they go to the end of the line."""
        now = self._clock()
        for key in [key for key, until in self._watched.items() if until <= now]:
            del self._watched[key]
        turn = list(islice(self._watched, MAX_WATCHED))
        for key in turn:
            self._watched.move_to_end(key)
        return turn

    async def _refresh(self) -> None:
        """Ask if it is time to; wait a little for the answer, longer for the first one."""
        now = self._clock()
        if self._asking is None and now - self._asked_at >= INTERVAL_S:
            self._asked_at = now
            self.n_asked += 1
            self._asking = asyncio.get_running_loop().create_task(self._ask_once())
        if self._asking is not None:
            patience_s = None if self._summary is None else PATIENCE_S
            await asyncio.wait([self._asking], timeout=patience_s)

    async def _ask_once(self) -> None:
        try:
            filling = len(self._rows) < 0.9 * min(self._n_sessions, MAX_ROWS) or not self.epoch
            report = await self._ask(
                **self._cursor,
                epoch=self.epoch,
                sweep=SWEEP_WHILE_FILLING if filling else SWEEP,
                watch=self._next_watched(),
            )
            self._take(report)
            self.problem, self._answered_at = "", self._clock()
        except TimeoutError:
            self.problem = "busy"
        except Exception:
            logger.exception("sam: the live page could not be updated")
            self.problem = "internal error, see the server's log"
        finally:
            self._asking = None

    def _take(self, report: dict[str, Any]) -> None:
        """Make what the scheduler said ours."""
        if report["epoch"] != self.epoch:
            self._start_over(report["epoch"])
        for n, record in enumerate(report["sessions"]):
            is_change = n < report["n_changed"]
            self._put((record["tenant"], record["id"]), _encode(record), is_change)
        for tenant, session_id in report["gone"]:
            self._drop((tenant, session_id))
        if report["sweep_next"] == 0:
            self._end_lap()
        for n, event in enumerate(report["events"], report["first_event"]):
            self._events.append((n, event))
        for bucket in report["series"]:
            if self._series and self._series[-1]["t"] == bucket["t"]:
                self._series.pop()
            self._series.append(bucket)
        stories = {tuple(each["key"]): each["events"] for each in report["stories"]}
        self._stories = {
            key: events for key, events in (self._stories | stories).items() if key in self._watched
        }
        self._cursor = {
            "seq": report["seq"],
            "event": report["first_event"] + len(report["events"]),
            "sweep_at": report["sweep_next"],
            "bucket_s": self._series[-1]["t"] if self._series else 0.0,
        }
        self._now_s, self._n_sessions = report["now_s"], report["n_sessions"]
        self._summary = report["summary"]
        self._device_total = report["device_total"]

    def _put(self, key: Key, json: bytes, is_change: bool) -> None:
        """Keep a row. Where there are too many, one to which something happened displaces the
        one that is unchanged for longest; what merely came round in the sweep displaces none,
        or all would take turns for ever."""
        row = self._rows.get(key)
        if row is not None and row.json == json:
            row.lap = self._lap
            return
        if row is None and not is_change and len(self._rows) >= MAX_ROWS:
            return
        self.version += 1
        self._rows[key] = _Row(json, self.version, self._lap)
        self._rows.move_to_end(key)
        if len(self._rows) > MAX_ROWS:
            self._drop(next(iter(self._rows)))

    def _drop(self, key: Key) -> None:
        if self._rows.pop(key, None) is not None:
            self.version += 1
            self._gone.append((self.version, key))
            if len(self._gone) > MAX_ROWS:
                self._forgotten, _ = self._gone.popleft()

    def _end_lap(self) -> None:
        """The sweep has been at every session: what it missed twice is no more."""
        for key in [key for key, row in self._rows.items() if row.lap < self._lap - 1]:
            self._drop(key)
        self._lap += 1

    def _changes_since(self, version: int) -> tuple[list[msgspec.Raw], list[Key], int]:
        """Rows and keys that changed after `version`, the oldest changes first, and the
        version up to which that is all. No key that is gone is that of a row: some come back."""
        newer = []
        for row in reversed(self._rows.values()):
            if row.version <= version:
                break
            newer.append(row)
        latest = self.version
        if len(newer) > ROWS_PER_REPLY:
            newer = newer[-ROWS_PER_REPLY:]
            latest = newer[0].version
        gone = [key for n, key in self._gone if version < n <= latest and key not in self._rows]
        return [msgspec.Raw(row.json) for row in reversed(newer)], gone, latest
