"""Points of a sweep, and what a pool of Mooncake gives to every arm."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from sam.bench.replay import cli
from sam.bench.replay.arms import ARMS
from sam.bench.replay.comparison import Comparison, Unfit, spec_of
from sam.bench.replay.pools import Pool, fresh_pool, read_flags
from sam.bench.replay.state import State
from sam.bench.replay.sweep import axes_of, name_of, points_of, sweep_table
from sam.bench.workloads import build
from sam.bench.workloads.spec import WorkloadSpec
from sam.bench.workloads.text import Vocabulary
from sam.bench.workloads.timeline import timeline_of

WORDS = Vocabulary([f"word{i}" for i in range(50)])
QUIET = Console(file=io.StringIO())
PRINTED = """\
environment of each server:
  PYTHONPATH=/opt/mooncake
flags of each server, beside its own:
  --radix-cache-backend sam --enable-hierarchical-cache --hicache-mem-layout page_first_direct
  --page-size 16 --hicache-storage-backend mooncake
  --hicache-storage-backend-extra-config '{"master": "127.0.0.1:1", "threshold": 64}'
"""


def test_a_sweep_is_every_combination_with_a_state_and_a_page_of_its_own():
    args = cli.parse(["--sweep", "l1=0.2,0.3", "l3=off,file", "--html", "a/b.html", "--l2", "3"])
    points = points_of(args)
    assert [(p.l1, p.l2, p.l3) for p in points] == [
        *((0.2, 3.0, "off"), (0.2, 3.0, "file"), (0.3, 3.0, "off"), (0.3, 3.0, "file"))
    ]
    assert {p.page_size for p in points} == {16}, "all points of one sweep are comparable"
    assert points[0].html == Path("a/b-l1-0.2-l2-3-l3-off.html")
    assert len({p.html for p in points}) == 4 == len({name_of(p) for p in points})
    assert len({str(cli.settings_of(p)) for p in points}) == 4


def test_without_a_sweep_there_is_one_point_as_asked():
    args = cli.parse(["--html", "a.html"])
    (point,) = points_of(args)
    assert vars(point) == vars(args)
    assert cli.parse(["--sweep", "l1=0.2"]).page_size == 1
    assert axes_of(["l2=2", "l1=0.5,1"]) == {"l2": [2.0], "l1": [0.5, 1.0]}


def test_what_is_left_of_max_runs_holds_for_later_points():
    args = cli.parse(["--max-runs", "3", "--sweep", "l1=0.2,0.3"])
    points = points_of(args)
    assert not cli._is_enough(args, points, 2)
    assert [p.max_runs for p in points] == [1, 1]
    assert cli._is_enough(args, points, 1)
    assert not cli._is_enough(cli.parse([]), [], 5), "all runs are wanted"


def test_the_table_has_a_row_per_point_and_says_which_base():
    figures = {"recomputed_tokens": {"ratio": 0.8}, "ttft_mean": {"ratio": 0.5}}
    report = {
        "arms": {"stock": {"hit_rate": 0.5}, "sam-hints": {"hit_rate": 0.75}},
        "ratios": {"stock": {"sam-hints": figures}},
    }
    table = sweep_table({"one": report, "two": {"arms": {}, "ratios": {}}})
    assert table.row_count == 2
    cells = list(table.columns[2].cells)
    assert cells == ["0.750 0.80 0.50 of stock", "-"]


def test_a_pool_gives_all_arms_the_same_and_none_its_backend():
    flags, env = read_flags(PRINTED)
    assert env == {"PYTHONPATH": "/opt/mooncake"}
    assert flags == (
        *("--hicache-mem-layout", "page_first_direct", "--hicache-storage-backend", "mooncake"),
        "--hicache-storage-backend-extra-config",
        '{"master": "127.0.0.1:1", "threshold": 64}',
    )
    args = cli.parse(["--l3", "mooncake"])
    comparison = Comparison.__new__(Comparison)
    comparison.args, comparison.model = args, Path("model")
    comparison.sizes = {0: {"l1_tokens": 100, "mean_prompt_tokens": 10}}
    pool = Pool(flags)
    found = {name: comparison._flags(ARMS[name], 0, pool) for name in ("stock", "sam-hints")}
    assert found["sam-hints"][-6:] == found["stock"][-6:] == list(flags)
    assert "--radix-cache-backend" not in found["stock"]


def test_shortest_prefill_first_wants_prompts_in_one_piece(tmp_path):
    plan = build("swarm", WorkloadSpec(users=4, lengths=0.5), WORDS)
    line = timeline_of(plan, WORDS.count)
    assert line.longest_tokens > 2048, "what the servers' own chunk size is"
    enough = f"--server-arg=--chunked-prefill-size={line.longest_tokens}"
    for name, more, refused in (
        ("stock-lpm", [], False),
        ("stock-spf", [], True),
        ("sam-hints-spf", [enough], False),
        ("stock-spf", [enough, "--server-arg=--chunked-prefill-size", "--server-arg=64"], True),
    ):
        args = cli.parse([*more, "--l1", "1"])
        comparison = Comparison(args, [ARMS[name]], State(tmp_path, {}), QUIET)
        if not refused:
            comparison._sizes(plan, line)
            continue
        with pytest.raises(Unfit, match=f"={line.longest_tokens} "):
            comparison._sizes(plan, line)


def test_a_pool_of_files_starts_empty(tmp_path):
    (tmp_path / "l3").mkdir()
    (tmp_path / "l3" / "old.bin").write_bytes(b"x")
    with fresh_pool("file", tmp_path) as pool, pool.peak:
        (folder,) = pool.env.values()
        assert not list(Path(folder).iterdir())
        Path(folder, "new.bin").write_bytes(b"abc")
    assert pool.peak.peak_bytes == 3
    with fresh_pool("off", tmp_path) as none:
        assert none == Pool()


@pytest.mark.parametrize("traces", [None, *filter(Path.is_dir, [cli._TRACES])])
@pytest.mark.parametrize("options", [["--quick"], []])
def test_the_defaults_fit_their_device_pool(options, traces, tmp_path):
    args = cli.parse(options)
    args.traces = traces
    comparison = Comparison(args, [], State(tmp_path, {}), QUIET)
    for seed in args.seeds:
        plan = build(args.workload, spec_of(args, seed), WORDS)
        sizes = comparison._sizes(plan, timeline_of(plan, WORDS.count))
        assert sizes["l1_tokens"] < sizes["working_set_tokens"], "nothing would be evicted"
