"""Runs every arm for every seed, one server at a time, in random order.

Owns: server flags that all arms share, the order of arms, what is kept of a run. Must never run
two servers at once, leave a process behind, or give an arm a flag that it does not name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from sam.bench.progress import Steps
from sam.bench.replay import measure, stats
from sam.bench.replay.arms import SHORTEST_FIRST, Arm, tlru_flags
from sam.bench.replay.player import Played, play
from sam.bench.replay.pools import Pool, fresh_pool
from sam.bench.replay.state import State, code_version
from sam.bench.scheduler_clock import Reading, clock_env
from sam.bench.swarm_report import new_tokens
from sam.bench.warmup import warm_up
from sam.bench.workloads import build
from sam.bench.workloads.plan import Plan
from sam.bench.workloads.spec import WorkloadSpec
from sam.bench.workloads.text import Vocabulary
from sam.bench.workloads.timeline import Timeline, timeline_of
from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS, ServerProcess

_TREE_CORE = re.compile(r"Tree Core: (\w+)")
_HEADROOM = 1.2  # of the longest request: a pool below that cannot serve it at all
_TLRU_SHARE = 0.25


class Unfit(ValueError):
    """The options ask for what cannot be; the text says what to change."""


class Comparison:
    """All runs of one command; `state` keeps them as they finish."""

    def __init__(
        self, args: argparse.Namespace, arms: Sequence[Arm], state: State, log: Console
    ) -> None:
        self.args, self.arms, self.state, self.log = args, arms, state, log
        self.model: Path | None = None
        self.sizes: dict[int, dict[str, int]] = {}

    def run(self, model: Path, words: Vocabulary) -> None:
        """Everything that is not in the state yet, at most `--max-runs` of it."""
        self.model = model
        left = self.args.max_runs or len(self.arms) * len(self.args.seeds)
        for seed in self.args.seeds:
            plan = build(self.args.workload, spec_of(self.args, seed), words)
            line = timeline_of(plan, words.count)
            self.sizes[seed] = self._sizes(plan, line)
            arms = list(self.arms)
            random.Random(f"order {seed}").shuffle(arms)
            missing = [arm for arm in arms if (seed, arm.name) not in self.state]
            self._say(seed, plan, missing)
            for arm in missing[:left]:
                self.state.add(self._run(arm, seed, plan, line))
            left -= len(missing[:left])

    def _say(self, seed: int, plan: Plan, missing: Sequence[Arm]) -> None:
        sizes = self.sizes[seed]
        self.log.print(
            f"seed {seed}: {len(plan.agents)} agents, {plan.n_requests()} requests; {plan.about}; "
            f"shape of {plan.source}; working set {sizes['working_set_tokens']:,} tokens at its "
            f"peak, {sizes['mean_working_set_tokens']:,} on average, "
            f"L1 {sizes['l1_tokens']:,}, L2 x {self.args.l2:g}; to run: "
            + (", ".join(arm.name for arm in missing) or "nothing, all are in the state file")
        )

    def _sizes(self, plan: Plan, line: Timeline) -> dict[str, int]:
        l1 = round(self.args.l1 * line.working_set_tokens)
        if l1 < _HEADROOM * line.longest_tokens:
            raise Unfit(
                f"L1 of {l1:,} tokens cannot serve the longest request of "
                f"{line.longest_tokens:,}: raise --l1 or --users, or lower --lengths"
            )
        self._refuse_chunks(line)
        return {
            "working_set_tokens": line.working_set_tokens,
            "mean_working_set_tokens": line.mean_working_set_tokens,
            "l1_tokens": l1,
            "longest_tokens": line.longest_tokens,
            "mean_prompt_tokens": line.mean_prompt_tokens,
            "planned_requests": plan.n_requests(),
        }

    def _refuse_chunks(self, line: Timeline) -> None:
        """SGLang 0.5.23 ends for want of memory where this order meets a prompt cut in chunks."""
        if not any(arm.schedule_policy == SHORTEST_FIRST and not arm.url for arm in self.arms):
            return
        chunk_tokens = chunk_tokens_of([*CPU_SERVER_ARGS, *self.args.server_arg])
        if line.longest_tokens > chunk_tokens:
            raise Unfit(
                f"{SHORTEST_FIRST} needs prompts in one piece, and the longest request has "
                f"{line.longest_tokens:,} tokens: give all arms "
                f"--server-arg=--chunked-prefill-size={line.longest_tokens} "
                "--server-arg=--mem-fraction-static=0.3 (SGLang would derive too little from it)"
            )

    def _flags(self, arm: Arm, seed: int, pool: Pool) -> list[str]:
        args, sizes = self.args, self.sizes[seed]
        flags = [
            *CPU_SERVER_ARGS, *CPU_HICACHE_ARGS, "--model-path", str(self.model),
            "--max-total-tokens", str(sizes["l1_tokens"]), "--hicache-ratio", f"{args.l2:g}",
            "--max-running-requests", str(args.running), "--page-size", str(args.page_size),
            "--random-seed", "0", "--enable-metrics", *arm.flags,
        ]  # fmt: skip
        if "tlru" in arm.flags:
            flags += tlru_flags(round(_TLRU_SHARE * sizes["mean_prompt_tokens"]))
        if args.tool_calls:
            flags += ["--tool-call-parser", "qwen25"]
        return [*flags, *pool.flags, *args.server_arg]

    def _run(self, arm: Arm, seed: int, plan: Plan, line: Timeline) -> dict[str, Any]:
        about = {
            "seed": seed,
            "arm": arm.name,
            "about": arm.about,
            "hints": str(arm.hints),
            "schedule_policy": arm.schedule_policy,
            "write_policy": arm.write_policy,
            "code": code_version(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "load_average": round(os.getloadavg()[0], 2),
            **self.sizes[seed],
        }
        if arm.url:
            return about | self._measure(arm, arm.url, seed, plan, line, None, Pool())
        with ExitStack() as stack:
            pool = stack.enter_context(fresh_pool(self.args.l3, self.args.workdir))
            clock, read = stack.enter_context(clock_env())
            env = {**_joined(pool.env, clock), **arm.env}
            self.log.print(f"{arm.name}, seed {seed}: starting a server (20-60 s)")
            log_path = self.args.workdir / "logs" / f"{arm.name}-{seed}.log"
            log_path.parent.mkdir(parents=True, exist_ok=True)
            flags = self._flags(arm, seed, pool)
            server = stack.enter_context(ServerProcess(flags, env=env, log_path=log_path))
            core = _TREE_CORE.findall(server.log_text())
            about |= {"tree_core": core[-1] if core else "unknown", "flags": flags}
            return about | self._measure(arm, server.url, seed, plan, line, read, pool)

    def _measure(
        self, arm: Arm, url: str, seed: int, plan: Plan, line: Timeline, read: Any, pool: Pool
    ) -> dict[str, Any]:
        """Warm up, empty the caches, play, read."""
        warm_up(url, seed=seed)
        _post(f"{url}/flush_cache")
        time.sleep(0.2)  # the last turn of the loop is counted when the next one starts
        clock, before = read() if read else Reading(), measure.read_counters(url)
        title = f"{arm.name}, seed {seed}"
        with Steps(self.log, title, plan.n_requests()) as steps, pool.peak or nullcontext():
            played = play(url, plan, line, arm.hints, steps.step)
        time.sleep(0.5)
        cpu = read().since(clock) if read else None
        found = kept_of(played)
        found["counters"] = measure.since(before, measure.read_counters(url))
        found["outcomes"] = measure.hint_outcomes(_get_sessions(url))
        found["scheduler"] = _scheduler(cpu, played.run.wall_s)
        found["peak_l3_bytes"] = pool.peak.peak_bytes if pool.peak else None
        return found


def kept_of(played: Played) -> dict[str, Any]:
    run = played.run
    manage_s = stats.spread(run.manage_s)
    return {
        "rows": played.rows(),
        "task_s": {str(user): seconds for user, seconds in played.task_s.items()},
        "wall_s": round(run.wall_s, 3),
        "new_tokens": new_tokens(run),
        "manage": {"n": len(run.manage_s), **manage_s},
    }


def _joined(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Two environments; what both say on PYTHONPATH holds, one after the other."""
    paths = [env["PYTHONPATH"] for env in (other, one) if "PYTHONPATH" in env]
    return {**one, **other, "PYTHONPATH": os.pathsep.join(paths)}


