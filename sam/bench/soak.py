"""Full load with random hints for a long time, then: is everything in its place?

Owns: the server, the pauses with their checks, the comparison with a server that caches nothing,
and the verdict. Must never leave a process behind, and must never call a run good of which a
check was left out.

Every pause lets the requests under way end and then demands: no action pending, no token
protected, no node locked, no session running, device and host pools complete; now and then the
cache is flushed and must be empty. At the end answers drawn from the whole run are asked again
of a server without a cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from sam.bench.quickstart import describe_machine, hide_accelerators
from sam.bench.soak_load import Load, ask_again
from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS, ServerFailed, ServerProcess
from sam.testing.tiny_model import build_tiny_model

_PAUSE_EVERY_S, _QUIET_S, _FLUSH_EVERY = 15.0, 120.0, 3
_TOTAL_TOKENS = 6_144
_ABOUT = "Random hints at full load, and the books balanced afterwards."
_EPILOG = """\
Options after '--' go to the server, e.g. -- --page-size 16 --tp-size 2.
exit codes: 0 good; 1 a check failed; 2 wrong usage; 3 the server failed; 130 interrupted.
"""


@dataclass
class Verdict:
    """What was found so far; complete or not."""

    failures: list[str] = field(default_factory=list)
    n_pauses: int = 0
    n_flushes: int = 0
    n_compared: int = 0
    is_complete: bool = False
    seconds: float = 0.0
    summary: Mapping[str, Any] = field(default_factory=dict)
    load: Load | None = None

    @property
    def all_failures(self) -> list[str]:
        return [*self.failures, *(self.load.failures if self.load else [])]

    def report(self) -> dict[str, Any]:
        load = self.load
        return {
            "good": self.is_complete and not self.all_failures,
            "complete": self.is_complete,
            "failures": self.all_failures[:50],
            "seconds": round(self.seconds, 1),
            "pauses": self.n_pauses,
            "flushes": self.n_flushes,
            "compared_with_no_cache": self.n_compared,
            "requests": dict(sorted(load.counts.items())) if load else {},
            "said_in_answers": dict(sorted(load.statuses.items())) if load else {},
            "actions": dict(self.summary.get("actions", {})),
            "counters": dict(self.summary.get("counters", {})),
        }


class Soak:
    """One soak of one server."""

    def __init__(self, server: ServerProcess, args: argparse.Namespace, log: Console) -> None:
        self.server, self.args, self.log = server, args, log
        self.verdict = Verdict()
        self._until = 0.0
        self._empty: Mapping[str, Any] = {}
        self._n_told = 0

    def run(self) -> None:
        """Raises ServerFailed if the server dies; findings go into the verdict."""
        started = time.monotonic()
        self.server.flush_cache()
        self._empty = self._ask("/sessions")["summary"]
        self._until = started + 60 * self.args.minutes
        try:
            asyncio.run(self._run())
        finally:
            self.verdict.seconds = time.monotonic() - started
        if "Traceback" in self.server.log_text():
            self._fail("the server's log holds a traceback")

    async def _run(self) -> None:
        load = Load(
            self.server.url, seed=self.args.seed, clients=self.args.clients, agents=12
        )
        self.verdict.load = load
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(self._is_over))
            while not self._is_over():
                load.gate.set()
                left_s = self._until - time.monotonic()
                await asyncio.sleep(max(0.1, min(_PAUSE_EVERY_S, left_s)))
                is_quiet = await load.quiet(_QUIET_S)
                if not is_quiet:
                    self._fail(f"{load.in_flight} requests without an answer")
                await asyncio.to_thread(self._pause, is_quiet)
            load.gate.set()

    def _is_over(self) -> bool:
        return time.monotonic() >= self._until or len(self.verdict.all_failures) >= 20

    def _pause(self, is_quiet: bool) -> None:
        verdict = self.verdict
        verdict.n_pauses += 1
        self._check_settled()
        is_last = self._is_over()
        if is_quiet and (is_last or verdict.n_pauses % _FLUSH_EVERY == 0):
            self._flush()
        left_s = max(0.0, self._until - time.monotonic())
        load = verdict.load
        for text in load.failures[self._n_told :]:
            self.log.print(f"FAILED: {text}", style="red", markup=False)
        self._n_told = len(load.failures)
        n = sum(load.counts.values())
        self.log.print(
            f"{left_s / 60:.1f} min left, {n} requests, {len(verdict.all_failures)} failures"
        )

    def _check_settled(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            found = self._unsettled()
            if not found or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if found:
            self._fail(f"after {self.verdict.n_pauses} pauses, at rest: {found}")

    def _unsettled(self) -> str:
        """What is not as it has to be on a server at rest; "" if nothing."""
        report = self._ask("/sessions?limit=1000")
        self.verdict.summary = summary = report["summary"]
        device, total = summary["device"], sum(self._empty["device"].values())
        found = []
        if summary["pending_actions"]:
            found.append(f"{summary['pending_actions']} actions pending")
        if summary["errors"] or summary["tree_core_mismatches"]:
            odd = summary["tree_core_mismatches"]
            found.append(f"{summary['errors']} errors, {odd} mismatches of the tree core")
        if device["protected"] or sum(device.values()) != total:
            found.append(f"device pool {device}, {total} in all")
        running = [s["session_id"] for s in report["sessions"] if s["n_running"]]
        if running or any(s["state"] == "running" for s in report["sessions"]):
            found.append(f"sessions still running: {running[:5]}")
        nodes = self._ask("/sessions/tree?limit=10000")["nodes"]
        if locked := [node["id"] for node in nodes if node["locked"]]:
            found.append(f"nodes locked: {locked[:5]}")
        return "; ".join(found) + self._host_unbalanced(summary, nodes)

    def _host_unbalanced(self, summary: Mapping[str, Any], nodes: Sequence[Any]) -> str:
        """Every host slot is free or below a node, as it was when the tree was empty."""
        used = sum(node["host_tokens"] for node in nodes)
        free, empty = summary["host"]["free"], self._empty["host"]["free"]
        page = self.args.page_size
        if len(nodes) >= 10_000 or empty - free == -(-used // page) * page:
            return ""
        return f" host pool: {empty - free} slots taken, {used} tokens in the tree"

    def _flush(self) -> None:
        self.verdict.n_flushes += 1
        try:
            self.server.flush_cache()
        except (urllib.error.URLError, OSError) as error:
            self._fail(f"flush of a server at rest: {error!r}")
            return
        summary = self._ask("/sessions")["summary"]
        for pool in ("device", "host"):
            if summary[pool]["free"] != self._empty[pool]["free"]:
                self._fail(f"after a flush {pool}: {summary[pool]}, empty {self._empty[pool]}")

    def _ask(self, path: str) -> Any:
        """A 503 says that the scheduler is busy; it is asked again for a while."""
        for _ in range(30):
            try:
                return self.server.request(path, timeout_s=60)
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                time.sleep(1.0)
        raise ServerFailed(f"{path}: the scheduler does not answer\n{self.server.log_tail()}")

    def _fail(self, text: str) -> None:
        self.verdict.failures.append(text)
        self.log.print(f"FAILED: {text}", style="red", markup=False)


def compare(server: ServerProcess, verdict: Verdict) -> None:
    """Ask a server without a cache for the sampled answers, one at a time."""
    for sample in verdict.load.samples if verdict.load else ():
        answer = ask_again(server.request, sample)
        verdict.n_compared += 1
        if answer != sample.answer:
            text = f"{sample.path}: {sample.answer!r}, without a cache {answer!r}"
            verdict.failures.append(f"another answer: {text[:300]}")


def _flags(args: argparse.Namespace) -> list[str]:
    model = build_tiny_model(args.workdir / "model-tiny", preset="tiny")
    return [
        *CPU_SERVER_ARGS, "--model-path", str(model),
        "--max-total-tokens", str(_TOTAL_TOKENS), "--page-size", str(args.page_size),
    ]  # fmt: skip


def soak(args: argparse.Namespace, log: Console) -> tuple[Verdict, int]:
    """Verdict and exit code; see the epilog."""
    verdict = Verdict()
    flags = _flags(args)
    try:
        log.print(f"{describe_machine()}; seed {args.seed}; starting a server (20-60 s)")
        cached = [*flags, *CPU_HICACHE_ARGS, "--radix-cache-backend", "sam", *args.server]
        with ServerProcess(cached, log_path=args.workdir / "server.log") as server:
            run = Soak(server, args, log)
            verdict = run.verdict
            run.run()
        log.print("the same answers from a server without a cache: starting it")
        plain = [*flags, "--disable-radix-cache"]
        with ServerProcess(plain, log_path=args.workdir / "plain.log") as server:
            compare(server, verdict)
        verdict.is_complete = True
    except KeyboardInterrupt:
        log.print("interrupted; every server is stopped. Found so far:")
        return verdict, 130
    except (ServerFailed, ExceptionGroup, OSError) as error:
        verdict.failures.append(f"{type(error).__name__}: {error}")
        log.print(f"soak: {error!r}; logs in {args.workdir}", markup=False)
        return verdict, 3
    return verdict, 0 if verdict.report()["good"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/soak.sh",
        description=_ABOUT,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="of load (30)")
    add("--seed", type=int, default=0)
    add("--clients", type=int, default=24, help="requests in flight at once (24)")
    add("--page-size", type=int, default=1, help="of the cache (1)")
    add("--json", action="store_true", help="last line: one JSON object")
    add("--workdir", type=Path, default=Path(".cache/soak"), help="for model and logs")
    add("server", nargs="*", metavar="-- SERVER OPTION", help="further options of the server")
    return parser


def _interrupt(*_: object) -> None:
    """The first signal ends the run; more of them do not disturb the end of the servers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    out, log = Console(highlight=False), Console(stderr=True, highlight=False)
    hide_accelerators(log)
    args.workdir.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    verdict, code = soak(args, log)
    report = verdict.report()
    for name, value in report.items():
        out.print(f"{name}: {value}", markup=False, soft_wrap=True)
    if args.json:
        print(json.dumps(report), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
