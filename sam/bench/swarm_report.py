"""Summary of the quickstart's arms: one table for people, one JSON object for programs.

Owns: the arithmetic over answers and both renderings. Must never measure, and must never call
outputs identical unless every request of both arms was compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from sam.bench.hit_cost import KINDS, HitCost
from sam.bench.swarm_client import SwarmRun

_ROWS = (
    ("requests", "requests"),
    ("prompt tokens", "prompt_tokens"),
    ("  from device (L1)", "device_tokens"),
    ("  from host (L2)", "host_tokens"),
    ("  recomputed", "recomputed_tokens"),
    ("  new to any cache", "new_tokens"),
    ("cached share", "cached_share"),
    ("TTFT p50 s", "ttft_p50_s"),
    ("TTFT p95 s", "ttft_p95_s"),
    ("whole swarm s", "wall_s"),
)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks; 0 without values."""
    if not values:
        return 0.0
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def summarize(run: SwarmRun) -> dict[str, Any]:
    """Totals of one arm."""
    answers = list(run.answers.values())
    prompt = sum(a.prompt_tokens for a in answers)
    recomputed = sum(a.recomputed_tokens for a in answers)
    ttft = [a.ttft_s for a in answers]
    return {
        "requests": len(answers),
        "prompt_tokens": prompt,
        "recomputed_tokens": recomputed,
        "new_tokens": new_tokens(run),
        "device_tokens": sum(a.device_tokens for a in answers),
        "host_tokens": sum(a.host_tokens for a in answers),
        "cached_share": round(1 - recomputed / prompt, 4) if prompt else 0.0,
        "ttft_p50_s": round(percentile(ttft, 0.5), 4),
        "ttft_p95_s": round(percentile(ttft, 0.95), 4),
        "wall_s": round(run.wall_s, 2),
        "management_requests": len(run.manage_s),
        "management_p50_s": round(percentile(run.manage_s, 0.5), 4),
        "management_max_s": round(max(run.manage_s, default=0.0), 4),
    }


def new_tokens(run: SwarmRun) -> int:
    """Prompt tokens that not even an endless cache could have had: the floor of recompute.

    A prompt counts against everything sent before it, answered by then or not; its last token
    is always computed.
    """
    seen: set[int] = set()
    total = 0
    for key in run.sent:
        answer = run.answers.get(key)
        if answer is None:
            continue
        digest, known, fresh = 0, True, []
        for place, token in enumerate(answer.input_ids + answer.output_ids):
            digest = hash((digest, token))
            known = known and digest in seen
            if place < len(answer.input_ids):
                total += not known or place == len(answer.input_ids) - 1
            fresh.append(digest)
        seen.update(fresh)
    return total


def differing(one: SwarmRun, other: SwarmRun) -> list[tuple[str, int]]:
    """Requests that one of the arms lacks or answered with other tokens."""
    keys = {**one.answers, **other.answers}
    missing = one.answers.keys() ^ other.answers.keys()
    return [
        key
        for key in keys
        if key in missing or one.answers[key].output_ids != other.answers[key].output_ids
    ]


def to_json(
    runs: Mapping[str, SwarmRun], cost: HitCost | None, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The object that `--json` prints."""
    arms = list(runs.values())
    compared = len(arms) == 2 and arms[0].answers and arms[1].answers
    odd = differing(*arms) if compared else []
    report = {
        "identical_outputs": bool(compared and not odd),
        "arms": {name: summarize(run) for name, run in runs.items()},
        "differing_requests": len(odd),
        **about,
    }
    if cost is not None:
        report["hit_vs_recompute"] = {
            "prompt_tokens": cost.prompt_tokens,
            **{f"{kind}_s": round(value, 4) for kind, value in cost.medians().items()},
        }
    return report


def arms_table(report: Mapping[str, Any]) -> Table:
    arms = report["arms"]
    table = Table(title="One swarm, two servers")
    table.add_column("")
    for name in arms:
        table.add_column(name, justify="right")
    for title, key in _ROWS:
        table.add_row(title, *(_shown(arm[key]) for arm in arms.values()))
    said = "yes" if report["identical_outputs"] else f"no ({report['differing_requests']})"
    table.add_row("outputs identical", *[said if len(arms) == 2 else "-"] * len(arms))
    return table


def cost_table(report: Mapping[str, Any]) -> Table | None:
    """Hit against recompute, or None if that was not measured."""
    cost = report.get("hit_vs_recompute")
    if cost is None:
        return None
    table = Table(
        title=f"The same {cost['prompt_tokens']}-token prompt, TTFT (median)", min_width=44
    )
    table.add_column("")
    table.add_column("s", justify="right")
    table.add_column("of recompute", justify="right")
    whole = cost.get("recompute_s")
    for kind in KINDS:
        value = cost.get(f"{kind}_s")
        share = f"{100 * value / whole:.0f} %" if value and whole else "-"
        shown = "not seen" if value is None else f"{value:.3f}"
        table.add_row(kind.replace("_", " "), shown, share)
    return table


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
