"""The report as one HTML file that needs no network: tables and plots as inline SVG.

Owns: how plots look. Must never compute a figure that the report does not hold, apart from the
distribution of TTFT, which it draws from the runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from sam.bench.replay import report as shown

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb",
            "#222255", "#997700", "#225555")  # fmt: skip
_WIDTH, _ROW, _LEFT = 760, 24, 150
_STYLE = """body{font:14px system-ui,sans-serif;margin:2em auto;max-width:1100px;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:3px 9px;border-bottom:1px solid #ddd;
text-align:right;white-space:nowrap}td:first-child,th:first-child{text-align:left}
div{overflow-x:auto}pre{background:#f5f5f5;padding:1em;overflow-x:auto}svg text{font-size:12px}"""


def to_html(report: Mapping[str, Any], runs: Iterable[Mapping[str, Any]]) -> str:
    arms = report["arms"]
    rows = [(title, [show(arm) for arm in arms.values()]) for title, show in shown.ROWS]
    parts = [
        f"<h1>sam.bench replay: {escape(str(report.get('workload', '')))}</h1>",
        f"<pre>{escape(chr(10).join(about_lines(report)))}</pre>",
        "<h2>Arms</h2>", _table(["", *arms], rows),
        "<h2>Where prompt tokens came from</h2>", tiers_svg(arms),
        "<h2>TTFT: share of requests answered within so many seconds</h2>",
        ecdf_svg(_ttft(runs, arms)),
    ]  # fmt: skip
    for base, of_base in report["ratios"].items():
        parts.append(f"<h2>Ratios to {escape(base)} (95 %)</h2>")
        parts.append(_ratio_table(of_base))
        for metric in ("ttft_mean", "recomputed_tokens"):
            parts += [f"<h3>{metric}</h3>", whiskers_svg(of_base, metric)]
    parts.append("<h2>Targets</h2>")
    parts.append(f"<pre>{escape(chr(10).join(shown.target_lines(report)) or 'none')}</pre>")
    parts.append("<h2>Hints by outcome</h2>")
    lines = [f"{name}: {arm['outcomes']}" for name, arm in arms.items() if arm["outcomes"]]
    parts.append(f"<pre>{escape(chr(10).join(lines) or 'none')}</pre>")
    body = "\n".join(parts)
    head = f"<meta charset=utf-8><title>sam.bench replay</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


def about_lines(report: Mapping[str, Any]) -> list[str]:
    keys = ("command", "machine", "date", "scale", "source", "sizes", "code", "note")
    return [f"{key}: {report[key]}" for key in keys if report.get(key)]


def _table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    lines = [f"<tr>{cells}</tr>"]
    for title, values in rows:
        cells = "".join(f"<td>{escape(text)}</td>" for text in (title, *values))
        lines.append(f"<tr>{cells}</tr>")
    return f"<div><table>{''.join(lines)}</table></div>"


def _ratio_table(of_base: Mapping[str, Any]) -> str:
    metrics = [key for key in next(iter(of_base.values()), {}) if key != "seeds"]
    rows = [
        (name, [str(figures["seeds"]), *(shown.shown_ratio(figures.get(m)) for m in metrics)])
        for name, figures in of_base.items()
    ]
    return _table(["arm", "seeds", *metrics], rows)


def _ttft(runs: Iterable[Mapping[str, Any]], arms: Iterable[str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in arms}
    for run in runs:
        if run["arm"] in found:
            found[run["arm"]] += [row["ttft_s"] for row in run["rows"]]
    return found


def _svg(height: float, body: Iterable[str]) -> str:
    view = f"0 0 {_WIDTH} {height:g}"
    return f'<svg viewBox="{view}" width="{_WIDTH}" role="img">{"".join(body)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def tiers_svg(arms: Mapping[str, Any]) -> str:
    """One bar per arm: device, host, storage, avoidable recompute, new."""
    kinds = ("device", "host", "storage", "recomputed again", "new to any cache")
    colours = ("#228833", "#88cc88", "#66ccee", "#ee6677", "#dddddd")
    body, room = [], _WIDTH - _LEFT - 10
    for place, (name, arm) in enumerate(arms.items()):
        x, y = float(_LEFT), place * _ROW
        again = max(arm["recomputed_tokens"] - arm["new_tokens"], 0)
        parts = [arm["device_tokens"], arm["host_tokens"], arm["storage_tokens"], again,
                 arm["recomputed_tokens"] - again]  # fmt: skip
        body.append(_text(_LEFT - 8, y + 16, name, "end"))
        for tokens, colour, kind in zip(parts, colours, kinds, strict=True):
            width = room * tokens / max(arm["prompt_tokens"], 1)
            box = f'x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}"'
            body.append(f'<rect {box} fill="{colour}"><title>{kind}: {tokens:,}</title></rect>')
            x += width
    y = len(arms) * _ROW + 18
    for place, (kind, colour) in enumerate(zip(kinds, colours, strict=True)):
        x = 10 + place * 145
        body.append(f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{colour}"/>')
        body.append(_text(x + 14, y, kind))
    return _svg(y + 8, body)


def ecdf_svg(values: Mapping[str, Sequence[float]]) -> str:
    """Cumulative distributions, x up to the largest p99."""
    height, bottom = 300, 270
    ranked = {name: sorted(found) for name, found in values.items() if found}
    edge = max((r[int(0.99 * (len(r) - 1))] for r in ranked.values()), default=1.0) or 1.0
    room = _WIDTH - _LEFT - 30
    body = [f'<path d="M40 10V{bottom}H{40 + room}" fill="none" stroke="#888"/>']
    for share in (0.5, 0.95):
        y = bottom - share * (bottom - 10)
        body.append(f'<path d="M40 {y:.1f}H{40 + room}" stroke="#ddd"/>')
        body.append(_text(36, y + 4, f"{share:g}", "end"))
    for part in range(5):
        x = 40 + room * part / 4
        body.append(_text(x, bottom + 16, f"{edge * part / 4:.2f} s", "middle"))
    for place, (name, found) in enumerate(ranked.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        points = [
            f"{40 + room * min(value, edge) / edge:.1f},"
            f"{bottom - (bottom - 10) * (rank + 1) / len(found):.1f}"
            for rank, value in enumerate(found)
        ]
        line = f'points="{" ".join(points)}" fill="none" stroke="{colour}"'
        body.append(f'<polyline {line} stroke-width="1.6"/>')
        y = 20 + place * 16
        body.append(
            f'<rect x="{_WIDTH - 130}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
        )
        body.append(_text(_WIDTH - 116, y, name))
    return _svg(height, body)


def whiskers_svg(of_base: Mapping[str, Any], metric: str) -> str:
    """Ratio and interval per arm; the line is 1."""
    edge = max([1.2, *(1.05 * figures[metric]["high"] for figures in of_base.values())])
    room = _WIDTH - _LEFT - 60
    one = _LEFT + room / edge
    height = len(of_base) * _ROW + 10
    body = [f'<path d="M{one:.1f} 0V{height}" stroke="#888" stroke-dasharray="4 3"/>']
    for place, (name, figures) in enumerate(of_base.items()):
        y = place * _ROW + 15
        low, at, high = (
            _LEFT + room * figures[metric][key] / edge for key in ("low", "ratio", "high")
        )
        body.append(_text(_LEFT - 8, y + 4, name, "end"))
        body.append(f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="#4477aa" stroke-width="2"/>')
        body.append(f'<circle cx="{at:.1f}" cy="{y}" r="4" fill="#4477aa"/>')
        body.append(_text(high + 6, y + 4, f"{figures[metric]['ratio']:.2f}"))
    return _svg(height, body)
