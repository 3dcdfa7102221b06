"""From runs to one report: totals per arm, ratios, targets; tables for a terminal.

Owns: the report's keys. Must never measure, and must never show a ratio without the number of
seeds behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from sam.bench.replay import stats

BASELINES = ("stock", "stock-lpm", "stock-spf", "stock-spf-wb", "stock-session")
# by workload: against, metric, at least, at most (ratios)
_SWARM = (
    ("stock-lpm", "ttft_mean", None, 0.5),
    ("stock-lpm", "ttft_p95", None, 0.6),
    ("stock", "ttft_mean", None, 0.4),
    ("stock", "latency_mean", None, 0.7),
    ("stock", "hit_rate", 1.35, None),
    ("stock", "peak_l3_bytes", None, 0.6),
)
TARGETS = {
    "swarm": _SWARM,
    "coding": _SWARM,
    "mixed": _SWARM,
    "nohints": (
        ("stock", "ttft_mean", 0.98, 1.02),
        ("stock", "tokens_per_s", 0.98, 1.02),
    ),
    "adversarial": (("stock", "recomputed_tokens", None, 1.05),),
}
_CORES = {
    "RustUnifiedTreeCore": "Rust",
    "UnifiedTreeCore": "Python",
    "ShadowTreeCore": "sam on Rust",
    "SessionTreeCore": "sam on Python",
}
_TIERS = ("device", "host", "storage")


def build_report(
    runs: Iterable[Mapping[str, Any]], about: Mapping[str, Any], *, draws: int = stats.DRAWS
) -> dict[str, Any]:
    """`runs` are finished ones, in any order; `draws` of the bootstrap."""
    by_arm: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], {})[run["seed"]] = run
    names = [name for name in about.get("arms", by_arm) if name in by_arm]
    arms = {name: summarize(by_arm[name]) for name in names}
    ratios = {
        base: {
            name: {"seeds": len(by_arm[name].keys() & by_arm[base].keys()), **found}
            for name in names
            if name != base and (found := stats.ratios(by_arm[name], by_arm[base], draws=draws))
        }
        for base in BASELINES
        if base in arms
    }
    return {
        **about,
        "arms": arms,
        "ratios": ratios,
        "targets": _targets(ratios, about.get("workload", "")),
        "code": sorted({run["code"] for runs in by_arm.values() for run in runs.values()}),
        "differing_requests": _differing(by_arm, names),
    }


def summarize(runs: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """One arm over its seeds: sums of tokens and counters, spreads over all requests."""
    every = list(runs.values())
    rows = [row for run in every for row in run["rows"]]
    prompt = sum(row["prompt"] for row in rows)
    tiers = {tier: sum(row[tier] for row in rows) for tier in _TIERS}
    recomputed, new = prompt - sum(tiers.values()), sum(run["new_tokens"] for run in every)
    wall_s, out = sum(run["wall_s"] for run in every), sum(row["out"] for row in rows)
    first = every[0]
    return {
        "about": first["about"],
        "tree_core": first.get("tree_core", "unknown"),
        "schedule_policy": first["schedule_policy"],
        "write_policy": first["write_policy"],
        "hints": first["hints"],
        "seeds": sorted(runs),
        "requests": len(rows),
        "prompt_tokens": prompt,
        "output_tokens": out,
        **{f"{tier}_tokens": n for tier, n in tiers.items()},
        "recomputed_tokens": recomputed,
        "new_tokens": new,
        "hit_rate": _share(prompt - recomputed, prompt),
        "hit_rate_by_tier": {tier: _share(n, prompt) for tier, n in tiers.items()},
        "hit_rate_ceiling": _share(prompt - new, prompt),
        "ttft_s": stats.spread([row["ttft_s"] for row in rows]),
        "latency_s": stats.spread([row["total_s"] for row in rows]),
        "task_s": stats.spread([s for run in every for s in run["task_s"].values()]),
        "wall_s": round(wall_s, 2),
        "output_tokens_per_s": round(out / wall_s, 2) if wall_s else 0.0,
        "prompt_tokens_per_s": round(prompt / wall_s, 1) if wall_s else 0.0,
        "counters": _added(run["counters"] for run in every),
        "outcomes": _added(run["outcomes"] for run in every),
        "management": {
            "n": sum(run["manage"]["n"] for run in every),
            "p99_s": max((run["manage"].get("p99", 0.0) for run in every), default=0.0),
        },
        "scheduler": _scheduler(every),
        "peak_l3_bytes": max((run["peak_l3_bytes"] or 0 for run in every), default=0) or None,
        "load_average": [run["load_average"] for run in every],
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return {key: round(value, 4) for key, value in sorted(total.items())}


def _scheduler(runs: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    found = [run for run in runs if run["scheduler"]]
    if not found:
        return None
    totals = _added(run["scheduler"] for run in found)
    wall_s = sum(run["wall_s"] for run in found)
    return {**totals, "share_of_wall": _share(totals["work_s"], wall_s)}


def _targets(ratios: Mapping[str, Any], workload: str) -> list[dict[str, Any]]:
    """The mission's numbers for every arm of sam: met, or missed by how much."""
    found = []
    for base, metric, low, high in TARGETS.get(workload, ()):
        for name, figures in ratios.get(base, {}).items():
            if not name.startswith("sam") or metric not in figures:
                continue
            ratio = figures[metric]["ratio"]
            met = (low is None or ratio >= low) and (high is None or ratio <= high)
            found.append({"arm": name, "against": base, "metric": metric, "at_least": low,
                          "at_most": high, "ratio": ratio, "met": bool(met)})  # fmt: skip
    return found


