"""Arithmetic, state, report and options of the replay."""

import argparse
import functools
import io
import json
import random
import re
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from sam.bench.replay import cli, measure, stats
from sam.bench.replay import report as replay_report
from sam.bench.replay.comparison import Comparison, Unfit
from sam.bench.replay.html import ecdf_svg, tiers_svg, to_html, whiskers_svg
from sam.bench.replay.report import arms_table, ratios_table, target_lines
from sam.bench.replay.state import State, code_version, fingerprint
from sam.bench.workloads import build
from sam.bench.workloads.spec import WorkloadSpec
from sam.bench.workloads.text import Vocabulary
from sam.bench.workloads.timeline import timeline_of

build_report = functools.partial(replay_report.build_report, draws=50)


def row(user=0, *, prompt=100, device=60, host=20, ttft=1.0, turn=0, digest=1):
    return {
        "user": user, "session": f"s{user}", "turn": turn, "prompt": prompt, "device": device,
        "host": host, "storage": 0, "out": 5, "ttft_s": ttft, "total_s": 2 * ttft,
        "digest": digest,
    }  # fmt: skip


def run(arm="stock", seed=0, rows=None, **more):
    rows = rows or [row(user, turn=turn) for user in range(4) for turn in range(3)]
    return {
        "arm": arm, "seed": seed, "about": "a", "schedule_policy": "fcfs", "hints": "none",
        "write_policy": "write_through",
        "tree_core": "RustUnifiedTreeCore", "code": "c", "rows": rows, "wall_s": 10.0,
        "task_s": {str(r["user"]): 5.0 for r in rows}, "new_tokens": 10 * len(rows),
        "manage": {"n": 0}, "counters": {"load_back_tokens": 7.0}, "outcomes": {"evict:done": 2},
        "scheduler": {"work_s": 1.0, "forward_s": 4.0, "cache_s": 0.5, "share_of_wall": 0.1},
        "peak_l3_bytes": None, "load_average": 0.5, **more,
    }  # fmt: skip


def noisy(arm, factor, seeds=3, users=10):
    """Runs whose TTFT is the same noise in every arm, times `factor`."""
    runs = []
    for seed in range(seeds):
        rng = random.Random(seed)
        rows = [
            row(user, turn=turn, ttft=factor * rng.lognormvariate(0, 0.5), device=int(60 / factor))
            for user in range(users)
            for turn in range(8)
        ]
        runs.append(run(arm, seed, rows))
    return runs


def by_seed(runs):
    return {found["seed"]: found for found in runs}


def test_spread_by_hand():
    found = stats.spread([1.0, 2.0, 3.0, 4.0])
    assert found["mean"] == 2.5 and found["p50"] == 2.5
    assert found["p99"] == pytest.approx(3.97)
    assert stats.spread([]) == {}


def test_ratios_of_equal_arms_are_one_without_doubt():
    same = by_seed(noisy("stock", 1.0))
    for figure in stats.ratios(same, same, draws=50).values():
        assert figure == {"ratio": 1.0, "low": 1.0, "high": 1.0}


def test_ratios_find_a_known_factor_and_tokens():
    found = stats.ratios(by_seed(noisy("sam", 0.5)), by_seed(noisy("stock", 1.0)), draws=200)
    for metric in ("ttft_mean", "ttft_p50", "ttft_p95", "latency_mean"):
        figure = found[metric]
        assert figure["low"] <= figure["ratio"] <= figure["high"]
        assert figure["ratio"] == pytest.approx(0.5, abs=0.01)
    assert found["recomputed_tokens"]["ratio"] == pytest.approx((100 - 120 - 20) / 20, abs=1e-3)
    assert found["task_mean"]["ratio"] == 1.0


def test_intervals_cover_and_shrink_with_more_users():
    """Unpaired noise: the interval has to know."""

    def arms(users):
        one, two = {}, {}
        for seed in range(4):
            rng = random.Random(100 + seed)
            for arm in (one, two):
                rows = [row(u, ttft=rng.lognormvariate(0, 1.0)) for u in range(users)]
                arm[seed] = run("x", seed, rows)
        return one, two

    wide, narrow = (stats.ratios(*arms(n), draws=300)["ttft_mean"] for n in (5, 200))
    assert wide["high"] - wide["low"] > 2 * (narrow["high"] - narrow["low"]) > 0
    assert narrow["low"] < 1.0 < narrow["high"]


def test_ratios_use_only_common_seeds_and_draws_are_repeatable():
    a, b = by_seed(noisy("sam", 0.5)), by_seed(noisy("stock", 1.0, seeds=1))
    assert stats.ratios(a, {}) == {}
    only = stats.ratios({0: a[0]}, b, draws=20)
    assert stats.ratios(a, b, draws=20) == only


