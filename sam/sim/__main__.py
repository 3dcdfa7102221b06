"""`python -m sam.sim`: the command line of the simulator.

Owns options, progress and exit codes (0 done, 2 wrong input, 130 interrupted with a partial
report). Must never compute a figure itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import product

import msgspec
from tqdm import tqdm

from sam.sim import costs, policies, traces
from sam.sim.costs import Costs
from sam.sim.loop import FCFS, INSTANT, LPM, ORDERS
from sam.sim.replay import Hints
from sam.sim.report import summary, table
from sam.sim.runner import BASE, Answer, Experiment, Question
from sam.sim.trace import Trace, TraceError

EXAMPLES = """\
examples:
  python -m sam.sim --trace sessions.jsonl.gz --policy next-use --capacity 0.3 --sessions 16
  python -m sam.sim --trace sessions.jsonl.gz --policy next-use,next-use-hints,session-ref \\
      --capacity 0.1,0.2,0.5 --sessions 16,32 --seeds 3
  python -m sam.sim --trace sessions.jsonl.gz --policy next-use --hint-sigma 1 --hint-share 0.5
  python -m sam.sim --trace sessions.jsonl.gz --policy next-use --capacity 0.2 --host 4 --json
  python -m sam.sim --trace mooncake_trace.jsonl --policy lru --sessions 0 --capacity 0.1
  python -m sam.sim --trace synthetic:alternating --policy next-use-guard --capacity 0.3
  python -m sam.sim --trace sessions.jsonl.gz --policy next-use --total 100000 --no-times

figures (all of one fixed order of requests, the same for every policy and limit):
  hit            prompt tokens found in any tier, of all prompt tokens
  LRU            the same with plain LRU
  MIN-NB         clairvoyant, must hold running requests: what an engine could reach
  MIN            clairvoyant, may refuse any page: the bound
  ceiling        an infinite cache
  gap closed     (hit - LRU) / (MIN-NB - LRU)
  recompute/LRU  tokens computed again, as a multiple of LRU's