def _differing(
    by_arm: Mapping[str, Mapping[int, Mapping[str, Any]]], names: Sequence[str]
) -> dict[str, int]:
    """Requests whose tokens, prompt or answer, are not those of the first arm."""
    if not names:
        return {}
    found = {}
    for name in names[1:]:
        seeds = by_arm[name].keys() & by_arm[names[0]].keys()
        pairs = [(_digests(by_arm[name][s]), _digests(by_arm[names[0]][s])) for s in seeds]
        found[name] = sum(a.get(key) != b.get(key) for a, b in pairs for key in a | b)
    return found


def _digests(run: Mapping[str, Any]) -> dict[tuple[str, int], int]:
    return {(row["session"], row["turn"]): row["digest"] for row in run["rows"]}


ROWS = (
    ("seeds", lambda a: str(len(a["seeds"]))),
    ("tree core", lambda a: _CORES.get(a["tree_core"], a["tree_core"])),
    ("scheduler policy", lambda a: a["schedule_policy"]),
    ("host copies", lambda a: a["write_policy"]),
    ("requests", lambda a: f"{a['requests']:,}"),
    ("hit rate", lambda a: f"{a['hit_rate']:.3f}"),
    ("  device / host", lambda a: _tiers(a, "device", "host")),
    ("  storage", lambda a: f"{a['hit_rate_by_tier']['storage']:.3f}"),
    ("  an endless cache", lambda a: f"{a['hit_rate_ceiling']:.3f}"),
    ("recomputed tokens", lambda a: f"{a['recomputed_tokens']:,}"),
    ("  new to any cache", lambda a: f"{a['new_tokens']:,}"),
    ("TTFT mean s", lambda a: _seconds(a, "ttft_s", "mean")),
    ("TTFT p50 / p95 / p99", lambda a: _seconds(a, "ttft_s", "p50", "p95", "p99")),
    ("  of the mean: queued", lambda a: _queued(a)),
    ("request mean / p95 s", lambda a: _seconds(a, "latency_s", "mean", "p95")),
    ("whole task mean s", lambda a: _seconds(a, "task_s", "mean")),
    ("output tokens / s", lambda a: f"{a['output_tokens_per_s']:.1f}"),
    ("load-back tokens", lambda a: f"{a['counters'].get('load_back_tokens', 0):,.0f}"),
    ("evicted tokens", lambda a: f"{a['counters'].get('evicted_tokens', 0):,.0f}"),
    ("pool read / written", lambda a: _pool(a)),
    ("peak L3 MiB", lambda a: _mib(a["peak_l3_bytes"])),
    ("scheduler CPU of wall", lambda a: _cpu(a)),
    ("management p99 s", lambda a: f"{a['management']['p99_s']:.3f}"),
)  # fmt: skip


