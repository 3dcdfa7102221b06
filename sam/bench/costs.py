"""`python -m sam.bench costs`: what tokens cost on this machine, for the simulator.

Owns: timed requests on one idle server, and the file that `python -m sam.sim --costs` reads. Must
never report a rate whose requests did not find what they were to find.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

import msgspec

from sam.bench.ending import first_signal_interrupts
from sam.bench.quickstart import describe_machine
from sam.sim.costs import Costs, CostsFile
from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS, ServerFailed, ServerProcess
from sam.testing.tiny_model import PRESETS, build_tiny_model

_PAGE = 16
_DEVICE_TOKENS, _HOST_RATIO = 8192, 3
_PROMPT_TOKENS = 2048
_DECODED_TOKENS = 64
_RESOLUTION = 0.05  # of a device hit: less is not told from nothing
_STORAGE_DIR = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_FIRST_ID, _LAST_ID = 300, 1_000


class Unfit(RuntimeError):
    """A request did not find what it was to find."""


class _Meter:
    """Times one prompt after the other on an idle server."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.server, self.rng = server, random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randint(_FIRST_ID, _LAST_ID) for _ in range(tokens)]

    def time_s(self, prompt: Sequence[int], tier: str = "", *, new: int = 1) -> float:
        """Seconds of one request that finds all but its last page in `tier`, or nothing."""
        start = time.perf_counter()
        answer = self.server.generate(prompt, max_new_tokens=new)
        seconds = time.perf_counter() - start
        cached = answer.cached
        wanted = len(prompt) - _PAGE if tier else 0
        if tier and cached.get(tier, 0) < wanted:
            raise Unfit(f"{wanted} tokens were to come from {tier}: {dict(cached)}")
        if not tier and sum(cached.values()) > _PAGE:
            raise Unfit(f"nothing was to be found: {dict(cached)}")
        return seconds

    def push_down(self) -> None:
        """New prompts until nothing older is left on the device."""
        for _ in range(_DEVICE_TOKENS // _PROMPT_TOKENS + 1):
            self.time_s(self.prompt(_PROMPT_TOKENS))


def measure(
    server: ServerProcess, repeats: int, seed: int, stored: Callable[[], None]
) -> tuple[Costs, tuple[str, ...]]:
    """Rates, from medians of `repeats` each, and which of them are only lower bounds.

    `stored()` returns when the pool has what was computed. Raises Unfit.
    """
    meter = _Meter(server, seed)
    for _ in range(3):
        meter.time_s(meter.prompt(_PROMPT_TOKENS), new=8)
    samples: dict[str, list[float]] = {"cold": [], "device": [], "host": [], "storage": []}
    prompts = [meter.prompt(_PROMPT_TOKENS) for _ in range(repeats)]
    steps = []
    for prompt in prompts:
        samples["cold"].append(meter.time_s(prompt))
        samples["device"].append(meter.time_s(prompt, "device"))
        meter.push_down()
        samples["host"].append(meter.time_s(prompt, "host"))
        steps.append(meter.time_s(prompt, "device", new=1 + _DECODED_TOKENS))
    stored()
    _flush(server)
    samples["storage"] = [meter.time_s(prompt, "storage") for prompt in prompts]
    return rates({kind: median(found) for kind, found in samples.items()}, median(steps))


def rates(seconds: dict[str, float], decoded_s: float) -> tuple[Costs, tuple[str, ...]]:
    """Rates from the medians, and which of them are only lower bounds."""
    hit_s = seconds["device"]
    least_s = _RESOLUTION * hit_s
    kinds = ("host", "storage")
    bounds = tuple(kind for kind in kinds if seconds[kind] - hit_s < least_s)

    def rate(spent_s: float, tokens: int) -> float:
        return round(tokens / max(spent_s, least_s), 1)

    costs = Costs(
        prefill_tokens_per_s=rate(seconds["cold"] - hit_s, _PROMPT_TOKENS),
        decode_tokens_per_s=rate(decoded_s - hit_s, _DECODED_TOKENS),
        load_back_tokens_per_s=rate(seconds["host"] - hit_s, _PROMPT_TOKENS),
        pool_tokens_per_s=rate(seconds["storage"] - hit_s, _PROMPT_TOKENS),
        request_s=round(hit_s, 4),
    )
    return costs, bounds


def _flush(server: ServerProcess, timeout_s: float = 60.0) -> None:
    """Empty device and host; the server refuses while it still writes to the pool."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            server.flush_cache()
            return
        except urllib.error.HTTPError as error:
            if time.monotonic() > deadline:
                raise Unfit(f"the caches are not emptied: {error}") from error
            time.sleep(0.5)


def _wait_for_pages(folder: Path, pages: int, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while len(os.listdir(folder)) < pages:
        if time.monotonic() > deadline:
            raise Unfit(f"{len(os.listdir(folder))} of {pages} pages reached the pool")
        time.sleep(0.2)


def measure_here(model: str, workdir: Path, repeats: int, seed: int) -> CostsFile:
    """Start a server, measure, stop it. Raises Unfit and ServerFailed."""
    folder = build_tiny_model(workdir / f"model-{model}", preset=model)
    with tempfile.TemporaryDirectory(dir=workdir) as pool:
        flags = [
            *CPU_SERVER_ARGS, *CPU_HICACHE_ARGS, "--model-path", str(folder),
            "--max-total-tokens", str(_DEVICE_TOKENS), "--hicache-ratio", str(_HOST_RATIO),
            "--chunked-prefill-size", str(_PROMPT_TOKENS), "--page-size", str(_PAGE),
            "--hicache-mem-layout", "page_first_direct", "--hicache-storage-backend", "file",
            "--hicache-storage-prefetch-policy", "wait_complete",
        ]  # fmt: skip
        pages = repeats * _PROMPT_TOKENS // _PAGE
        with ServerProcess(flags, env={_STORAGE_DIR: pool}) as server:
            costs, bounds = measure(
                server, repeats, seed, lambda: _wait_for_pages(Path(pool), pages)
            )
    return CostsFile(
        costs=costs,
        machine=f"{describe_machine()}; load average {os.getloadavg()[0]:.1f}",
        model=model,
        software=f"SGLang {version('sglang')}",
        date=datetime.now(UTC).date().isoformat(),
        method=f"medians of {repeats} prompts of {_PROMPT_TOKENS} tokens, one at a time, "
        "each against a device hit"
        + (f"; lower bounds, no time was to be seen: {', '.join(bounds)}" if bounds else ""),
    )


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m sam.bench costs",
        description="Measure prefill, decode, load-back and pool rates on a CPU server.",
        epilog="exit codes: 0 done; 2 wrong options; 3 the server failed or a request did not "
        "find what it was to find; 130 interrupted.",
    )
    p.add_argument("--model", choices=sorted(PRESETS), default="small", help="(small: 25 M)")
    p.add_argument("--repeats", type=int, default=7, help="prompts (7)")
    p.add_argument("--seed", type=int, default=0, help="(0)")
    p.add_argument("--out", type=Path, help="file to write; default: standard output")
    p.add_argument("--workdir", type=Path, default=Path(".cache/costs"), help="(.cache/costs)")
    args = p.parse_args(argv)
    args.workdir.mkdir(parents=True, exist_ok=True)
    try:
        with first_signal_interrupts():
            found = measure_here(args.model, args.workdir, args.repeats, args.seed)
    except (Unfit, ServerFailed, OSError) as error:
        print(f"costs: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)
    return 0
