"""`python -m sam.bench pool`: what sessions in the L3 pool are worth, on stock and on sam.

Owns: the arms, the swarm that fills the pool, the sessions that come back from it, the command
line. Must never run two servers at once, leave a process or a pool behind, or give the arms
different settings beyond `--radix-cache-backend sam` and hints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from sam.bench.ending import first_signal_interrupts, reason_of
from sam.bench.pool_report import build_report, print_report
from sam.bench.progress import Steps
from sam.bench.quickstart import describe_machine, hide_accelerators
from sam.bench.replay.arms import ARMS, Arm, Hints
from sam.bench.replay.player import play
from sam.bench.replay.pools import fresh_pool
from sam.bench.swarm import MODEL
from sam.bench.swarm_client import Answer, RequestFailed, chat, manage
from sam.bench.warmup import warm_up
from sam.bench.workloads import build
from sam.bench.workloads.plan import lineage, manage_session
from sam.bench.workloads.spec import WorkloadSpec
from sam.bench.workloads.text import Vocabulary
from sam.bench.workloads.timeline import timeline_of
from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS, ServerFailed, ServerProcess
from sam.testing.tiny_model import PRESETS, build_tiny_model

EXIT_INTERRUPTED = 130
PAGE = 16
RUN_ARMS = ("stock-lpm", "sam-hints-lpm")
RECOMPUTED, FROM_POOL, PREFETCHED = "recomputed", "from the pool", "prefetched"
QUICK = {"users": 3, "turns": 5, "sessions": 3, "tokens": 600, "model": "tiny"}
_QUIET_S, _SETTLE_S = 1.5, 60.0
_FINAL = ("done", "clipped", "dropped", "missing", "rejected", "expired")
_ABOUT = """\
Starts a server on SGLang's stock cache and then one with sam, each over an empty pool of files.
On both: a swarm is played while the bytes in the pool are watched, and then sessions come back
that are in the pool only (device and host are empty): their next request computes everything,
fetches from the pool by itself, or, with sam, was preceded by a prefetch hint.
"""
_EPILOG = """\
exit codes: 0 done; 2 wrong options; 3 a server failed; 130 interrupted (what is measured so far
is printed).
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(list(sys.argv[1:] if argv is None else argv))
    out, log = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)
    bench, code = _Bench(args, log), 0
    hide_accelerators(log)
    try:
        with first_signal_interrupts():
            bench.run()
    except KeyboardInterrupt:
        log.print("\ninterrupted; every server is stopped. Measured so far:")
        code = EXIT_INTERRUPTED
    except (ServerFailed, RequestFailed, httpx.HTTPError, OSError, ExceptionGroup) as error:
        log.print(f"pool: {reason_of(error)}", style="red", markup=False)
        log.print(f"server logs: {args.workdir / 'logs'}. Measured so far:")
        code = 3
    report = build_report(bench.found, bench.about)
    print_report(report, out)
    if args.json:
        print(json.dumps(report), flush=True)
    return code


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sam.bench pool", description=_ABOUT, epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--users", type=int, default=8, help="of the swarm, at once (8)")
    parser.add_argument("--turns", type=int, default=8, help="of each user's leader (8)")
    parser.add_argument("--lengths", type=float, default=0.02, help="tokens per trace token (0.02)")
    parser.add_argument("--gaps", type=float, default=0.05, help="seconds per trace second (0.05)")
    parser.add_argument("--sessions", type=int, default=8, help="that come back, per way (8)")
    parser.add_argument("--tokens", type=int, default=1500, help="of each of those (1500)")
    parser.add_argument("--l1", type=float, default=0.5, help="device pool, x working set (0.5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=sorted(PRESETS), default="small", help="(small: 25 M)")
    parser.add_argument("--quick", action="store_true", help="small: does it work at all?")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--workdir", type=Path, default=Path(".cache/pool"), help="(.cache/pool)")
    if "--quick" in argv:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    if min(args.users, args.sessions, args.tokens) < 1 or args.l1 <= 0:
        parser.error("--users, --sessions, --tokens and --l1 must be positive")
    return args


class _Bench:
    """One run of the command; `found` holds what was measured, however far it came."""

    def __init__(self, args: argparse.Namespace, log: Console) -> None:
        self.args, self.log = args, log
        self.found: dict[str, dict[str, Any]] = {}
        self.about: dict[str, Any] = {"machine": describe_machine(), "seed": args.seed}

    def run(self) -> None:
        args = self.args
        model = build_tiny_model(args.workdir / f"model-{args.model}", preset=args.model)
        words = Vocabulary.of_model(model)
        spec = WorkloadSpec(
            seed=args.seed, users=args.users, turns=args.turns,
            lengths=args.lengths, gaps=args.gaps,
        )  # fmt: skip
        plan = build("swarm", spec, words)
        line = timeline_of(plan, words.count)
        own = 2 * (args.tokens + 200)
        l1 = max(round(args.l1 * line.working_set_tokens), 2 * line.longest_tokens, own)
        self.about |= {
            "swarm": f"{len(plan.agents)} agents, {plan.n_requests()} requests, {plan.about}",
            "l1_tokens": l1, "working_set_tokens": line.working_set_tokens,
            "sessions": args.sessions, "session_tokens": args.tokens, "model": args.model,
        }  # fmt: skip
        for name in RUN_ARMS:
            try:
                self._run_arm(ARMS[name], model, l1, plan, line, words)
            finally:
                shutil.rmtree(args.workdir / "l3", ignore_errors=True)

    def _run_arm(self, arm: Arm, model: Path, l1: int, plan: Any, line: Any, words: Any) -> None:
        self.log.print(f"{arm.name}: starting a server (20-60 s)")
        log_path = self.args.workdir / "logs" / f"{arm.name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with fresh_pool("file", self.args.workdir) as pool:
            flags = [*server_flags(model, l1), *arm.flags, *pool.flags]
            with ServerProcess(flags, env=pool.env, log_path=log_path) as server:
                folder = Path(next(iter(pool.env.values())))
                found = self.found[arm.name] = {"about": arm.about, "ttft_s": {}, "tokens": {}}
                warm_up(server.url, seed=self.args.seed)
                empty(server, folder)
                with Steps(self.log, f"{arm.name}: swarm", plan.n_requests()) as steps, pool.peak:
                    played = play(server.url, plan, line, arm.hints, steps.step)
                    settle(folder)
                found["swarm"] = {
                    "requests": len(played.run.answers), "wall_s": round(played.run.wall_s, 2),
                    "peak_pool_bytes": pool.peak.peak_bytes, "pool_bytes_after": size_of(folder),
                }  # fmt: skip
                empty(server, folder)
                back = _Back(self.args, arm, server, folder, words, found)
                with Steps(self.log, f"{arm.name}: sessions come back", back.n_requests) as steps:
                    asyncio.run(back.play(steps.step))


class _Back:
    """Sessions that are in the pool only, and what their next request takes."""

    def __init__(
        self, args: argparse.Namespace, arm: Arm, server: ServerProcess, folder: Path,
        words: Vocabulary, found: dict[str, Any],
    ) -> None:  # fmt: skip
        self.args, self.arm, self.server, self.folder = args, arm, server, folder
        self.words, self.found = words, found
        self.rng = random.Random(f"back {args.seed}")
        self.ways = [RECOMPUTED, FROM_POOL]
        if arm.hints is not Hints.NONE:
            self.ways.append(PREFETCHED)

    @property
    def n_requests(self) -> int:
        return self.args.sessions * (2 * len(self.ways) - 1)

    async def play(self, step: Any) -> None:
        """Ways in turn, so that the load of the machine falls on all of them."""
        order = [(way, i) for i in range(self.args.sessions) for way in self.ways]
        async with httpx.AsyncClient(base_url=self.server.url, timeout=600) as client:
            self.client, bodies = client, {}
            for way, i in order:
                body = self._body(f"{way} {i}")
                if way is not RECOMPUTED:
                    answer = await chat(client, body)
                    body["messages"].append({"role": "assistant", "content": answer.text})
                    step()
                body["messages"].append({"role": "user", "content": self.words.text(self.rng, 12)})
                bodies[way, i] = body
            settle(self.folder)
            self.server.flush_cache()
            for way, i in order:
                if way is PREFETCHED:
                    await self._prefetch(f"{way} {i}")
                self._keep(way, await chat(client, bodies[way, i]))
                step()

    def _body(self, name: str) -> dict[str, Any]:
        text = self.words.text(self.rng, self.args.tokens)
        messages = [{"role": "user", "content": text}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0.0}
        return body if self.arm.hints is Hints.NONE else body | {"agent_hint": lineage(name, name)}

    async def _prefetch(self, name: str) -> None:
        """The hint, and the time that its tool would still take: until it is done."""
        sent = await manage(self.client, manage_session("prefetch", name, name))
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until:
            found = await self.client.get(f"/kv_hints/{sent['message_id']}")
            if found.json()["actions"][0]["status"] in _FINAL:
                return
            await asyncio.sleep(0.02)
        raise RequestFailed(f"the prefetch of {name} does not end")

    def _keep(self, way: str, answer: Answer) -> None:
        self.found["ttft_s"].setdefault(way, []).append(round(answer.ttft_s, 4))
        tokens = (answer.prompt_tokens, answer.device_tokens, answer.host_tokens)
        self.found["tokens"].setdefault(way, []).append((*tokens, answer.storage_tokens))


def server_flags(model: Path, l1: int) -> list[str]:
    """What all arms share."""
    return [
        *CPU_SERVER_ARGS, *CPU_HICACHE_ARGS, "--model-path", str(model),
        "--max-total-tokens", str(l1), "--page-size", str(PAGE), "--random-seed", "0",
        "--hicache-write-policy", "write_through",
        "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE}),
    ]  # fmt: skip


def size_of(folder: Path) -> int:
    """Bytes of pages."""
    return sum(path.stat().st_size for path in folder.glob("*.bin"))


def settle(folder: Path) -> None:
    """Wait until what is on its way to the pool or out of it has arrived."""
    until, last, since = time.monotonic() + _SETTLE_S, -1, time.monotonic()
    while time.monotonic() < until and time.monotonic() - since < _QUIET_S:
        n_files = sum(1 for _ in folder.glob("*.bin"))
        if n_files != last:
            last, since = n_files, time.monotonic()
        time.sleep(0.1)


def empty(server: ServerProcess, folder: Path) -> None:
    """Nothing is cached on any tier."""
    settle(folder)
    server.flush_cache()
    for path in folder.glob("*.bin"):
        path.unlink(missing_ok=True)