def test_the_report_adds_up():
    runs = [run(seed=s) for s in range(2)] + [run("sam-hints", 0)]
    report = json.loads(json.dumps(build_report(runs, {"arms": ["stock", "sam-hints", "no"]})))
    assert list(report["arms"]) == ["stock", "sam-hints"]
    stock = report["arms"]["stock"]
    tiers = stock["device_tokens"] + stock["host_tokens"] + stock["storage_tokens"]
    assert stock["recomputed_tokens"] + tiers == stock["prompt_tokens"] == 2 * 12 * 100
    assert (stock["hit_rate"], stock["hit_rate_ceiling"]) == (0.8, 0.9)
    assert stock["hit_rate_by_tier"] == {"device": 0.6, "host": 0.2, "storage": 0.0}
    assert stock["output_tokens_per_s"] == 2 * 12 * 5 / 20
    assert stock["counters"] == {"load_back_tokens": 14.0}
    assert stock["outcomes"] == {"evict:done": 4}
    assert stock["scheduler"]["share_of_wall"] == 0.1
    assert report["ratios"]["stock"]["sam-hints"]["seeds"] == 1


def test_targets_say_met_or_by_how_much():
    runs = noisy("stock", 1.0) + noisy("stock-lpm", 0.5) + noisy("sam-hints", 0.2)
    report = build_report(runs, {"workload": "swarm"})
    verdict = {(t["against"], t["metric"]): t["met"] for t in report["targets"]}
    assert verdict["stock", "ttft_mean"] and verdict["stock-lpm", "ttft_mean"]
    some = noisy("stock", 1.0) + noisy("sam-hints", 0.9)
    lines = target_lines(build_report(some, {"workload": "swarm"}))
    assert any("missed (0.90)" in line for line in lines)
    limit = next(line for line in lines if line.startswith("what limits sam-hints"))
    # sam-hints computes 14 of 100 tokens, stock 20; 10 of them are new; 30 s of 3 x 10 s
    assert "71 % of what it computes" in limit and "0.50x of stock's" in limit
    assert "scheduler 3.0 s of 30 s" in limit
    assert not any("stock-lpm" in line for line in lines)
    same = noisy("stock", 1.0) + noisy("sam-plain", 1.0)
    lines = target_lines(build_report(same, {"workload": "nohints"}))
    assert lines and all("0.98-1.02x: met (1.00)" in line for line in lines)
    assert not target_lines(build_report(same, {"workload": "trace"}))


def test_pool_bytes_and_throughput_are_ratios_of_whole_runs():
    ours = {s: run("sam", s, peak_l3_bytes=50 + s, wall_s=20.0) for s in range(3)}
    theirs = {s: run("stock", s, peak_l3_bytes=100 + 2 * s) for s in range(3)}
    found = stats.ratios(ours, theirs, draws=50)
    assert found["peak_l3_bytes"] == {"ratio": 0.5, "low": 0.5, "high": 0.5}
    assert found["tokens_per_s"] == {"ratio": 0.5, "low": 0.5, "high": 0.5}
    without = {s: run("stock", s) for s in range(3)}
    assert "peak_l3_bytes" not in stats.ratios(ours, without, draws=50)


def test_other_tokens_are_counted():
    other = run("sam-hints", rows=[row(0, digest=1), row(1, digest=2), row(2, digest=1)])
    report = build_report([run(rows=[row(0), row(1)]), other], {"arms": ["stock", "sam-hints"]})
    assert report["differing_requests"] == {"sam-hints": 2}


def test_tables_name_core_policy_and_every_arm():
    report = build_report(noisy("stock", 1.0) + noisy("sam-hints", 0.5), {})
    console = Console(file=io.StringIO(), width=200)
    console.print(arms_table(report), ratios_table(report, "stock"))
    text = console.file.getvalue()
    for wanted in ("stock", "sam-hints", "Rust", "fcfs", "endless cache", "0.50 (0."):
        assert wanted in text


def test_the_page_is_whole_and_needs_no_network():
    runs = noisy("stock", 1.0) + noisy("sam-hints", 0.5)
    about = {"command": "python -m sam.bench <replay>", "workload": "swarm"}
    page = to_html(build_report(runs, about), runs)
    assert "&lt;replay&gt;" in page and "<replay>" not in page
    assert not re.search(r"https?://|<script|<link|url\(", page)
    assert page.count("<svg") >= 4 and page.rstrip().endswith("</html>")


