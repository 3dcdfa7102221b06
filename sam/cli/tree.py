"""The radix tree of a server as a tree on the terminal.

Owns the folding and the selection of nodes. Must never ask a server anything.
"""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.tree import Tree

from sam.cli import output
from sam.cli.errors import CliError, Exit

Node = dict[str, Any]
_USE_STYLES = {"locked": "bold green", "queued": "green", "ended": "dim"}


def of_session(nodes: list[Node], session_id: str) -> list[Node]:
    """Nodes that this session's branches run through. Raises CliError."""
    if not any("sessions" in node for node in nodes):
        text = "the server's tree does not name sessions"
        raise CliError(Exit.FINDING, text, "leave --session out")
    return [node for node in nodes if session_id in node["sessions"]]


def radix_tree(nodes: list[Node], title: str) -> Tree:
    """All nodes below their parents; a parent that was left out counts as the root."""
    known = {node["id"] for node in nodes}
    below: dict[object, list[Node]] = {}
    for node in nodes:
        parent = node["parent"] if node["parent"] in known else None
        below.setdefault(parent, []).append(node)
    root = Tree(title, guide_style="dim")
    waiting = [(root, node) for node in reversed(below.get(None, []))]
    while waiting:
        place, node = waiting.pop()
        branch = place.add(_line(node))
        waiting += [(branch, child) for child in reversed(below.get(node["id"], []))]
    return root


def _branches(n: int) -> str:
    return "1 branch" if n == 1 else f"{n} branches"


def _line(node: Node) -> str:
    """Tokens, where they are, whose they are, and when they are expected to be used."""
    tiers = [name for name in ("device", "host") if node.get(f"{name}_tokens")]
    where = "+".join(tiers) or "nowhere"
    use = "locked" if node["locked"] else str(node["next_use"])
    parts = [
        f"{node['key_tokens']:,} tokens",
        f"[{'cyan' if 'device' in tiers else 'blue'}]{where}[/]",
        output.styled(use, _USE_STYLES, "yellow"),
    ]
    if use == "idle":
        parts[-1] += f" [dim]back in {output.seconds(max(0.0, node['next_use_in_s']))}[/]"
    if "sessions" in node:
        names = [escape(name) for name in node["sessions"]]
        more = node["n_tags"] - len(names)
        parts.append(", ".join(names) + (f" [dim](+{_branches(more)})[/]" if more > 0 else ""))
    else:
        parts.append(f"[dim]{_branches(node['n_tags'])}[/]")
    return f"{'  '.join(part for part in parts if part)}  [dim]#{node['id']}[/]"
