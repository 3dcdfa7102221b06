"""Scheduler time per request on live servers without hints: sam against stock.

Owns: the workload, the turns that two servers take, and the ratios. Must never compare figures
of servers that did not run side by side, nor send a hint.

Each comparison is one stock server and one server with sam, both with HiCache on the tiny
model, both up at the same time and asleep while the other works. They get the same rounds of
the same requests, in alternating order: conversations that grow by turns over a shared system
prompt, more than the device pool holds, so that both evict. What is measured is CPU time of
the scheduler's thread outside the forward pass (`scheduler_clock`): the tiny model's forward
would drown the rest. A ratio is made per round; its spread says what it is worth. The arm
`stock` against stock shows what the method itself gives for no difference at all.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from sam.bench.progress import Steps
from sam.bench.scheduler_clock import Reading, clock_env
from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS, ServerProcess
from sam.testing.tiny_model import build_tiny_model

SAM = ("--radix-cache-backend", "sam")
ARMS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "stock": ((), {}),
    "sam_rust": (SAM, {"SAM_TREE_CORE": "rust"}),
    "sam_python": (SAM, {"SAM_TREE_CORE": "python"}),
}
WAVE = 8
WAVES_PER_ROUND = 5
PER_ROUND = WAVE * WAVES_PER_ROUND
WARM_UP_ROUNDS = 2
_TOKENS = range(300, 1_900)
_SYSTEM, _GROW, _LONGEST, _TALKS, _OUT = 300, (40, 160), 1_800, 24, 8


class Workload:
    """Waves of requests, each the next turn of another conversation. Same seed, same waves."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._system = self._fresh(_SYSTEM)
        self._talks = [list(self._system) for _ in range(_TALKS)]
        self._turn: list[int] = []

    def wave(self) -> list[list[int]]:
        self._turn = self._rng.sample(range(_TALKS), WAVE)
        for talk in self._turn:
            if len(self._talks[talk]) > _LONGEST:
                self._talks[talk] = list(self._system)
            self._talks[talk] += self._fresh(self._rng.randint(*_GROW))
        return [list(self._talks[talk]) for talk in self._turn]

    def answered(self, outputs: list[list[int]]) -> None:
        for talk, output in zip(self._turn, outputs, strict=True):
            self._talks[talk] += output

    def _fresh(self, n: int) -> list[int]:
        return self._rng.choices(_TOKENS, k=n)


@dataclass
class Arm:
    """One live server, its conversations and what each of its rounds cost."""

    name: str
    server: ServerProcess
    read: Callable[[], Reading]
    workload: Workload
    rounds: list[Reading] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def run_round(self, *, measured: bool) -> None:
        before = self.read()
        for _ in range(WAVES_PER_ROUND):
            sampling = {"temperature": 0.0, "max_new_tokens": _OUT, "ignore_eos": True}
            body = {"input_ids": self.workload.wave(), "sampling_params": sampling}
            answers = self.server.request("/generate", body)
            self.workload.answered([answer["output_ids"] for answer in answers])
            for answer in answers if measured else ():
                self.outputs.append(answer["output_ids"])
                self.prompt_tokens += answer["meta_info"]["prompt_tokens"]
                self.cached_tokens += answer["meta_info"]["cached_tokens"]
        time.sleep(0.1)  # the last turn is counted when the next one starts
        if measured:
            self.rounds.append(self.read().since(before))

    def figures(self) -> dict[str, Any]:
        n_requests = len(self.rounds) * PER_ROUND

        def per_request(values: Iterable[float], digits: int = 1) -> float:
            return round(sum(values) / n_requests, digits)

        by_call = {
            name: {
                "us": per_request(r.calls.get(name, (0, 0))[0] / 1e3 for r in self.rounds),
                "times": per_request(r.calls.get(name, (0, 0))[1] for r in self.rounds),
            }
            for name in self.rounds[-1].calls
        }
        return {
            "core": self.rounds[0].core,
            "scheduler_us": per_request(r.work_ns / 1e3 for r in self.rounds),
            "cache_us": per_request(r.cache_ns / 1e3 for r in self.rounds),
            "forward_us": per_request(r.forward_ns / 1e3 for r in self.rounds),
            "turns": per_request((r.n_turns for r in self.rounds), 2),
            "cached_share": round(self.cached_tokens / self.prompt_tokens, 4),
            "calls": {name: row for name, row in by_call.items() if row["times"]},
        }


