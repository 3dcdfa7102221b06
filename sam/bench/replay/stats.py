"""Arithmetic over runs: percentiles, totals, ratios with bootstrap intervals.

Owns: numbers only. Must never compare arms on different requests: a ratio is made from the seeds
that both arms have, and resampled by seed and user, the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

SHARES = {"p50": 50, "p95": 95, "p99": 99}
DRAWS = 1000
Run = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Mean, p50, p95, p99; {} without values."""
    if not len(values):
        return {}
    found = {"mean": float(np.mean(values))}
    found |= {key: float(np.percentile(values, share)) for key, share in SHARES.items()}
    return {key: round(value, digits) for key, value in found.items()}


def recomputed(row: Mapping[str, Any]) -> int:
    return row["prompt"] - row["device"] - row["host"] - row["storage"]


def _sums(key: Callable[[Mapping[str, Any]], float]) -> Callable[[Rows], np.ndarray]:
    return lambda rows: np.array([sum(key(row) for row in rows)])


def _each(key: str) -> Callable[[Rows], np.ndarray]:
    return lambda rows: np.array([row[key] for row in rows])


# name: (values of one unit's rows, figure of all units' values together)
METRICS: Mapping[str, tuple[Callable[[Rows], np.ndarray], Callable[[np.ndarray], float]]] = {
    "ttft_mean": (_each("ttft_s"), np.mean),
    "ttft_p50": (_each("ttft_s"), lambda v: np.percentile(v, 50)),
    "ttft_p95": (_each("ttft_s"), lambda v: np.percentile(v, 95)),
    "latency_mean": (_each("total_s"), np.mean),
    "recomputed_tokens": (_sums(recomputed), np.sum),
}

PER_RUN: Mapping[str, Callable[[Run], float]] = {
    "tokens_per_s": lambda run: sum(row["out"] for row in run["rows"]) / run["wall_s"],
    "peak_l3_bytes": lambda run: run["peak_l3_bytes"] or 0,
}


def units(run: Run) -> dict[int, dict[str, Any]]:
    """What is resampled: one user's requests and task."""
    found: dict[int, dict[str, Any]] = {}
    for row in run["rows"]:
        unit = found.setdefault(row["user"], {"rows": [], "task_s": None})
        unit["rows"].append(row)
    for user, seconds in run["task_s"].items():
        if int(user) in found:
            found[int(user)]["task_s"] = seconds
    return found


def ratios(
    arm: Mapping[int, Run], base: Mapping[int, Run], *, draws: int = DRAWS, seed: int = 0
) -> dict[str, dict[str, float]]:
    """`arm` / `base` per metric: {ratio, low, high} (95 %), from runs by seed.

    Resampled: seeds, then users within each, the same draw for both arms.
    """
    seeds = sorted(arm.keys() & base.keys())
    if not seeds:
        return {}
    pairs = [(units(arm[s]), units(base[s])) for s in seeds]
    users = [sorted(a.keys() & b.keys()) for a, b in pairs]
    picks = _picks(users, draws, np.random.default_rng(seed))
    whole = [(s, user) for s in range(len(seeds)) for user in users[s]]
    found = {}
    for name, figure in _figures().items():
        values = [
            ({user: figure[0](a[user]) for user in us}, {user: figure[0](b[user]) for user in us})
            for (a, b), us in zip(pairs, users, strict=True)
        ]
        drawn = [_ratio(values, pick, figure[1]) for pick in picks]
        low, high = np.percentile(drawn, [2.5, 97.5])
        ratio = _ratio(values, whole, figure[1])
        found[name] = _rounded(ratio, low, high)
    for name, of_run in PER_RUN.items():
        ours, theirs = (np.array([of_run(side[s]) for s in seeds]) for side in (arm, base))
        if ours.all() and theirs.all():
            found[name] = _run_ratio(ours, theirs, draws, np.random.default_rng(seed))
    return found


def _rounded(ratio: float, low: float, high: float) -> dict[str, float]:
    figures = {"ratio": ratio, "low": low, "high": high}
    return {key: round(float(value), 4) for key, value in figures.items()}


def _run_ratio(
    ours: np.ndarray, theirs: np.ndarray, draws: int, rng: np.random.Generator
) -> dict[str, float]:
    """Of a figure that a run has only as a whole: seeds alone are drawn."""
    picks = rng.integers(len(ours), size=(draws, len(ours)))
    drawn = ours[picks].mean(axis=1) / theirs[picks].mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return _rounded(ours.mean() / theirs.mean(), low, high)


def _figures() -> dict[str, tuple[Callable, Callable]]:
    found = {
        name: ((lambda unit, values=values: values(unit["rows"])), figure)
        for name, (values, figure) in METRICS.items()
    }
    found["task_mean"] = (lambda unit: np.array([unit["task_s"]]), np.mean)
    found["hit_rate"] = (
        _hits,
        lambda v: v.reshape(-1, 2)[:, 0].sum() / v.reshape(-1, 2)[:, 1].sum(),
    )
    return found


def _hits(unit: Mapping[str, Any]) -> np.ndarray:
    prompt = sum(row["prompt"] for row in unit["rows"])
    return np.array([prompt - sum(recomputed(row) for row in unit["rows"]), prompt])


def _picks(
    users: Sequence[Sequence[int]], draws: int, rng: np.random.Generator
) -> list[list[tuple[int, int]]]:
    picks = []
    for _ in range(draws):
        seeds = rng.integers(len(users), size=len(users))
        picks.append([(int(s), users[s][int(rng.integers(len(users[s])))])
                      for s in seeds for _ in users[s]])  # fmt: skip
    return picks


def _ratio(values, pick: Sequence[tuple[int, int]], figure: Callable[[np.ndarray], float]) -> float:
    ours, theirs = (
        figure(np.concatenate([values[s][side][user] for s, user in pick])) for side in (0, 1)
    )
    return float(ours / theirs) if theirs else float("nan")
