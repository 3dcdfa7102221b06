"""Points of a sweep: the same comparison at several sizes of the tiers.

Owns: which points there are, their names, and the table over them. Must never run anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from sam.bench.replay.pools import KINDS

_KEYS = {"l1": float, "l2": float, "l3": str}
_BASES = ("stock-lpm", "stock")


def axes_of(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`["l1=0.2,0.3", "l3=off,file"]` as values by key. Raises ValueError."""
    axes: dict[str, list[Any]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        if key not in _KEYS or key in axes or not values:
            raise ValueError(f"--sweep {text!r}: l1=F,F…, l2=R,R… or l3=KIND,KIND…, each once")
        axes[key] = [_KEYS[key](value) for value in values.split(",")]
    wrong = set(axes.get("l3", ())) - set(KINDS)
    if wrong:
        raise ValueError(f"--sweep l3: {', '.join(sorted(wrong))}: one of {', '.join(KINDS)}")
    return axes


def points_of(args: argparse.Namespace) -> list[argparse.Namespace]:
    """One set of options per point; the options themselves where no sweep is asked for."""
    axes = axes_of(args.sweep)
    points = []
    for values in product(*axes.values()):
        point = copy(args)
        for key, value in zip(axes, values, strict=True):
            setattr(point, key, value)
        if args.html and axes:
            point.html = _named(args.html, point)
        points.append(point)
    return points


def name_of(point: argparse.Namespace) -> str:
    return f"L1 {point.l1:g}, L2 x {point.l2:g}, L3 {point.l3}"


def _named(path: Path, point: argparse.Namespace) -> Path:
    return path.with_stem(f"{path.stem}-l1-{point.l1:g}-l2-{point.l2:g}-l3-{point.l3}")


def sweep_table(reports: Mapping[str, Mapping[str, Any]]) -> Table:
    """Hit rate of each arm; recompute and mean TTFT against stock-lpm, or stock, if there."""
    table = Table(title="the sweep: hit rate, x recompute, x mean TTFT", title_justify="left")
    arms = list(dict.fromkeys(name for report in reports.values() for name in report["arms"]))
    table.add_column("point")
    for name in arms:
        table.add_column(name, justify="right")
    for point, report in reports.items():
        table.add_row(point, *(_cell(report, name) for name in arms))
    return table


def _cell(report: Mapping[str, Any], name: str) -> str:
    if name not in report["arms"]:
        return "-"
    text = f"{report['arms'][name]['hit_rate']:.3f}"
    for base in _BASES:
        figures = report["ratios"].get(base, {}).get(name)
        if figures:
            of = f"{figures['recomputed_tokens']['ratio']:.2f} {figures['ttft_mean']['ratio']:.2f}"
            return f"{text} {of} of {base}"
    return text
