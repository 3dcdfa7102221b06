"""From the answers of all seeds to numbers, JSON and a table.

Owns names and meanings of the reported figures. Must never weigh seeds other than by their
prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sam.sim.runner import BASE, Answer, Outcome, Question

_PERCENTILES = (50, 95, 99)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentile(ordered: Sequence[float], percent: float) -> float:
    return ordered[min(int(len(ordered) * percent / 100.0), len(ordered) - 1)]


def _ttft(outcomes: Sequence[Outcome]) -> dict[str, float] | None:
    times = sorted(t for outcome in outcomes for t in outcome.ttft_s)
    if not times:
        return None
    figures = {f"p{p}_s": _percentile(times, p) for p in _PERCENTILES}
    return {"mean_s": sum(times) / len(times)} | figures


def _rates(answers: Sequence[Answer], name: str) -> dict[str, Any]:
    """Hit rates, limits and distances, over all the answers together."""
    mine = [answer.outcomes[name] for answer in answers]
    base = [answer.outcomes[BASE] for answer in answers]
    prompt = sum(answer.prompt_tokens for answer in answers)
    hit = sum(outcome.hit_tokens for outcome in mine)
    lru = sum(outcome.hit_tokens for outcome in base)
    min_nb = sum(answer.min_nb_tokens for answer in answers)
    return {
        "hit_rate": _ratio(hit, prompt),
        "lru_hit_rate": _ratio(lru, prompt),
        "min_hit_rate": _ratio(sum(answer.min_tokens for answer in answers), prompt),
        "min_nb_hit_rate": _ratio(min_nb, prompt),
        "ceiling_hit_rate": _ratio(sum(a.ceiling_tokens for a in answers), prompt),
        "gap_closed": _ratio(hit - lru, min_nb - lru),
        "recompute_vs_lru": _ratio(prompt - hit, prompt - lru),
        "recomputed_tokens": prompt - hit,
        "lru_recomputed_tokens": prompt - lru,
        "prompt_tokens": prompt,
    }


def summary(question: Question, name: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """Everything about one policy, ready for JSON. `answers`: complete ones, one per seed."""
    mine = [answer.outcomes[name] for answer in answers]
    prompt = sum(answer.prompt_tokens for answer in answers)
    n = len(answers)
    ttft, lru_ttft = _ttft(mine), _ttft([answer.outcomes[BASE] for answer in answers])
    return {
        "policy": name,
        "capacity": question.capacity if question.capacity_pages is None else None,
        "sessions": question.concurrent,
        "seeds": [answer.seed for answer in answers],
        **_rates(answers, name),
        "device_hit_rate": _ratio(sum(o.device_tokens for o in mine), prompt),
        "host_hit_rate": _ratio(sum(o.host_tokens for o in mine), prompt),
        "pool_hit_rate": _ratio(sum(o.pool_tokens for o in mine), prompt),
        "ttft": ttft,
        "lru_ttft": lru_ttft,
        "ttft_vs_lru": _ratio(ttft["mean_s"], lru_ttft["mean_s"]) if ttft and lru_ttft else None,
        "order": question.order if question.concurrent else "as recorded",
        "service": question.service,
        "requests": sum(answer.n_requests for answer in answers),
        "sessions_replayed": sum(answer.n_sessions for answer in answers),
        "working_set_tokens": sum(answer.working_set_tokens for answer in answers) // n,
        "capacity_tokens": sum(answer.capacity_tokens for answer in answers) // n,
        "notes": _added(mine),
        "per_seed": [{"seed": answer.seed} | _rates([answer], name) for answer in answers],
    }


def _added(outcomes: Sequence[Outcome]) -> dict[str, float]:
    total: dict[str, float] = {}
    for outcome in outcomes:
        for key, value in outcome.notes.items():
            total[key] = total.get(key, 0) + value
    return total


_COLUMNS = (
    ("policy", "policy"),
    ("sessions", "S"),
    ("capacity", "F"),
    ("hit_rate", "hit"),
    ("lru_hit_rate", "LRU"),
    ("min_nb_hit_rate", "MIN-NB"),
    ("min_hit_rate", "MIN"),
    ("ceiling_hit_rate", "ceiling"),
    ("gap_closed", "gap closed"),
    ("recompute_vs_lru", "recompute/LRU"),
    ("ttft_vs_lru", "TTFT/LRU"),
)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and key != "capacity":
        return f"{value:.3f}" if key.endswith("vs_lru") else f"{100.0 * value:.1f} %"
    return str(value)


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """One line for each summary, and what the columns mean."""
    rows = [[title for _, title in _COLUMNS]]
    rows += [[_cell(key, summary[key]) for key, _ in _COLUMNS] for summary in summaries]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines += ["", *(_details(summary) for summary in summaries)]
    return "\n".join(lines)


def _details(summary: dict[str, Any]) -> str:
    ttft, text = summary["ttft"], f"{summary['policy']}, F {summary['capacity']}: "
    text += f"{summary['recomputed_tokens']:,} of {summary['prompt_tokens']:,} tokens recomputed"
    text += f" in {summary['requests']:,} requests"
    if ttft:
        text += f"; TTFT mean {ttft['mean_s']:.2f} s, p50 {ttft['p50_s']:.2f}, "
        text += f"p95 {ttft['p95_s']:.2f}, p99 {ttft['p99_s']:.2f}"
    notes = "; ".join(f"{key} {value:g}" for key, value in summary["notes"].items())
    return f"{text}; {notes}" if notes else text
