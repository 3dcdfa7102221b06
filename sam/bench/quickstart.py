"""The quickstart: one agent swarm on the stock cache and on sam, side by side, on any CPU.

Owns: the command line, the two server configurations, progress, and a clean end. Must never
leave a process behind, and must never give the arms different settings beyond
`--radix-cache-backend sam`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from sam.bench.ending import first_signal_interrupts, reason_of
from sam.bench.hit_cost import KINDS, HitCost, measure_hit_cost
from sam.bench.progress import Steps
from sam.bench.serve import serve
from sam.bench.swarm import SwarmPlan, SwarmSpec, plan_swarm
from sam.bench.swarm_client import RequestFailed, SwarmRun, run_swarm
from sam.bench.swarm_report import arms_table, cost_table, to_json
from sam.bench.warmup import warm_up
from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS, ServerFailed, ServerProcess
from sam.testing.tiny_model import PRESETS, build_tiny_model

ARMS: Mapping[str, tuple[str, ...]] = {"stock": (), "sam": ("--radix-cache-backend", "sam")}
NEEDED_MEMORY_BYTES = 3 * 1024**3
NEEDED_DISK_BYTES = 512 * 1024**2
EXIT_INTERRUPTED = 130
_HIT_COST_WORDS = 900
_HIT_COST_REPEATS = 3
_TREE_CORE = re.compile(r"Tree Core: (\w+)")
_ABOUT = """\
Starts a small random-weight model twice, first on SGLang's stock cache and then with sam, plays
the same agent swarm on both (a leader, sub-agents, tool waits, an end), and compares: where the
prompt tokens came from, what was recomputed, TTFT, and whether the outputs are the same.
'serve' leaves a server with sam running instead; see 'serve --help'.
"""
_EPILOG = """\
exit codes: 0 done; 1 the outputs of the two servers differ; 2 wrong arguments or the machine
lacks something; 3 a server failed; 130 interrupted (what was measured so far is printed).
"""


class Unfit(RuntimeError):
    """The machine lacks something; the text says what, and what to do."""


def main(argv: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:
        return serve(arguments[1:])
    args = _parser().parse_args(arguments)
    out, log = Console(highlight=False), Console(stderr=True, highlight=False)
    session = _Session(args, log)
    try:
        with first_signal_interrupts():
            session.run()
        code = 0 if session.report()["identical_outputs"] else 1
    except KeyboardInterrupt:
        log.print("\ninterrupted; every server is stopped. Measured so far:")
        code = EXIT_INTERRUPTED
    except Unfit as error:
        log.print(f"quickstart: {error}", style="red")
        return 2
    except (ServerFailed, RequestFailed, ExceptionGroup) as error:
        log.print(f"quickstart: {reason_of(error)}", style="red", markup=False)
        log.print(f"server logs: {session.logs}")
        return 3
    _show(session.report(), out, as_json=args.json)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart.sh",
        description=_ABOUT,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--seed", type=int, default=0, help="of the swarm (default 0)")
    parser.add_argument("--waves", type=int, default=3, help="waves of sub-agents (default 3)")
    parser.add_argument("--members", type=int, default=6, help="sub-agents a wave (default 6)")
    parser.add_argument(
        "--model", choices=sorted(PRESETS), default="small", help="size (default small: 25 M)"
    )
    parser.add_argument(
        "--max-total-tokens", type=int, default=6144, metavar="N", help="device pool (6144)"
    )
    parser.add_argument(
        "--hicache-ratio", type=float, default=2.0, metavar="R", help="host pool, x device (2)"
    )
    parser.add_argument(
        "--reverse", action="store_true", help="sam first: does the order of the arms matter?"
    )
    parser.add_argument(
        "--workdir", type=Path, default=Path(".cache/quickstart"), help="for model and logs"
    )
    return parser


class _Session:
    """One run of the quickstart; keeps what was measured, however far it came."""

    def __init__(self, args: argparse.Namespace, log: Console) -> None:
        self.args, self.log = args, log
        self.logs = args.workdir / "logs"
        self.runs: dict[str, SwarmRun] = {}
        self.cost: HitCost | None = None
        first = "sam" if args.reverse else "stock"
        self.about: dict[str, Any] = {"seed": args.seed, "first": first, "tree_core": {}}

    def run(self) -> None:
        args, log = self.args, self.log
        check_machine(args.workdir)
        self.about["machine"] = describe_machine()
        log.print(f"machine: {self.about['machine']}; seed {args.seed}")
        hide_accelerators(log)
        plan = plan_swarm(SwarmSpec(seed=args.seed, waves=args.waves, members=args.members))
        log.print(f"swarm: {len(plan.agents)} agents, {len(plan.order)} requests an arm")
        model = build_tiny_model(args.workdir / f"model-{args.model}", preset=args.model)
        log.print(f"model: {args.model}, random weights, in {model}")
        self.logs.mkdir(parents=True, exist_ok=True)
        for name in reversed(ARMS) if args.reverse else ARMS:
            self._run_arm(name, [*self._server_args(model), *ARMS[name]], plan)

    def report(self) -> dict[str, Any]:
        runs = {name: self.runs[name] for name in ARMS if name in self.runs}
        return to_json(runs, self.cost, self.about)

    def _server_args(self, model: Path) -> list[str]:
        args = self.args
        return [
            *CPU_SERVER_ARGS, *CPU_HICACHE_ARGS, "--model-path", str(model),
            "--max-total-tokens", str(args.max_total_tokens),
            "--hicache-ratio", f"{args.hicache_ratio:g}",
            "--random-seed", "0",
        ]  # fmt: skip

    def _run_arm(self, name: str, server_args: list[str], plan: SwarmPlan) -> None:
        log, hints = self.log, name == "sam"
        started = time.monotonic()
        log.print(f"{name}: starting a server (20-60 s)")
        server = ServerProcess(server_args, log_path=self.logs / f"{name}.log")
        with server:
            core = _TREE_CORE.findall(server.log_text())
            self.about["tree_core"][name] = core[-1] if core else "unknown"
            log.print(
                f"{name}: ready after {time.monotonic() - started:.0f} s, tree core "
                f"{self.about['tree_core'][name]}; warming up"
            )
            warm_up(server.url, seed=self.args.seed)
            server.flush_cache()
            run = self.runs.setdefault(name, SwarmRun())
            with Steps(log, f"{name}: swarm", len(plan.order)) as steps:
                run_swarm(server.url, plan, run, hints=hints, on_answer=lambda _: steps.step())
            if hints:
                self._measure_hit_cost(server.url)

    def _measure_hit_cost(self, url: str) -> None:
        with Steps(self.log, "sam: hit against recompute", _HIT_COST_REPEATS * len(KINDS)) as s:
            self.cost = measure_hit_cost(
                url,
                seed=self.args.seed,
                n_words=_HIT_COST_WORDS,
                repeats=_HIT_COST_REPEATS,
                on_step=s.step,
            )


def check_machine(workdir: Path) -> None:
    """Raises Unfit if the machine cannot run one server at a time."""
    free = psutil.virtual_memory().available
    if free < NEEDED_MEMORY_BYTES:
        raise Unfit(
            f"a server needs about {NEEDED_MEMORY_BYTES / 1024**3:.0f} GiB of memory and "
            f"{free / 1024**3:.1f} GiB are free: end other programs and try again"
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise Unfit(f"{workdir} is not writable ({error.strerror}): pass --workdir") from None
    space = psutil.disk_usage(str(workdir)).free
    if space < NEEDED_DISK_BYTES:
        raise Unfit(
            f"model and logs need {NEEDED_DISK_BYTES // 1024**2} MiB in {workdir} and "
            f"{space // 1024**2} MiB are free: free some, or pass --workdir"
        )


def describe_machine() -> str:
    memory = psutil.virtual_memory().total / 1024**3
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.machine()} {platform.system()}"


def hide_accelerators(log: Console) -> None:
    """The quickstart's recipe is for CPUs: make CUDA devices invisible to the servers."""
    from sam.platform.cpu import find_accelerator

    found = find_accelerator()
    if found is None:
        return
    log.print(f"an accelerator is here ({found}); this demonstration hides it and uses the CPU")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _show(report: dict[str, Any], out: Console, *, as_json: bool) -> None:
    if report["arms"]:
        out.print(arms_table(report))
    table = cost_table(report)
    if table is not None:
        out.print(table)
    cores = ", ".join(f"{name}: {core}" for name, core in report["tree_core"].items())
    for line in (
        f"machine: {report.get('machine', '-')}; seed {report['seed']}; tree core: {cores}",
        "stock: SGLang's cache with HiCache (LRU, fcfs), same patched server, no hints sent.",
        f"One run each, {report['first']} first: on few cores times vary a lot between runs and "
        "with other load, token counts little.",
    ):
        out.print(line, soft_wrap=True)
    if as_json:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    sys.exit(main())
