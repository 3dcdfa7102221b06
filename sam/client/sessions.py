"""Agent sessions over an OpenAI-style client: lineage on every call, hints at the right moments.

Owns the session tree as the agent names it, and when a wait is worth a hint. Must never change
an answer, raise because of a hint, or wait for one.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from sam.client.hint import agent_hint, idle_seconds, with_hint
from sam.client.sender import Job, LoopSender, SendStats, ThreadSender
from sam.client.tool_times import ToolTimes


@dataclass(frozen=True)
class Timing:
    """Seconds that decide when a wait is worth a request. `lead_s`: how long before the expected
    end of a wait the prefetch goes out."""

    min_wait_s: float = 0.5
    offload_after_s: float = 5.0
    lead_s: float = 1.0
    request_timeout_s: float = 1.5


class AgentSessions:
    """Sessions of one client, an `OpenAI` or `AsyncOpenAI` or anything with the same
    `.chat.completions.create`. Thread-safe.

    `model` is what management requests name; by default that of the last `create`. `tool_times`
    may hold estimates of an earlier run. `on_reply(session_id, reply)` sees the answers to
    management requests, on the sender's thread or loop. `is_async` overrides what is found out
    about the client.
    """

    def __init__(
        self,
        client: Any,
        model: str | None = None,
        *,
        tool_times: ToolTimes | None = None,
        timing: Timing | None = None,
        on_reply: Callable[[str, Any], None] | None = None,
        is_async: bool | None = None,
    ) -> None:
        self.tool_times = ToolTimes() if tool_times is None else tool_times
        self.timing = Timing() if timing is None else timing
        self._create = client.chat.completions.create
        self._model = model
        if is_async is None:
            is_async = inspect.iscoroutinefunction(inspect.unwrap(self._create))
        quick = _without_retries(client).chat.completions.create
        self._sender = (LoopSender if is_async else ThreadSender)(quick, on_reply)
        self._lock = threading.Lock()
        self._sessions: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()

    @property
    def stats(self) -> SendStats:
        """Counters of management requests so far."""
        return self._sender.stats

    def session(self, session_id: str, *, parent: str | None = None) -> Session:
        """The session of this id, the same object as long as somebody holds it.

        `parent` is the id of the session that it belongs to; absent, it is a root. What is no
        string, a UUID for example, counts as its `str`.
        """
        session_id, parent = str(session_id), None if parent is None else str(parent)
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                session = self._sessions[session_id] = Session(self, session_id, parent)
        return session

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait for the management requests asked for so far (synchronous client). Raises TypeError
        for an asynchronous one."""
        if isinstance(self._sender, LoopSender):
            raise TypeError("an asynchronous client: await aflush()")
        return self._sender.flush(timeout_s)

    async def aflush(self, timeout_s: float = 5.0) -> bool:
        """The same beside an event loop, for either client."""
        if isinstance(self._sender, LoopSender):
            return await self._sender.flush(timeout_s)
        return await asyncio.to_thread(self._sender.flush, timeout_s)

    def _seconds(self, value: object) -> float | None:
        """What the agent expects, where it can be used."""
        seconds = None if value is None else idle_seconds(value)
        if value is not None and seconds is None:
            self._sender.ignored(f"no usable number of seconds, a {type(value).__name__}")
        return seconds

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """What fails inside is counted and does not reach the agent."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._sender.ignored(error)

    def _manage(self, session_id: str, hint: dict[str, Any], delay_s: float = 0.0) -> Job:
        kwargs = {
            "model": self._model or "default",
            "messages": [],
            "timeout": self.timing.request_timeout_s,
            "extra_body": {"agent_hint": hint},
        }
        return self._sender.send(session_id, kwargs, delay_s)


class Session:
    """One agent's context. Leaving the `with` block ends it, and everything below it."""

    def __init__(self, owner: AgentSessions, session_id: str, parent_id: str | None) -> None:
        self.id = session_id
        self.parent_id = parent_id
        self._owner = owner
        self._lock = threading.Lock()
        self._waits: dict[object, float | None] = {}
        self._told_until = -math.inf
        self._prefetch: Job | None = None
        self._is_over = False

    def child(self, name: str) -> Session:
        """The sub-agent `name`: id `<id>:<name>`, this session its parent."""
        return self._owner.session(f"{self.id}:{name}", parent=self.id)

    def create(self, *, expected_idle_s: float | None = None, **kwargs: Any) -> Any:
        """`chat.completions.create` as part of this session; returns what the client returns,
        a stream too. `expected_idle_s`: when the caller knows already how long it will wait."""
        kwargs = self._begin(kwargs, expected_idle_s)
        return self._owner._create(**kwargs)

    async def acreate(self, *, expected_idle_s: float | None = None, **kwargs: Any) -> Any:
        """The same for an asynchronous client. A synchronous one answers, too, but holds the
        loop."""
        if isinstance(self._owner._sender, LoopSender):
            self._owner._sender.note_loop()
        kwargs = self._begin(kwargs, expected_idle_s)
        answer = self._owner._create(**kwargs)
        return await answer if inspect.isawaitable(answer) else answer

    def tool(self, name: str, *, expected_s: float | None = None) -> ToolWait:
        """Around a tool's run, `with` or `async with`: learns how long this tool takes, and tells
        the server when the session will be back. `expected_s` overrides what was learned."""
        if isinstance(name, str):
            return ToolWait(self, name, expected_s)
        self._owner._sender.ignored(f"a tool's name that is a {type(name).__name__}")
        return ToolWait(self, None, expected_s)

    def idle(self, expected_s: float | None = None) -> None:
        """The session waits for something else than a tool: a person, another agent."""
        with self._owner._quietly():
            self._wait_begins(object(), self._owner._seconds(expected_s), offload=True)

    def offload(self, *, subtree: bool = False) -> None:
        """Its device copy may go first; with `subtree`, that of all sessions below it too."""
        self._edit("offload", subtree)

    def resume(self, *, subtree: bool = False) -> None:
        """It will run soon: bring it back."""
        self._stop_waiting()
        self._edit("prefetch", subtree)

    def end(self) -> None:
        """It is over, and what is below it: free what only they use. Once; a later `create`
        opens the id anew."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._stop_waiting()
        self._edit("evict", False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Waits for the request, for a short time: the loop may end right after."""
        self.end()
        timeout_s = self._owner.timing.request_timeout_s
        if isinstance(self._owner._sender, LoopSender):
            await self._owner._sender.flush(timeout_s, self.id)

    def _begin(self, kwargs: dict[str, Any], expected_idle_s: float | None) -> dict[str, Any]:
        self._stop_waiting()
        with self._lock:
            self._is_over = False
        if kwargs.get("model"):
            self._owner._model = kwargs["model"]
        idle_s = self._owner._seconds(expected_idle_s)
        hint = agent_hint(self.id, self.parent_id, expected_idle_s=idle_s)
        return with_hint(kwargs, hint)

    def _edit(self, kind: str, subtree: bool) -> None:
        parent = self.id if subtree else self.parent_id
        self._owner._manage(self.id, agent_hint(self.id, parent, edits=[kind], manage_only=True))

    def _wait_begins(self, wait: object, expected_s: float | None, *, offload: bool) -> None:
        """`offload`: also move it down when nobody knows how long it takes."""
        with self._lock:
            self._waits[wait] = None if expected_s is None else time.monotonic() + expected_s
        self._tell(offload)

    def _wait_ends(self, wait: object) -> None:
        """The longest of parallel waits may have ended early: then the next longest counts. After
        the last one an inference follows, or a wait that says how long it takes."""
        with self._lock:
            self._waits.pop(wait, None)
            goes_on = any(until is not None for until in self._waits.values())
        if goes_on:
            self._tell(offload=False)

    def _tell(self, offload: bool) -> None:
        """What the server should know of the waits, if that is not what it was told last."""
        now, timing = time.monotonic(), self._owner.timing
        with self._lock:
            until = max((u for u in self._waits.values() if u is not None), default=None)
            if until is None and not offload:
                return
            if until is not None and (
                abs(until - self._told_until) <= timing.min_wait_s
                or until - now < timing.min_wait_s
            ):
                return
            self._told_until = -math.inf if until is None else until
            rearm, self._prefetch = self._prefetch, None
        is_down = rearm is not None and rearm.when > now
        if rearm is not None:
            rearm.cancel()
        is_long = until is None or until - now >= timing.offload_after_s
        edits = ["offload"] if is_long else []
        idle_s = None if until is None else until - now
        self._owner._manage(self.id, self._hint(edits, idle_s))
        if until is not None and (is_long or is_down):
            delay_s = until - now - timing.lead_s
            job = self._owner._manage(self.id, self._hint(["prefetch"]), delay_s)
            with self._lock:
                self._prefetch = job

    def _hint(self, edits: list[str], idle_s: float | None = None) -> dict[str, Any]:
        return agent_hint(
            self.id, self.parent_id, edits=edits, manage_only=True, expected_idle_s=idle_s
        )

    def _stop_waiting(self) -> None:
        """An inference loads what it needs by itself: a prefetch now would only be late."""
        with self._lock:
            self._waits.clear()
            self._told_until = -math.inf
            job, self._prefetch = self._prefetch, None
        if job is not None:
            job.cancel()


class ToolWait:
    """The time one tool runs. A cancelled run teaches nothing, a failed one does; nor does a tool
    whose name is no string."""

    def __init__(self, session: Session, name: str | None, expected_s: float | None) -> None:
        self._session, self._name, self._expected_s = session, name, expected_s
        self._began = 0.0

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        owner = self._session._owner
        with owner._quietly():
            expected_s = owner._seconds(self._expected_s)
            if expected_s is None and self._name is not None:
                expected_s = owner._seconds(owner.tool_times.estimate_s(self._name))
            self._session._wait_begins(self, expected_s, offload=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        took_s = time.monotonic() - self._began
        owner = self._session._owner
        cancelled = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)
        with owner._quietly():
            self._session._wait_ends(self)
        if self._name is not None and (kind is None or not issubclass(kind, cancelled)):
            with owner._quietly():
                owner.tool_times.learn(self._name, took_s)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *exc_info: Any) -> None:
        self.__exit__(*exc_info)


def _without_retries(client: Any) -> Any:
    """The client with retries off where it can say so, as the `openai` SDK can: a hint that is
    late is worth nothing."""
    with_options = getattr(client, "with_options", None)
    return with_options(max_retries=0) if callable(with_options) else client
