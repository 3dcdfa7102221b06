"""How long management requests take while the server runs a full batch, and whom they hold up.

Owns: the inference load, the hint load on top, and both latencies. Must never count a request
that failed as a fast one, and must never compare rounds that did not alternate on one server.

More clients than the server may run at once keep the batch full: each is an agent whose context
grows turn by turn, and sends its next turn as soon as it has an answer. Rounds with and without
hints take turns. In a round with hints, management requests of all kinds arrive at a given mean
rate, whether or not the ones before were answered: offloads and prefetches of sessions that are
queued or run at that moment, evicts of sessions that are over, sessions that nobody knows, and
ranges with the whole window in the body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from sam.bench.quickstart import describe_machine, hide_accelerators
from sam.bench.swarm import MODEL, words
from sam.bench.swarm_report import percentile
from sam.bench.warmup import warm_up
from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS, ServerFailed, ServerProcess
from sam.testing.tiny_model import PRESETS, build_tiny_model

CHAT = "/v1/chat/completions"
TARGET_MS = 50.0
KINDS = (
    "offload", "prefetch", "evict", "expect", "evict messages", "offload messages", "unknown",
)  # fmt: skip
_TURNS, _REPLY_TOKENS = 6, (8, 40)
_ABOUT = "Latency of management requests on a server with a full batch, and of inference beside."


@dataclass
class Samples:
    """Seconds per request of one kind; failures apart."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    failed: int = 0

    def figures(self) -> dict[str, Any]:
        """Milliseconds: p50, p95, p99 and the largest."""
        shares = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99, "max_ms": 1.0}
        found: dict[str, Any] = {"n": len(self.seconds), "failed": self.failed}
        for name, share in shares.items():
            found[name] = round(1e3 * percentile(self.seconds, share), 2)
        if self.statuses:
            found["statuses"] = dict(sorted(self.statuses.items()))
        return found