def test_plots_are_xml_with_a_mark_per_arm():
    report = build_report(noisy("stock", 1.0) + noisy("sam-hints", 0.5), {})
    plots = {
        "rect": tiers_svg(report["arms"]),
        "polyline": ecdf_svg({"a": [1.0, 2.0], "b": [3.0], "c": []}),
        "circle": whiskers_svg(report["ratios"]["stock"], "ttft_mean"),
    }
    counts = {kind: len(ElementTree.fromstring(svg).findall(kind)) for kind, svg in plots.items()}
    assert counts == {"rect": 2 * 5 + 5, "polyline": 2, "circle": 1}


def test_state_goes_on_where_it_was(tmp_path):
    state = State(tmp_path, {"l1": 0.2})
    state.add(run(seed=1))
    with open(state.path, "a") as file:
        file.write('{"seed": 2, "arm": "cut o')
    again = State(tmp_path, {"l1": 0.2})
    assert (1, "stock") in again and (2, "stock") not in again
    assert again.runs[1, "stock"]["rows"] == run(seed=1)["rows"]
    assert not State(tmp_path, {"l1": 0.3}).runs
    assert not State(tmp_path, {"l1": 0.2}, fresh=True).runs


def test_fingerprints_depend_on_values_only():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert code_version() == code_version()


def test_counters_of_a_metrics_page():
    page = (
        "# HELP sglang:load_back_tokens_total x\n"
        'sglang:load_back_tokens_total{pool="kv",tp_rank="0"} 5.0\n'
        'sglang:load_back_tokens_total{pool="swa",tp_rank="0"} 2.0\n'
        "sglang:evicted_tokens_total 1e3\n"
        "sglang:other_total 9\n"
    )
    found = measure.counters(page)
    assert found == {"load_back_tokens": 7.0, "evicted_tokens": 1000.0}
    assert measure.since({"evicted_tokens": 400.0}, found)["evicted_tokens"] == 600.0
    assert measure.since({}, found)["load_back_tokens"] == 7.0


def test_hint_outcomes_and_a_server_without_sessions():
    report = {"summary": {"actions": {"session.evict:done": 3, "sam.queued:done": 1}}}
    assert measure.hint_outcomes(report) == {"evict:done": 3, "sam.queued:done": 1}
    assert measure.hint_outcomes(None) == {}


def test_peak_bytes_sees_the_last_state(tmp_path):
    with measure.PeakBytes(lambda: measure.folder_bytes(tmp_path)) as peak:
        (tmp_path / "page").write_bytes(b"x" * 1234)
    assert peak.peak_bytes == 1234


def test_a_gauge_is_summed_over_its_labels():
    text = '# HELP a\na{b="1"} 2e3\na{b="2"} 24\nab 7\n'
    assert measure.metric_bytes(text, "a") == 2024
    assert measure.metric_bytes(text, "absent") == 0


def test_options_and_their_quick_set():
    args = cli.parse(["--quick", "--seeds", "7"])
    assert (args.model, args.users, args.seeds) == ("tiny", 4, [7])
    assert args.arms == ["stock", "stock-lpm", "sam-hints"]
    full = cli.parse([])
    assert full.users == 10 and len(full.seeds) >= 3 and full.page_size == 1
    assert cli.parse(["--workload", "coding"]).users == 16
    assert cli.parse(["--l3", "file"]).page_size == 16


@pytest.mark.parametrize(
    "wrong",
    [
        *(["--l2", "1"], ["--workload", "trace"], ["--arms", "x"], ["--traces", "/no/such"]),
        *(["--sweep", "l4=1"], ["--sweep", "l1=a"], ["--sweep", "l1=1", "l1=2"]),
        *(["--sweep", "l3=tape"], ["--sweep", "l2=1,2"]),
    ],
)
def test_wrong_options_end_with_2(wrong, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.parse(wrong)
    assert raised.value.code == 2
    assert wrong[0].removeprefix("--") in capsys.readouterr().err


def test_a_wrong_external_server_ends_with_2(tmp_path):
    assert cli.main(["--external", "x=nowhere", "--workdir", str(tmp_path)]) == 2


def test_settings_are_what_makes_runs_comparable():
    base = cli.settings_of(cli.parse([]))
    assert cli.settings_of(cli.parse(["--arms", "stock", "--seeds", "9"])) == base
    for other in (["--l1", "0.4"], ["--lengths", "0.1"], ["--model", "tiny"], ["--l3", "file"]):
        assert cli.settings_of(cli.parse(other)) != base


def test_a_pool_too_small_for_the_longest_request_is_said(tmp_path):
    words = Vocabulary([f"word{i}" for i in range(50)])
    plan = build("swarm", WorkloadSpec(users=2), words)
    args = argparse.Namespace(l1=0.001)
    comparison = Comparison(args, [], State(tmp_path, {}), Console(file=io.StringIO()))
    with pytest.raises(Unfit, match="--l1"):
        comparison._sizes(plan, timeline_of(plan, words.count))
