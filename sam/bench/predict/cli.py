"""The command line of `python -m sam.bench predict`.

Owns: which runs are simulated, with which policy and sizes, and their comparison with the state
file of the replay. Must never start a server, and never fit anything to what live servers did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sam.bench.predict.engine import Engine, EngineParams
from sam.bench.predict.virtual import VirtualLoop
from sam.bench.predict.wire import Renderer, SimulatedPlayer
from sam.bench.replay import cli as replay
from sam.bench.replay.arms import ARMS, Arm
from sam.bench.replay.comparison import chunk_tokens_of, spec_of
from sam.bench.replay.state import State
from sam.bench.workloads import build
from sam.bench.workloads.text import Vocabulary
from sam.bench.workloads.timeline import timeline_of
from sam.sim import costs, policies
from sam.sim.policy import Setup
from sam.sim.trace import TraceError
from sam.testing.server import CPU_SERVER_ARGS
from sam.testing.tiny_model import build_tiny_model

POLICIES: Mapping[str, str] = {
    "stock": "lru",
    "stock-lpm": "lru",
    "sam-plain": "lru",
    "stock-session": "session-ref",
    "sam-lineage": "next-use",
    "sam-hints": "next-use",
    "sam-idle": "next-use",
    "sam-hints-lpm": "next-use",
    "sam-idle-lpm": "next-use",
    "stock-spf": "lru",
    "sam-hints-spf": "next-use",
    "sam-idle-spf": "next-use",
    "sam-hints-adm-wb": "next-use",
    "sam-idle-adm-wb": "next-use",
}
"""What decides in each arm; an arm that is not here is not simulated."""
_ABOUT = """\
Plays the requests of `python -m sam.bench replay` with the same options against a simulated server
(queue, batches, locks, two tiers under the orders of sam.core) and compares hit rates with the runs
that the replay left in its --workdir. Nothing is fitted to those runs. Takes seconds, starts no
server. All options but --costs are the replay's: see `python -m sam.bench replay --help`.
"""


def rates_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Hit rates over all prompt tokens, and mean TTFT in seconds."""
    prompt = sum(row["prompt"] for row in rows)
    device = sum(row["device"] for row in rows)
    return {
        "prompt_tokens": prompt,
        "hit_rate": (device + sum(row["host"] for row in rows)) / prompt,
        "device_hit_rate": device / prompt,
        "ttft_mean_s": sum(row["ttft_s"] for row in rows) / len(rows),
    }


class Predictor:
    """Simulated runs by arm and seed. Raises TraceError for traces and costs that are none."""

    def __init__(self, args: argparse.Namespace, costs_file: str | None) -> None:
        self.args = args
        self.costs = (costs.load(costs_file) if costs_file else costs.SHIPPED[args.model]).costs
        model = build_tiny_model(args.workdir / f"model-{args.model}", preset=args.model)
        self.words, self.renderer = Vocabulary.of_model(model), Renderer(model)

    def rows(self, arm: Arm, seed: int) -> list[dict[str, Any]]:
        """One flat record per request, as the replay keeps them."""
        args = self.args
        plan = build(args.workload, spec_of(args, seed), self.words)
        line = timeline_of(plan, self.words.count)
        l1_tokens = round(args.l1 * line.working_set_tokens)
        pages = (l1_tokens // args.page_size, int(args.l2 * l1_tokens) // args.page_size)
        policy = policies.create(POLICIES[arm.name], Setup(tiers_pages=pages))
        params = EngineParams(
            device_tokens=l1_tokens,
            page_tokens=args.page_size,
            max_running=args.running,
            chunk_tokens=chunk_tokens_of([*CPU_SERVER_ARGS, *args.server_arg]),
            order=arm.schedule_policy,
            costs=self.costs,
        )

        async def play() -> list[dict[str, Any]]:
            engine = Engine(params, policy)
            player = SimulatedPlayer(plan, line, arm, engine, self.renderer, self.words)
            await player.play()
            return player.played.rows()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(play())


def compare(predictor: Predictor, state: State) -> list[dict[str, Any]]:
    """Every arm and seed of the replay's options; `live` is None where none has run."""
    found = []
    for name in predictor.args.arms:
        for seed in predictor.args.seeds:
            if name not in POLICIES:
                continue
            predicted = rates_of(predictor.rows(ARMS[name], seed))
            run = state.runs.get((seed, name))
            live = rates_of(run["rows"]) if run else None
            off = 100 * (predicted["hit_rate"] - live["hit_rate"]) if live else None
            found.append(
                {"arm": name, "seed": seed, "predicted": predicted, "live": live, "points": off}
            )
    return found


def to_table(found: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("arm", "seed", "hit, live", "hit, predicted", "points", "L1, live", "L1, predicted")
    table = Table(*columns)
    for one in found:
        live, predicted = one["live"], one["predicted"]
        table.add_row(
            one["arm"],
            str(one["seed"]),
            f"{live['hit_rate']:.3f}" if live else "-",
            f"{predicted['hit_rate']:.3f}",
            f"{one['points']:+.1f}" if live else "-",
            f"{live['device_hit_rate']:.3f}" if live else "-",
            f"{predicted['device_hit_rate']:.3f}",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    p = argparse.ArgumentParser(
        prog="python -m sam.bench predict", description=_ABOUT, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument(
        "--costs", metavar="FILE",
        help="of `python -m sam.bench costs` for the same --model; default: what it said on a "
        "machine of ours, for each model",
    )  # fmt: skip
    own, rest = p.parse_known_args(argv)
    args = replay.parse(rest)
    if args.l3 != "off":
        p.error("--l3: a pool is not simulated here")
    out = Console(highlight=False)
    try:
        predictor = Predictor(args, own.costs)
    except TraceError as error:
        print(f"predict: {error}", file=sys.stderr)
        return 2
    state = State(Path(args.workdir), replay.settings_of(args))
    found = compare(predictor, state)
    out.print(to_table(found))
    off = [abs(one["points"]) for one in found if one["points"] is not None]
    if off:
        out.print(f"{len(off)} live runs: {sum(off) / len(off):.1f} points off on average, "
                  f"{max(off):.1f} at most")  # fmt: skip
    if args.json:
        print(json.dumps({"runs": found}), flush=True)
    return 0
