"""Reports of a server as tables for people.

Owns the layout of `sessions`, `session` and `hint`. Must never ask a server anything, and never
take markup from one: ids come from clients.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sam.cli import output
from sam.cli.hints import REMEDIES
from sam.cli.sessions import Record, by_lineage, tiers_of, tokens_on


def state_of(record: Record) -> str:
    """The state as markup, with the tool that the session waits for."""
    shown = output.styled(record["state"], output.STATE_STYLES)
    if record["waiting_tool"]:
        shown += f" [dim]waits for[/] {escape(record['tool_name'] or 'a tool')}"
    return shown


def sessions_table(records: list[Record]) -> Table:
    """One line a session, children below their parent."""
    tiers = tiers_of(records)
    owners = {record["tenant"] for record in records}
    columns = ["session", "state", *tiers, "shared", "idle", "life"]
    if len(owners) > 1:
        columns.append("owner")
    table = output.plain_table(*columns, right=(*tiers, "shared", "idle", "life"))
    for depth, record in by_lineage(records):
        tokens = record["tokens"]
        row: list[Any] = [Text("  " * depth + record["session_id"]), state_of(record)]
        row += [output.count(tokens[tier]["private"] if tier in tokens else None) for tier in tiers]
        row.append(output.count(max((each["shared"] for each in tokens.values()), default=0)))
        row += [output.seconds(record["idle_s"]), str(record["generation"])]
        table.add_row(*row, *([Text(record["tenant"])] if len(owners) > 1 else []))
    return table


def sessions_footer(report: Record, shown: list[Record]) -> str:
    """What the table leaves out, and the pools."""
    states = Counter(record["state"] for record in shown)
    parts = ", ".join(f"{n} {state}" for state, n in states.most_common())
    text = f"{len(shown)} of {report['n_sessions']} sessions" + (f": {parts}" if parts else "")
    pools = "; ".join(
        f"{name} {output.count(used)} of {output.count(total)} tokens"
        for name, used, total in pools_of(report["summary"])
    )
    return f"[dim]{text}. In use: {pools}. Per session and tier: private tokens.[/]"


def pools_of(summary: Record) -> list[tuple[str, int, int]]:
    """(name, tokens in use, tokens in all) of each pool."""
    device = summary["device"]
    used = device["evictable"] + device["protected"]
    pools = [("device", used, used + device["free"])]
    host = summary.get("host")
    if host:
        pools.append(("host", host["total"] - host["free"], host["total"]))
    return pools


def session_view(record: Record) -> RenderableType:
    """One session: facts, lineage, tokens per tier."""
    facts = output.plain_table("", "")
    facts.show_header = False
    facts.add_row("session", Text(record["session_id"], style="bold"))
    facts.add_row("owner", Text(record["tenant"]))
    facts.add_row("state", state_of(record))
    facts.add_row("idle", output.seconds(record["idle_s"]))
    facts.add_row("life", f"{record['generation']} [dim](times the id was opened)[/]")
    draining = f"[dim]and {record['n_draining']} of old lives[/]"
    facts.add_row("running", f"{record['n_running']} {draining}")
    above = record["ancestors"]
    facts.add_row("parents", Text(" › ".join(above) if above else "— it is a root"))
    facts.add_row("children", Text(_some(record["children"])))
    numbers = ("private", "shared", "sum")
    tiers = output.plain_table("tier", *numbers, right=numbers)
    for tier, tokens in record["tokens"].items():
        private, shared = tokens["private"], tokens["shared"]
        total = tokens_on(record, tier)
        tiers.add_row(tier, output.count(private), output.count(shared), output.count(total))
    return Group(facts, "", tiers)


def _some(names: list[str], limit: int = 12) -> str:
    more = len(names) - limit
    return (", ".join(names[:limit]) or "—") + (f", and {more} more" if more > 0 else "")


def outcome_table(message: Record) -> RenderableType:
    """What became of a hint, with what to do where nothing did."""
    numbers = ("device", "host", "pool")
    table = output.plain_table("action", "status", *numbers, "span", "why", right=numbers)
    table.columns[-1].no_wrap = False
    for action in message["actions"]:
        tokens = action.get("tokens") or {}
        span = action.get("span")
        why = action.get("reason") or ""
        explained = action.get("detail") or REMEDIES.get(why, "")
        table.add_row(
            Text(action["action_type"]),
            output.styled(action["status"], output.STATUS_STYLES),
            *(output.count(tokens.get(tier)) for tier in numbers),
            "" if not span else f"{span[0]:,}:{span[1]:,}",
            Text(f"{why}: {explained}" if why and explained else why or explained),
        )
    return Group(table, Text(f"message {message['message_id']}", style="dim"))
