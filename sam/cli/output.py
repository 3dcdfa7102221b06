"""Consoles, and how numbers and states look on them.

Owns width, colour and the words of single values. Must never print anything but what it is
given: with `--json` standard output holds JSON only.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDE = 200
STATE_STYLES = {
    "running": "bold green",
    "resuming": "cyan",
    "idle": "yellow",
    "offloaded": "blue",
    "ended": "dim",
    "named": "dim italic",
}
STATUS_STYLES = {
    "done": "green",
    "clipped": "yellow",
    "accepted": "cyan",
    "deferred": "cyan",
}


def console(*, stderr: bool = False) -> Console:
    """A console that does not fold tables where nobody looks (a pipe, a file)."""
    found = Console(stderr=stderr, highlight=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = _WIDE
    return found


def print_json(value: Any) -> None:
    """One JSON object, on one line of its own."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def plain_table(*columns: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A table whose columns in `right` hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


def count(value: int | None) -> str:
    """A number of tokens; nothing where nothing is known."""
    return "" if value is None else f"{value:,}"


def seconds(value: float) -> str:
    """A time span in the largest two units that say something."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def styled(word: str, styles: dict[str, str], default: str = "red") -> str:
    """Markup around a word that holds no markup itself."""
    style = styles.get(word, default)
    return f"[{style}]{word}[/]"


def bar(used: int, total: int, width: int = 24) -> str:
    """A share as a bar of characters."""
    filled = 0 if total <= 0 else min(width, round(width * used / total))
    return "█" * filled + "░" * (width - filled)
