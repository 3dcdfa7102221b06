"""`sam top`: what the sessions of a server do, as it happens.

Owns the refresh and the layout of one frame. Must never fail because the server was away for a
moment, nor ask it more often, or for more sessions, than it is told to: each look takes time of
the scheduler's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from sam.cli import output
from sam.cli.errors import CliError, Exit
from sam.cli.server import Server
from sam.cli.sessions import Record, page_of, tokens_on
from sam.cli.views import pools_of, sessions_table

_GONE = (Exit.NO_SERVER,)


class Frame(NamedTuple):
    """One look at the server: seconds since the first, the report, what changed since the
    look before, and why there was no answer."""

    time_s: float
    report: Record
    changed: dict[str, int]
    problem: str = ""


class Pace(NamedTuple):
    """How often and at how many of the newest sessions to look; no `n_frames`: without end."""

    interval_s: float
    n_frames: int | None
    n_sessions: int


def frames(server: Server, pace: Pace) -> Iterator[Frame]:
    """Looks at the server. Raises CliError if the first fails."""
    started = time.monotonic()
    last: Frame | None = None
    n_done = 0
    while pace.n_frames is None or n_done < pace.n_frames:
        if n_done:
            time.sleep(pace.interval_s)
        now_s = time.monotonic() - started
        try:
            n_known = (last.report if last else page_of(server, 0, 1))["n_sessions"]
            report = page_of(server, max(0, n_known - pace.n_sessions), pace.n_sessions)
            last = Frame(now_s, report, _changes(last, report))
        except CliError as error:
            if last is None or error.code not in _GONE:
                raise
            last = Frame(now_s, last.report, {}, error.message)
        n_done += 1
        yield last


def _changes(before: Frame | None, report: Record) -> dict[str, int]:
    """Counters that moved since the look before."""
    if before is None:
        return {}
    old, new = (_counters(one["summary"]) for one in (before.report, report))
    return {name: n - old.get(name, 0) for name, n in new.items() if n != old.get(name, 0)}


def _counters(summary: Record) -> dict[str, int]:
    return {**summary["counters"], **summary["actions"]}


def as_json(frame: Frame) -> dict[str, Any]:
    """A frame for scripts: totals, and the states of the sessions looked at."""
    states = Counter(record["state"] for record in frame.report["sessions"])
    return {
        "time_s": round(frame.time_s, 3),
        "n_sessions": frame.report["n_sessions"],
        "states": dict(states),
        "changed": frame.changed,
        "summary": frame.report["summary"],
        "problem": frame.problem,
    }


def frame_view(frame: Frame, url: str, n_rows: int) -> RenderableType:
    """A frame for people: pools, states, what happened, the largest live sessions."""
    records = frame.report["sessions"]
    states = Counter(record["state"] for record in records)
    shown = ", ".join(
        f"{n} {output.styled(state, output.STATE_STYLES)}" for state, n in states.most_common()
    )
    summary = frame.report["summary"]
    head = output.plain_table("", "")
    head.show_header = False
    head.add_row("[bold]sam top[/]", Text(url))
    left_out = frame.report["n_sessions"] - len(records)
    older = f"  [dim]and {left_out:,} older ones[/]" if left_out else ""
    head.add_row("sessions", (shown or "none yet") + older)
    for name, used, total in pools_of(summary):
        share = f"{used / total:4.0%}" if total else ""
        head.add_row(name, f"{output.bar(used, total)} {share} of {total:,} tokens")
    head.add_row("order", _order(summary))
    news = ", ".join(f"{name} +{n}" for name, n in sorted(frame.changed.items()))
    head.add_row("just now", Text(news or "nothing"))
    if frame.problem:
        head.add_row("[red]lost[/]", Text(f"{frame.problem}; what is below is old"))
    return Group(head, "", sessions_table(_largest(records, n_rows)))


def _order(summary: Record) -> str:
    """The order of eviction, and which brake is on."""
    retention = summary.get("retention", {})
    parts = [str(retention.get("policy", "?"))]
    if retention.get("lru_by_regret"):
        parts.append("[yellow]LRU for now: it misses less[/]")
    if retention.get("in_stock_order"):
        parts.append("[yellow]stock order[/]")
    if not retention.get("ends_trusted", True):
        parts.append("[yellow]ends not trusted: sessions come back[/]")
    if summary["errors"]:
        parts.append(f"[red]{summary['errors']} internal errors, see the server's log[/]")
    return "  ".join([*parts, f"{summary['pending_actions']} hints pending"])


def _largest(records: list[Record], n_rows: int) -> list[Record]:
    live = [record for record in records if record["state"] not in ("ended", "named")]
    live.sort(key=lambda record: (-tokens_on(record, "device"), record["session_id"]))
    return live[:n_rows]


def run(server: Server, pace: Pace, as_lines: bool) -> None:
    """Show frames until there are no more; with `as_lines` a JSON object a line."""
    looks = frames(server, pace)
    if as_lines:
        for frame in looks:
            output.print_json(as_json(frame))
        return
    console = output.console()
    if not console.is_terminal:
        for frame in looks:
            console.print(frame_view(frame, server.url, n_rows=50))
        return
    first = next(looks)
    view = frame_view(first, server.url, max(3, console.height - 12))
    with Live(view, console=console, auto_refresh=False, screen=pace.n_frames is None) as live:
        for frame in looks:
            rows = max(3, console.height - 12)
            live.update(frame_view(frame, server.url, rows), refresh=True)