def spread(ratios: list[float]) -> dict[str, float]:
    """Median, extremes and the middle half of per-round ratios."""
    ranked = sorted(ratios)
    quarter = len(ranked) // 4
    return {
        "median": round(median(ranked), 4),
        "low": round(ranked[0], 4),
        "q1": round(ranked[quarter], 4),
        "q3": round(ranked[-1 - quarter], 4),
        "high": round(ranked[-1], 4),
    }


def compare(stock: Arm, other: Arm) -> dict[str, Any]:
    pairs = list(zip(stock.rounds, other.rounds, strict=True))
    return {
        "arms": {"stock": stock.figures(), other.name: other.figures()},
        "scheduler_ratio": spread([b.work_ns / a.work_ns for a, b in pairs]),
        "cache_ratio": spread([b.cache_ns / a.cache_ns for a, b in pairs]),
        "outputs_identical": stock.outputs == other.outputs,
    }


@contextmanager
def arm_server(name: str, base: list[str], seed: int, label: str) -> Iterator[Arm]:
    extra, env = ARMS[name]
    with clock_env() as (clock, read):
        with ServerProcess([*base, *extra], env={**env, **clock}) as server:
            yield Arm(label, server, read, Workload(seed))


def run_pair(name: str, args: argparse.Namespace, log: Console) -> dict[str, Any]:
    """Stock and one other arm, side by side. Both servers are gone on return."""
    model = build_tiny_model(args.workdir / "model-tiny", preset="tiny")
    base = [*CPU_SERVER_ARGS, *CPU_HICACHE_ARGS, "--model-path", str(model)]
    base += ["--sleep-on-idle", "--random-seed", "0"]
    base += ["--max-total-tokens", str(args.max_total_tokens), "--page-size", str(args.page_size)]
    n_rounds = -(-args.requests // PER_ROUND)
    label = name if name != "stock" else "stock again"
    with ExitStack() as stack:
        log.print(f"{label} against stock: starting two servers (20-60 s each)")
        stock = stack.enter_context(arm_server("stock", base, args.seed, "stock"))
        other = stack.enter_context(arm_server(name, base, args.seed, label))
        with Steps(log, f"{label} against stock: rounds", n_rounds + WARM_UP_ROUNDS) as steps:
            for i in range(n_rounds + WARM_UP_ROUNDS):
                for arm in (stock, other) if i % 2 else (other, stock):
                    arm.run_round(measured=i >= WARM_UP_ROUNDS)
                steps.step()
        return compare(stock, other)


def report_table(result: dict[str, Any]) -> Table:
    title = f"Scheduler CPU time per request, {result['requests']} requests an arm, no hints"
    table = Table(title=title)
    for i, column in enumerate(
        ("arm", "tree core", "scheduler us", "in the cache us", "cached", "ratio (q1-q3)",
         "in the cache (q1-q3)", "same outputs")
    ):  # fmt: skip
        table.add_column(column, justify="left" if i < 2 else "right")
    for pair in result["pairs"]:
        for name, row in pair["arms"].items():
            cells = [name, row["core"], f"{row['scheduler_us']:,.0f}", f"{row['cache_us']:,.0f}"]
            cells.append(f"{row['cached_share']:.3f}")
            if name != "stock":
                for key in ("scheduler_ratio", "cache_ratio"):
                    r = pair[key]
                    cells.append(f"{r['median']:.3f} ({r['q1']:.3f}-{r['q3']:.3f})")
                cells.append("yes" if pair["outputs_identical"] else "NO")
            table.add_row(*cells, end_section=name != "stock")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sam.bench overhead", description=__doc__)
    parser.add_argument("--requests", type=int, default=800, help="per arm, whole rounds of 40")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["sam_rust", "sam_python"])
    parser.add_argument("--max-total-tokens", type=int, default=12_288, help="device pool")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--workdir", type=Path, default=Path(".cache/overhead"))
    parser.add_argument("--json", action="store_true")
    return parser


def main(argv: list[str] | None = None) -> int:
    """0, 1 if outputs differed, 130 after Ctrl-C or SIGTERM."""
    args = _parser().parse_args(argv)
    log = Console(stderr=True, highlight=False, soft_wrap=True)
    args.workdir.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"seed": args.seed, "pairs": []}
    result["requests"] = -(-args.requests // PER_ROUND) * PER_ROUND
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name in args.arms:
            result["pairs"].append(run_pair(name, args, log))
    except KeyboardInterrupt:
        log.print("interrupted; the servers are stopped")
        return 130
    if args.json:
        print(json.dumps(result))
    else:
        Console(width=140).print(report_table(result))
    return 0 if all(pair["outputs_identical"] for pair in result["pairs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
