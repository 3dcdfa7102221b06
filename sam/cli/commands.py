"""Commands that look at a server: sessions, session, tree, top.

Owns their options. Must never change anything on the server.
"""

from __future__ import annotations

from typing import Annotated

import typer

from sam.cli import output
from sam.cli import top as top_view
from sam.cli.options import DEFAULT_URL, ApiKey, Json, SessionId, Timeout, Url
from sam.cli.server import Server
from sam.cli.sessions import report_of, story_of
from sam.cli.tree import of_session, radix_tree
from sam.cli.views import session_view, sessions_footer, sessions_table
from sam.core.lineage import SessionState

Owner = Annotated[
    str | None, typer.Option("--owner", help="Only of this owner, as the list shows it.")
]


def sessions(
    state: Annotated[
        list[SessionState] | None,
        typer.Option("--state", help="Only these states; may be repeated."),
    ] = None,
    owner: Owner = None,
    offset: Annotated[int, typer.Option(min=0, help="Leave out the first ones.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="At most as many.")] = 1_000,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """List the sessions: state, lineage, tokens per tier."""
    report = report_of(Server(url, api_key, timeout), offset, limit)
    states = {one.value for one in state or ()}
    shown = [
        record
        for record in report["sessions"]
        if (not states or record["state"] in states) and owner in (None, record["tenant"])
    ]
    if as_json:
        output.print_json(report | {"sessions": shown})
        return
    console = output.console()
    console.print(sessions_table(shown))
    console.print(sessions_footer(report, shown))


def session(
    session_id: SessionId,
    owner: Owner = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Show one session; with several owners of the id, each of them."""
    report = report_of(Server(url, api_key, timeout))
    found = story_of(report["sessions"], session_id, owner)
    if as_json:
        output.print_json({"sessions": found})
        return
    for record in found:
        output.console().print(session_view(record))


def tree(
    session_id: Annotated[
        str | None, typer.Option("--session", help="Only what this session's branches run through.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most as many nodes.")] = 1_000,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Draw the radix tree: tokens, tiers, sessions, when each node is expected to be used."""
    nodes = Server(url, api_key, timeout).get("/sessions/tree", limit=limit)["nodes"]
    n_all = len(nodes)
    if session_id is not None:
        nodes = of_session(nodes, session_id)
    if as_json:
        output.print_json({"nodes": nodes})
        return
    more = f" (the first {limit}; see --limit)" if n_all == limit else ""
    output.console().print(radix_tree(nodes, f"radix tree, {len(nodes)} nodes{more}"))


def top(
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 1.0,
    count: Annotated[
        int | None, typer.Option(min=1, help="End after as many looks; else on Ctrl-C.")
    ] = None,
    newest: Annotated[
        int, typer.Option(min=1, max=1_000, help="Look at as many of the newest sessions.")
    ] = 100,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Watch sessions and pools live; `--json` prints one object a line."""
    pace = top_view.Pace(interval, count, newest)
    top_view.run(Server(url, api_key, timeout), pace, as_json)