def chunk_tokens_of(flags: Sequence[str]) -> int:
    """The last `--chunked-prefill-size` of a server's flags, as `--flag N` or `--flag=N`."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    places = [place for place, word in enumerate(words) if word == "--chunked-prefill-size"]
    return int(words[places[-1] + 1])


def spec_of(args: argparse.Namespace, seed: int) -> WorkloadSpec:
    return WorkloadSpec(
        seed=seed,
        users=args.users,
        turns=args.turns,
        lengths=args.lengths,
        gaps=args.gaps,
        max_gap_s=args.max_gap,
        waves=args.waves,
        traces=args.traces,
        trace=args.trace,
        tool_calls=args.tool_calls,
    )


def _scheduler(cpu: Reading | None, wall_s: float) -> dict[str, float] | None:
    if cpu is None or not wall_s:
        return None
    work_s, forward_s, cache_s = cpu.work_ns / 1e9, cpu.forward_ns / 1e9, cpu.cache_ns / 1e9
    return {
        "work_s": round(work_s, 3),
        "cache_s": round(cache_s, 3),
        "forward_s": round(forward_s, 3),
        "share_of_wall": round(work_s / wall_s, 4),
    }


def _get_sessions(url: str) -> Mapping[str, Any] | None:
    try:
        with urllib.request.urlopen(f"{url}/sessions?limit=1", timeout=30) as response:
            return json.load(response)
    except (urllib.error.URLError, OSError, ValueError):
        return None


def _post(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60).close()
