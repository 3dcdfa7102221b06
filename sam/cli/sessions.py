"""Sessions as a server reports them: fetched page by page, filtered, put in order of lineage.

Owns what is asked of `/sessions`. Must never format anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sam.cli.errors import CliError, Exit
from sam.cli.server import Server

PAGE = 1_000
Record = dict[str, Any]


def page_of(server: Server, offset: int, limit: int) -> Record:
    """One page with the server's totals; `sessions`, `n_sessions`, `summary`."""
    report = server.get("/sessions", offset=offset, limit=limit)
    if not isinstance(report, dict) or "sessions" not in report or "summary" not in report:
        raise CliError(Exit.NOT_SAM, f"{server.url}/sessions is not what sam reports")
    return report


def report_of(server: Server, offset: int = 0, limit: int | None = None) -> Record:
    """The report with `limit` sessions from `offset`, or all of them."""
    size = PAGE if limit is None else min(limit, PAGE)
    report = page_of(server, offset, max(size, 1))
    found = report["sessions"][:limit]
    page = report["sessions"]
    while len(page) == size and (limit is None or len(found) < limit):
        size = PAGE if limit is None else min(limit - len(found), PAGE)
        page = page_of(server, offset + len(found), size)["sessions"]
        found += page
    return report | {"sessions": found}


def tokens_on(record: Record, tier: str) -> int:
    """Private and shared tokens of a session on one tier."""
    return sum(record.get("tokens", {}).get(tier, {}).values())


def tiers_of(records: Iterable[Record]) -> list[str]:
    """Tiers that the server knows, as it orders them."""
    return list(dict.fromkeys(tier for record in records for tier in record.get("tokens", {})))


def key_of(record: Record) -> tuple[str, str]:
    return record["tenant"], record["session_id"]


def by_lineage(records: list[Record]) -> list[tuple[int, Record]]:
    """(depth, record) with children below their parent; a parent that is not among the
    records counts as a root."""
    known = {key_of(record) for record in records}
    below: dict[tuple[str, str] | None, list[Record]] = {}
    for record in records:
        parent = (record["tenant"], record["parent_session_id"])
        below.setdefault(parent if parent in known else None, []).append(record)
    ordered = []
    waiting = [(0, record) for record in reversed(below.get(None, []))]
    while waiting:
        depth, record = waiting.pop()
        ordered.append((depth, record))
        children = below.get(key_of(record), [])
        waiting += [(depth + 1, child) for child in reversed(children)]
    return ordered


def story_of(records: list[Record], session_id: str, owner: str | None) -> list[Record]:
    """The sessions of that id, one per owner, with `ancestors` (root first) and `children`.

    Raises CliError if there is none.
    """
    by_key = {key_of(record): record for record in records}
    found = []
    for record in records:
        if record["session_id"] != session_id or owner not in (None, record["tenant"]):
            continue
        ancestors: list[str] = []
        parent = record["parent_session_id"]
        while parent is not None and parent not in ancestors:
            ancestors.insert(0, parent)
            above = by_key.get((record["tenant"], parent))
            parent = above["parent_session_id"] if above else None
        children = [
            other["session_id"]
            for other in records
            if (other["tenant"], other["parent_session_id"]) == key_of(record)
        ]
        found.append(record | {"ancestors": ancestors, "children": children})
    if not found:
        text = f"the server knows no session {session_id!r}" + (f" of {owner}" if owner else "")
        raise CliError(Exit.UNKNOWN, text, "'sam sessions' lists them; old ones are forgotten")
    return found
