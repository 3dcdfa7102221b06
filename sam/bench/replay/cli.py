"""The command line of `python -m sam.bench replay`.

Owns: options, their defaults, exit codes, and a clean end. Must never leave a process behind: a
signal stops the server, prints what is measured so far and keeps the state for the next start.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from sam.bench.ending import first_signal_interrupts, reason_of
from sam.bench.quickstart import describe_machine, hide_accelerators
from sam.bench.replay.arms import ARMS, DEFAULT_ARMS, Arm, external
from sam.bench.replay.comparison import Comparison, Unfit, spec_of
from sam.bench.replay.html import about_lines, to_html
from sam.bench.replay.pools import KINDS
from sam.bench.replay.report import arms_table, build_report, ratios_table, target_lines
from sam.bench.replay.state import State
from sam.bench.replay.sweep import axes_of, name_of, points_of, sweep_table
from sam.bench.swarm_client import RequestFailed
from sam.bench.workloads import WORKLOADS
from sam.bench.workloads.coding import USERS as CODING_USERS
from sam.bench.workloads.text import Vocabulary
from sam.sim.trace import TraceError
from sam.testing.server import ServerFailed
from sam.testing.tiny_model import PRESETS, build_tiny_model

EXIT_INTERRUPTED = 130
QUICK = {
    "users": 4, "turns": 5, "lengths": 0.02, "gaps": 0.02, "model": "tiny", "l1": 0.4,
    "seeds": [0, 3], "arms": ["stock", "stock-lpm", "sam-hints"],
}  # fmt: skip
_TRACES = Path(__file__).resolve().parents[3].parent / "shared" / "traces"
_ABOUT = """\
Starts one real server after another, on the CPU with a random-weight model, replays the same
agent work on each, closed loop (an agent's next request waits for its answer and its tools), and
compares. Requests are the same in every arm but for their hints; arms come in random order per
seed. Stop it whenever you like: the next start with the same settings goes on where it was.
"""
_EPILOG = """\
examples:
  python -m sam.bench replay --quick                     about 6 minutes on 2 cores
  python -m sam.bench replay --html report.html          10 users, all arms, 3 seeds
  python -m sam.bench replay --workload coding --l1 0.3 --arms stock-lpm sam-idle-lpm
  python -m sam.bench replay --workload trace --trace mooncake.jsonl
  python -m sam.bench replay --sweep l1=0.2,0.3,0.5 l2=1.5,2,4 --seeds 0 --html sweep.html
  python -m sam.bench replay --arms stock --external mine=http://127.0.0.1:30000,manage
What it costs: the 25 M model computes some 2,000 prompt tokens a second on 2 cores (tiny: 15,000),
so that TTFT is mostly prefill and queueing; a run of the default swarm is a minute or two.
exit codes: 0 done; 2 wrong options; 3 a server failed; 130 interrupted (partial report).
"""


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    out, log = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        arms = [*(ARMS[name] for name in args.arms), *map(external, args.external)]
    except ValueError as error:
        log.print(f"replay: {error}", style="red", markup=False)
        return 2
    hide_accelerators(log)
    points, reports, code = points_of(args), {}, 0
    for point in points:
        if len(points) > 1:
            log.print(f"\n{name_of(point)}")
        state = State(point.workdir, settings_of(point), fresh=args.fresh)
        n_before = len(state.runs)
        code = _compare(point, arms, state, log)
        if code in (0, EXIT_INTERRUPTED, 3):
            reports[name_of(point)] = _show(point, arms, state, argv, out, log)
        if code not in (0, 2) or _is_enough(args, points, len(state.runs) - n_before):
            break
    if len(points) > 1 and reports:
        Console(highlight=False, width=max(out.width, 30 + 30 * len(arms))).print(
            sweep_table(reports)
        )
    if args.json and reports:
        found = [{"point": point, **report} for point, report in reports.items()]
        print(json.dumps({"points": found} if len(points) > 1 else found[0]), flush=True)
    return 0 if code == 2 and reports else code


def _is_enough(args: argparse.Namespace, points: Sequence[argparse.Namespace], ran: int) -> bool:
    """Whether `--max-runs` is used up; what is left of it holds for the points to come."""
    if not args.max_runs:
        return False
    args.max_runs -= ran
    for point in points:
        point.max_runs = args.max_runs
    return args.max_runs <= 0


def _compare(args: argparse.Namespace, arms: list[Arm], state: State, log: Console) -> int:
    log.print(f"{describe_machine()}; finished runs are kept in {state.path}")
    comparison = Comparison(args, arms, state, log)
    try:
        with first_signal_interrupts():
            model = build_tiny_model(args.workdir / f"model-{args.model}", preset=args.model)
            comparison.run(model, Vocabulary.of_model(model))
    except KeyboardInterrupt:
        log.print("\ninterrupted; every server is stopped. Measured so far:")
        return EXIT_INTERRUPTED
    except (Unfit, TraceError) as error:
        log.print(f"replay: {error}", style="red", markup=False)
        return 2
    except (ServerFailed, RequestFailed, httpx.HTTPError, OSError, ExceptionGroup) as error:
        log.print(f"replay: {reason_of(error)}", style="red", markup=False)
        log.print(f"server logs: {args.workdir / 'logs'}. Measured so far:")
        return 3
    return 0


def _show(
    args: argparse.Namespace, arms: list[Arm], state: State, argv: list[str], out: Console,
    log: Console,
) -> dict[str, Any]:  # fmt: skip
    names = [arm.name for arm in arms]
    runs = [run for run in state.runs.values() if run["arm"] in names and run["seed"] in args.seeds]
    wanted = len(names) * len(args.seeds)
    about = {**_about(args, argv, runs), "arms": names, "settings": settings_of(args)}
    report = build_report(runs, about) | {"runs": len(runs), "runs_wanted": wanted}
    wide = Console(highlight=False, width=max(out.width, 60 + 19 * len(names)))
    for line in about_lines(report):
        out.print(line, soft_wrap=True, markup=False)
    if runs:
        wide.print(arms_table(report))
    for base, found in report["ratios"].items():
        if found:
            wide.print(ratios_table(report, base))
    for line in target_lines(report):
        out.print(line)
    if len(runs) < wanted:
        out.print(f"partial: {len(runs)} of {wanted} runs; the same command goes on")
    if args.html:
        args.html.write_text(to_html(report, runs))
        log.print(f"written: {args.html}")
    return report


def _source(args: argparse.Namespace) -> str:
    found = args.trace or args.traces
    return Path(found).name if found else "made-up shapes (no trace files here)"


def _about(args: argparse.Namespace, argv: list[str], runs: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("working_set_tokens", "mean_working_set_tokens", "l1_tokens", "longest_tokens")
    sizes = {run["seed"]: {key: run[key] for key in keys} for run in runs}
    return {
        "command": shlex.join(["python", "-m", "sam.bench", "replay", *argv]),
        "workload": args.workload,
        "machine": f"{describe_machine()}; SGLang {version('sglang')}",
        "date": datetime.now(UTC).date().isoformat(),
        "scale": spec_of(args, 0).about().rsplit(", seed", 1)[0],
        "source": _source(args),
        "sizes": {f"seed {seed}": found for seed, found in sorted(sizes.items())},
        "note": "CPU, random-weight model. Times depend on the machine and its load; token counts "
        "move little.",
    }


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What makes runs comparable; arms and seeds may be added later."""
    keys = ("workload", "users", "turns", "lengths", "waves", "gaps", "max_gap", "traces", "trace",
            "model", "l1", "l2", "l3", "page_size", "running", "server_arg",
            "tool_calls")  # fmt: skip
    found = {key: getattr(args, key) for key in keys}
    return {key: str(value) if isinstance(value, Path) else value for key, value in found.items()}


def parse(argv: list[str]) -> argparse.Namespace:
    """Options with their defaults filled in. Exits with 2 and a reason where they are wrong."""
    parser = _parser()
    if "--quick" in argv:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    if args.users is None:
        args.users = CODING_USERS if args.workload == "coding" else 10
    if args.traces is not None and not args.traces.is_dir():
        parser.error(f"--traces {args.traces}: no such folder")
    try:
        axes = axes_of(args.sweep)
    except ValueError as error:
        parser.error(str(error))
    if min(axes.get("l2", [args.l2])) <= 1:
        parser.error("--l2 must be more than 1: SGLang's host pool holds more than the device pool")
    if args.page_size is None:
        has_pool = any(kind != "off" for kind in axes.get("l3", [args.l3]))
        args.page_size = 16 if has_pool else 1
    if args.workload == "trace" and not args.trace:
        parser.error("--workload trace needs --trace FILE")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sam.bench replay", description=_ABOUT, epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    what = parser.add_argument_group("what is replayed")
    workloads = "; ".join(f"{name}: {about}" for name, about in WORKLOADS.items())
    what.add_argument("--workload", choices=WORKLOADS, default="swarm", help=workloads)
    what.add_argument("--users", type=int, help="at once (10; coding: 16)")
    what.add_argument("--turns", type=int, default=10, help="of a leader; coding: x 2 (10)")
    what.add_argument("--waves", type=int, default=2, help="a leader calls members so often (2)")
    what.add_argument("--lengths", type=float, default=0.02, help="tokens per trace token (0.02)")
    what.add_argument("--gaps", type=float, default=0.05, help="seconds per trace second (0.05)")
    what.add_argument("--max-gap", type=float, default=300, help="longest gap, trace seconds (300)")
    traces = _TRACES if _TRACES.is_dir() else None
    what.add_argument("--traces", type=Path, default=traces, help="folder with the shared traces")
    what.add_argument("--trace", help="workload trace: a file in any format that sam.sim reads")
    what.add_argument(
        "--tool-calls", action="store_true",
        help="answers before tool waits are calls, made by a grammar: some 50 tokens each",
    )  # fmt: skip
    what.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    _add_servers(parser.add_argument_group("the servers"))
    run = parser.add_argument_group("the run")
    run.add_argument("--quick", action="store_true", help="a small swarm: does it work at all?")
    run.add_argument("--max-runs", type=int, default=0, help="stop after so many (all)")
    run.add_argument("--fresh", action="store_true", help="forget what is in the state file")
    run.add_argument("--json", action="store_true", help="last line: one JSON object")
    run.add_argument("--html", type=Path, help="write the report with plots to this file")
    run.add_argument("--workdir", type=Path, default=Path(".cache/replay"), help="(.cache/replay)")
    return parser


def _add_servers(group: Any) -> None:
    arms = "; ".join(f"{arm.name}: {arm.about}" for arm in ARMS.values())
    group.add_argument("--arms", nargs="*", choices=ARMS, default=list(DEFAULT_ARMS), help=arms)
    group.add_argument(
        "--external", action="append", default=[], metavar="NAME=URL[,HINTS]",
        help="one more arm: a running SGLang 0.5.23; HINTS: none, session, lineage, manage, idle",
    )  # fmt: skip
    group.add_argument("--l1", type=float, default=0.25, help="device pool, x working set (0.25)")
    group.add_argument("--l2", type=float, default=2.0, help="host pool, x device pool (2)")
    group.add_argument("--l3", choices=KINDS, default="off", help="pool (off)")
    group.add_argument(
        "--sweep", nargs="+", default=[], metavar="AXIS",
        help="a comparison at every point: l1=0.2,0.3 l2=2,4 l3=off,file",
    )  # fmt: skip
    group.add_argument("--page-size", type=int, help="tokens (1; 16 with a pool)")
    group.add_argument("--running", type=int, default=16, help="--max-running-requests (16)")
    group.add_argument("--model", choices=sorted(PRESETS), default="small", help="(small: 25 M)")
    group.add_argument(
        "--server-arg", action="append", default=[], metavar="ARG", help="for all started servers"
    )
