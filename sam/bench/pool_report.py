"""What `sam.bench pool` found, as one object for programs and two tables for people.

Owns: the arithmetic and both renderings. Must never measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

_MIB = 1 << 20


def build_report(found: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """The object that `--json` prints; `found` may be incomplete."""
    arms = {name: _arm(of_arm) for name, of_arm in found.items()}
    peaks = [arm["peak_pool_bytes"] for arm in arms.values() if "peak_pool_bytes" in arm]
    change = round(peaks[1] / peaks[0] - 1, 4) if len(peaks) == 2 and peaks[0] else None
    return {**about, "arms": arms, "peak_pool_bytes_change": change}


def _arm(of_arm: Mapping[str, Any]) -> dict[str, Any]:
    back = {
        way: {
            "n": len(ttft_s),
            "ttft_p50_s": round(median(ttft_s), 4),
            "ttft_max_s": max(ttft_s),
            **_tokens(of_arm["tokens"][way]),
        }
        for way, ttft_s in of_arm["ttft_s"].items()
    }
    return {"about": of_arm["about"], **of_arm.get("swarm", {}), "back": back}


def _tokens(rows: Sequence[Sequence[int]]) -> dict[str, float]:
    names = ("prompt_tokens", "device_tokens", "host_tokens", "storage_tokens")
    columns = zip(*rows, strict=True)
    return {name: median(column) for name, column in zip(names, columns, strict=True)}


def print_report(report: Mapping[str, Any], out: Console) -> None:
    arms = report["arms"]
    if any("peak_pool_bytes" in arm for arm in arms.values()):
        out.print(_peak_table(arms))
    if any(arm["back"] for arm in arms.values()):
        out.print(_back_table(arms))
    if report["peak_pool_bytes_change"] is not None:
        out.print(f"peak pool bytes: {report['peak_pool_bytes_change']:+.1%}")
    out.print(
        f"machine: {report['machine']}; seed {report['seed']}; one run, random weights: times "
        "depend on the machine and its load, bytes little.",
        soft_wrap=True,
    )


def _peak_table(arms: Mapping[str, Any]) -> Table:
    table = Table(title="A swarm over an empty pool")
    for title in ("arm", "requests", "seconds", "peak MiB", "MiB after"):
        table.add_column(title, justify="left" if title == "arm" else "right")
    for name, arm in arms.items():
        if "peak_pool_bytes" in arm:
            peak, after = arm["peak_pool_bytes"] / _MIB, arm["pool_bytes_after"] / _MIB
            row = (str(arm["requests"]), f"{arm['wall_s']:.1f}", f"{peak:.1f}", f"{after:.1f}")
            table.add_row(name, *row)
    return table


def _back_table(arms: Mapping[str, Any]) -> Table:
    table = Table(title="A session comes back that is in the pool only")
    titles = ("arm", "its next request", "TTFT p50 s", "max s", "prompt", "L1", "L2", "L3")
    for title in titles:
        table.add_column(title, justify="left" if title in titles[:2] else "right")
    for name, arm in arms.items():
        for way, row in arm["back"].items():
            tokens = ("prompt_tokens", "device_tokens", "host_tokens", "storage_tokens")
            sizes = [f"{row[key]:.0f}" for key in tokens]
            table.add_row(name, way, f"{row['ttft_p50_s']:.3f}", f"{row['ttft_max_s']:.3f}", *sizes)
    return table