def _tiers(arm: Mapping[str, Any], *tiers: str) -> str:
    return " / ".join(f"{arm['hit_rate_by_tier'][tier]:.3f}" for tier in tiers)


def _seconds(arm: Mapping[str, Any], kind: str, *keys: str) -> str:
    return " / ".join(f"{arm[kind].get(key, 0.0):.2f}" for key in keys)


def _queued(arm: Mapping[str, Any]) -> str:
    """Mean wait for admission, as the server counts it."""
    queued_s = arm["counters"].get("queued_s")
    return "-" if queued_s is None else f"{queued_s / arm['requests']:.2f}"


def _pool(arm: Mapping[str, Any]) -> str:
    counters = arm["counters"]
    keys = ("pool_read_tokens", "pool_write_tokens")
    return " / ".join(f"{counters[k]:,.0f}" if k in counters else "-" for k in keys)


def _mib(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / 2**20:,.0f}"


def _cpu(arm: Mapping[str, Any]) -> str:
    return "-" if arm["scheduler"] is None else f"{arm['scheduler']['share_of_wall']:.3f}"


def arms_table(report: Mapping[str, Any]) -> Table:
    table = Table(title=f"{report.get('workload', '')}: the arms", title_justify="left")
    table.add_column("")
    for name in report["arms"]:
        table.add_column(name, justify="right")
    for title, show in ROWS:
        table.add_row(title, *(show(arm) for arm in report["arms"].values()))
    return table


def ratios_table(report: Mapping[str, Any], base: str) -> Table:
    table = Table(
        title=f"Ratios to {base}, bootstrap 95 % over seeds and users", title_justify="left"
    )
    table.add_column("arm")
    table.add_column("seeds", justify="right")
    metrics = _metrics(report["ratios"][base])
    for metric in metrics:
        table.add_column(metric, justify="right")
    for name, figures in report["ratios"][base].items():
        cells = [shown_ratio(figures.get(metric)) for metric in metrics]
        table.add_row(name, str(figures["seeds"]), *cells)
    return table


def _metrics(of_base: Mapping[str, Any]) -> list[str]:
    first = next(iter(of_base.values()), {})
    return [key for key in first if key != "seeds"]


def shown_ratio(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return "-"
    return f"{figure['ratio']:.2f} ({figure['low']:.2f}-{figure['high']:.2f})"


def target_lines(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for target in report["targets"]:
        low, high = target["at_least"], target["at_most"]
        wanted = f"<= {high:g}x" if low is None else f">= {low:g}x" if high is None else ""
        verdict = "met" if target["met"] else "missed"
        lines.append(
            f"{target['arm']} against {target['against']}: {target['metric']} "
            f"{wanted or f'{low:g}-{high:g}x'}: {verdict} ({target['ratio']:.2f})"
        )
    missed = dict.fromkeys((t["arm"], t["against"]) for t in report["targets"] if not t["met"])
    return lines + [limit_line(report, *pair) for pair in missed]


def limit_line(report: Mapping[str, Any], name: str, base: str) -> str:
    """What stands between an arm and a target: queue, recompute, load-back, scheduler."""
    arm, counters = report["arms"][name], report["arms"][name]["counters"]
    ttft_s = arm["ttft_s"]["mean"] * arm["requests"]
    of_base = report["arms"][base]
    seeds = len(set(arm["seeds"]) & set(of_base["seeds"]))
    floor = _share(arm["new_tokens"] / len(arm["seeds"]) * seeds,
                   of_base["recomputed_tokens"] / len(of_base["seeds"]) * seeds)  # fmt: skip
    parts = [
        f"{100 * _share(arm['new_tokens'], arm['recomputed_tokens']):.0f} % of what it computes is "
        f"new to any cache (an endless one would compute {floor:.2f}x of {base}'s)"
    ]
    if "queued_s" in counters:
        parts.insert(0, f"the queue is {100 * _share(counters['queued_s'], ttft_s):.0f} % of TTFT")
    if "load_back_s" in counters:
        parts.append(f"load-back {counters['load_back_s']:.1f} s")
    if arm["scheduler"]:
        parts.append(f"scheduler {arm['scheduler']['work_s']:.1f} s of {arm['wall_s']:.0f} s")
    return f"what limits {name} against {base}: " + "; ".join(parts)