"""


def _numbers(kind: type, low: float, high: float):
    def parse(text: str) -> list:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
        for value in values:
            if not low <= value <= high:
                raise argparse.ArgumentTypeError(f"{value} is not in {low:g} … {high:g}")
        return values

    return parse


def _number(kind: type, low: float, high: float):
    parse_all = _numbers(kind, low, high)

    def parse(text: str):
        values = parse_all(text)
        if len(values) != 1:
            raise argparse.ArgumentTypeError(f"{text!r}: one number, please")
        return values[0]

    return parse


def _policies(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in policies.names():
            choices = ", ".join(policies.names())
            raise argparse.ArgumentTypeError(f"policy {name!r}: choose from {choices}")
    return chosen


def parser() -> argparse.ArgumentParser:
    about = "\n".join(f"  {name:22}{policies.about(name)}" for name in policies.names())
    p = argparse.ArgumentParser(
        prog="python -m sam.sim",
        description="Replay an agent trace through sam.core, without a server.",
        epilog=f"policies:\n{about}\n\ntrace formats:\n{traces.about()}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inf = float("inf")
    shares, counts = _numbers(float, 1e-6, 1e6), _numbers(int, 0, 1_000_000)
    add = p.add_argument
    add("--trace", required=True, help="file (.jsonl, .json, .gz), or synthetic:NAME[:SESSIONS]")
    add("--format", choices=traces.FORMATS, help="of the trace; default: by its first record")
    add("--policy", type=_policies, default=["next-use"], help="one or more, with commas")
    about_f = "device tier as a share of the concurrent working set (default 0.5)"
    add("--capacity", type=shares, default=[0.5], metavar="F", help=about_f)
    about_n = "device tier in tokens, instead of --capacity"
    add("--capacity-tokens", type=_number(int, 1, inf), metavar="N", help=about_n)
    about_s = "concurrent sessions (default 16); 0: every request as recorded"
    add("--sessions", type=counts, metavar="S", help=about_s)
    add("--seeds", type=_number(int, 1, 10_000), default=1, metavar="N", help="0 … N-1 (default 1)")
    about_t = "sessions to replay in all, the trace being repeated (default: each once)"
    add("--total", type=_number(int, 1, 10**8), metavar="N", help=about_t)
    about_w = "share of the requests that is not counted (default 0)"
    add("--warmup", type=_number(float, 0, 0.99), default=0.0, metavar="SHARE", help=about_w)
    add("--json", action="store_true", help="one JSON object; a list where several are asked for")
    add("--quiet", action="store_true", help="no progress bar")
    _add_hints(p)
    _add_engine(p)
    return p


def _add_hints(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("hints of the clients (expected_idle_s)").add_argument
    about = "clients send their idle time with this log-error (default: as the policy says)"
    add("--hint-sigma", type=_number(float, 0, 10), metavar="SIGMA", help=about)
    about = "share of the sessions that send it (default 1)"
    add("--hint-share", type=_number(float, 0, 1), default=1.0, metavar="SHARE", help=about)


def _add_engine(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("engine and tiers").add_argument
    ratio = _number(float, 0, 1e6)
    about = "in multiples of the device tier (default: none)"
    add("--host", type=ratio, default=0.0, metavar="R", help=f"host tier, {about}")
    add("--pool", type=ratio, default=0.0, metavar="R", help=f"pool, {about}")
    about = (
        "requests are points in time (instant, the default), hold memory until they are answered "
        "(at-once), or come as an engine under LRU serves them (fcfs, lpm)"
    )
    add("--order", choices=ORDERS, default=INSTANT, help=about)
    about = "who is next in the estimate of times"
    add("--service", choices=(FCFS, LPM), default=FCFS, help=about)
    add("--no-times", action="store_true", help="no estimate of TTFT")
    about = "rates from a file of `python -m sam.bench costs`, or cpu; single rates below go first"
    add("--costs", metavar="FILE", help=about)
    for field in msgspec.structs.fields(Costs):
        flag = f"--{field.name.removesuffix('_tokens_per_s').replace('_', '-')}-rate"
        about = f"tokens per second (default {field.default:g})"
        rate = _number(float, 1e-3, float("inf"))
        add(flag, type=rate, dest=field.name, metavar="T", help=about)


def _costs(args: argparse.Namespace) -> Costs:
    """Defaults, a file over them, single rates over both. Raises TraceError."""
    base = costs.load(args.costs).costs if args.costs else Costs()
    names = [field.name for field in msgspec.structs.fields(Costs)]
    given = {name: rate for name in names if (rate := getattr(args, name)) is not None}
    return msgspec.structs.replace(base, **given)


def _questions(args: argparse.Namespace, trace: Trace) -> Iterator[Question]:
    capacity_pages, capacities = None, args.capacity
    if args.capacity_tokens is not None:
        capacity_pages, capacities = max(args.capacity_tokens // trace.page_tokens, 1), [0.0]
    hints = None
    if args.hint_sigma is not None:
        hints = Hints(sigma=args.hint_sigma, share=args.hint_share)
    concurrent = args.sessions or ([0] if trace.as_recorded else [16])
    for sessions, capacity in product(concurrent, capacities):
        yield Question(
            capacity=capacity,
            capacity_pages=capacity_pages,
            concurrent=sessions,
            host_ratio=args.host,
            pool_ratio=args.pool,
            hints=hints,
            costs=args.costs,
            order=args.order,
            service=args.service,
            total=args.total,
            warmup=args.warmup,
            with_times=not args.no_times,
        )


def _is_complete(answer: Answer, name: str) -> bool:
    return {BASE, name} <= set(answer.outcomes) and answer.min_nb_tokens is not None


class _Runs:
    """Answers as they come, so that an interrupt loses only what is in hand."""

    def __init__(self, trace: Trace, args: argparse.Namespace) -> None:
        self._trace, self._args = trace, args
        self._experiments: list[tuple[Question, list[Experiment]]] = []

    def run(self) -> None:
        args = self._args
        for question in _questions(args, self._trace):
            experiments: list[Experiment] = []
            self._experiments.append((question, experiments))
            for seed in range(args.seeds):
                self._run_one(question, seed, experiments)

    def _run_one(self, question: Question, seed: int, experiments: list[Experiment]) -> None:
        title = f"S {question.concurrent}, F {question.capacity:g}, seed {seed}"
        with tqdm(desc=title, unit=" events", disable=self._args.quiet or None) as bar:
            experiment = Experiment(
                self._trace, question, self._args.policy, seed=seed, progress=bar.update
            )
            experiments.append(experiment)
            for step in experiment.steps():
                bar.total = experiment.n_events or None
                bar.set_description(f"{title}: {step}")

    def summaries(self) -> list[dict]:
        done = []
        for question, experiments in self._experiments:
            answers = [e.answer for e in experiments if e.answer is not None]
            for name in self._args.policy:
                complete = [answer for answer in answers if _is_complete(answer, name)]
                if complete:
                    done.append(summary(question, name, complete))
        return done


def _print(summaries: list[dict], *, as_json: bool, partial: bool) -> None:
    if as_json:
        result = summaries[0] if len(summaries) == 1 else {"results": summaries}
        print(json.dumps(result | {"partial": partial}, indent=1))
    elif summaries:
        print(table(summaries))
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        args.costs = _costs(args)
        trace = traces.load(args.trace, form=args.format)
    except TraceError as error:
        print(f"sam.sim: {error}", file=sys.stderr)
        return 2
    if args.sessions and 0 in args.sessions and len(args.sessions) > 1:
        print("sam.sim: --sessions 0 (as recorded) stands alone", file=sys.stderr)
        return 2
    runs = _Runs(trace, args)
    gc.freeze()
    gc.disable()  # nothing here is cyclic garbage, and there are millions of objects to look at
    try:
        runs.run()
    except KeyboardInterrupt:
        summaries = runs.summaries()
        print("sam.sim: interrupted; reported is what was complete", file=sys.stderr)
        _print(summaries, as_json=args.json, partial=True)
        return 130
    finally:
        gc.enable()
    _print(runs.summaries(), as_json=args.json, partial=False)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