class Agent:
    """One client: a session whose messages grow, and after some turns the next session."""

    def __init__(self, index: int, seed: int, system: str) -> None:
        self._rng = random.Random(f"{seed}-{index}")
        self._system = system
        self._name = f"bench-{seed}:agent-{index}"
        self.parent_id = f"bench-{seed}"
        self.number = 0
        self.messages: list[dict[str, str]] = []
        self.over: deque[tuple[str, list[dict[str, str]]]] = deque(maxlen=4)

    @property
    def session_id(self) -> str:
        return f"{self._name}:{self.number}"

    def next_body(self) -> dict[str, Any]:
        if len(self.messages) > 2 * _TURNS or not self.messages:
            self.over.append((self.session_id, self.messages))
            self.number += 1
            self.messages = [{"role": "system", "content": self._system}]
        text = words(self._rng, self._rng.randint(30, 90))
        self.messages.append({"role": "user", "content": text})
        return {
            "model": MODEL,
            "messages": list(self.messages),
            "max_tokens": self._rng.randint(*_REPLY_TOKENS),
            "temperature": 0.0,
            "ignore_eos": True,
            "agent_hint": {"session_id": self.session_id, "parent_session_id": self.parent_id},
        }

    def take(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def hint_body(kind: str, agent: Agent, rng: random.Random) -> dict[str, Any]:
    """A management request of one of `KINDS`; evicts are for what is over."""
    session_id, window = agent.session_id, agent.messages
    if kind.startswith("evict") and agent.over:
        session_id, window = rng.choice(agent.over)
    hint: dict[str, Any] = {"session_id": session_id, "parent_session_id": agent.parent_id}
    messages: list[dict[str, str]] = []
    edits: list[dict[str, Any]] = []
    if kind == "unknown":
        hint = {"session_id": f"nobody-{rng.randrange(10**9)}"}
        edits = [{"type": rng.choice(["evict", "offload", "prefetch"]), "target": "session"}]
    elif kind == "expect":
        hint["expected_idle_s"] = round(rng.uniform(0, 60), 1)
    elif kind.endswith(" messages"):
        messages = list(window) or [{"role": "user", "content": "nothing yet"}]
        start = rng.randrange(len(messages))
        action = kind.removesuffix(" messages")
        edits = [{"type": action, "target": "messages", "start": start, "end": len(messages)}]
    else:
        edits = [{"type": kind, "target": "session"}]
    hint["context_management"] = {"manage_request": True, "edits": edits}
    return {"model": MODEL, "messages": messages, "agent_hint": hint}


class Load:
    """Both loads against one server, round by round."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self.url, self.args = url, args
        rng = random.Random(args.seed)
        system = "You are one of many agents. " + words(rng, 150)
        self.rng = rng
        self.agents = [Agent(i, args.seed, system) for i in range(args.clients)]
        self.inference = {"without hints": Samples(), "with hints": Samples()}
        self.hints = {kind: Samples() for kind in KINDS}
        self.wall_s = dict.fromkeys(self.inference, 0.0)

    def run(self, log: Console) -> None:
        asyncio.run(self._run(log))

    async def _run(self, log: Console) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            self.client = client
            await self._round("warm-up", Samples(), min(3.0, self.args.seconds))
            for number in range(self.args.rounds):
                for name, samples in self.inference.items():
                    log.print(f"round {number + 1} of {self.args.rounds}, {name}")
                    started = time.perf_counter()
                    await self._round(name, samples, self.args.seconds)
                    self.wall_s[name] += time.perf_counter() - started

    async def _round(self, name: str, samples: Samples, seconds: float) -> None:
        until = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as tasks:
            for agent in self.agents:
                tasks.create_task(self._agent(agent, samples, until))
            if name == "with hints":
                tasks.create_task(self._hints(tasks, until))

    async def _agent(self, agent: Agent, samples: Samples, until: float) -> None:
        while time.perf_counter() < until:
            body = agent.next_body()
            started = time.perf_counter()
            response = await self.client.post(CHAT, json=body)
            if response.status_code != 200:
                samples.failed += 1
                continue
            samples.seconds.append(time.perf_counter() - started)
            agent.take(response.json()["choices"][0]["message"]["content"])

    async def _hints(self, tasks: asyncio.TaskGroup, until: float) -> None:
        due = time.perf_counter()
        while due < until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            kind = self.rng.choice(KINDS)
            body = hint_body(kind, self.rng.choice(self.agents), self.rng)
            tasks.create_task(self._hint(self.hints[kind], body))
            due += self.rng.expovariate(self.args.rate)

    async def _hint(self, samples: Samples, body: Mapping[str, Any]) -> None:
        started = time.perf_counter()
        response = await self.client.post(CHAT, json=body)
        took_s = time.perf_counter() - started
        reply = response.json() if response.status_code == 200 else {}
        if not reply.get("kv_hints") or reply["usage"]["total_tokens"]:
            samples.failed += 1
            return
        samples.seconds.append(took_s)
        samples.statuses.update(a["status"] for a in reply["kv_hints"]["actions"])


def report_of(load: Load, summary: Mapping[str, Any]) -> dict[str, Any]:
    """All figures, and whether the target is met."""
    everything = Samples([s for part in load.hints.values() for s in part.seconds])
    everything.failed = sum(part.failed for part in load.hints.values())
    inference = {}
    for name, samples in load.inference.items():
        per_s = len(samples.seconds) / load.wall_s[name] if load.wall_s[name] else 0.0
        inference[name] = samples.figures() | {"per_s": round(per_s, 2)}
    plain, hinted = inference["without hints"], inference["with hints"]
    ratios = {
        f"{key.removesuffix('_ms')}_ratio": round(hinted[key] / plain[key], 3)
        for key in ("p50_ms", "p99_ms")
        if plain[key]
    }
    all_hints = everything.figures()
    return {
        "hints": {kind: samples.figures() for kind, samples in load.hints.items()},
        "all_hints": all_hints,
        "inference": inference,
        **ratios,
        "target_ms": TARGET_MS,
        "target_met": 0 < all_hints["p99_ms"] < TARGET_MS and not all_hints["failed"],
        "clients": load.args.clients,
        "running_at_most": load.args.running,
        "hints_per_s": load.args.rate,
        "server": {
            "errors": summary["errors"],
            "actions": summary["actions"],
            "tree_core": summary["tree_core"],
        },
    }


def tables(report: Mapping[str, Any]) -> Sequence[Table]:
    hints = Table(title="Management requests, ms")
    rows = {**report["hints"], "all": report["all_hints"]}
    names = ("p50_ms", "p95_ms", "p99_ms", "max_ms")
    for name in ("", "n", "failed", *(name.removesuffix("_ms") for name in names)):
        hints.add_column(name, justify="right" if name else "left")
    for kind, figures in rows.items():
        shown = (f"{figures[name]:.1f}" for name in names)
        hints.add_row(kind, str(figures["n"]), str(figures["failed"]), *shown)
    inference = Table(title="Inference, ms")
    for name in ("", "n", "per s", *(name.removesuffix("_ms") for name in names)):
        inference.add_column(name, justify="right" if name else "left")
    for kind, figures in report["inference"].items():
        shown = (f"{figures[name]:.0f}" for name in names)
        inference.add_row(kind, str(figures["n"]), f"{figures['per_s']:.1f}", *shown)
    return hints, inference


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sam.bench hints", description=_ABOUT)
    add = parser.add_argument
    add("--json", action="store_true", help="last line: one JSON object")
    add("--seed", type=int, default=0)
    add("--clients", type=int, default=24, help="agents that always wait for an answer (24)")
    add("--running", type=int, default=16, help="--max-running-requests of the server (16)")
    add("--rate", type=float, default=20.0, help="management requests a second (20)")
    add("--seconds", type=float, default=15.0, help="of a round (15)")
    add("--rounds", type=int, default=3, help="pairs of rounds (3)")
    add("--model", choices=sorted(PRESETS), default="small", help="size (small: 25 M)")
    add("--workdir", type=Path, default=Path(".cache/hints"), help="for model and log")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 when it was measured, target met or not; 3 when the server failed; 130 interrupted."""
    args = _parser().parse_args(argv)
    out, log = Console(highlight=False), Console(stderr=True, highlight=False)
    hide_accelerators(log)
    args.workdir.mkdir(parents=True, exist_ok=True)
    model = build_tiny_model(args.workdir / f"model-{args.model}", preset=args.model)
    flags = [
        *CPU_SERVER_ARGS, *CPU_HICACHE_ARGS, "--model-path", str(model),
        "--max-running-requests", str(args.running), "--radix-cache-backend", "sam",
    ]  # fmt: skip
    log.print(f"{describe_machine()}; starting a server (20-60 s)")
    try:
        with ServerProcess(flags, log_path=args.workdir / "server.log") as server:
            warm_up(server.url, seed=args.seed)
            load = Load(server.url, args)
            load.run(log)
            report = report_of(load, server.request("/sessions")["summary"])
    except KeyboardInterrupt:
        log.print("interrupted; the server is stopped")
        return 130
    except (ServerFailed, httpx.HTTPError, ExceptionGroup) as error:
        log.print(f"hints: {error!r}; server log: {args.workdir / 'server.log'}", markup=False)
        return 3
    for table in tables(report):
        out.print(table)
    met = "met" if report["target_met"] else "not met"
    out.print(
        f"target p99 < {TARGET_MS:.0f} ms: {met}; inference with hints against without: "
        f"p50 x {report.get('p50_ratio', '-')}, p99 x {report.get('p99_ratio', '-')}"
    )
    if args.json:
        print(json.dumps(report | {"machine": describe_machine(), "seed": args.seed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
