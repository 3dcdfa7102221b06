"""`python -m sam.bench NAME ...`: what sam costs.

Owns the choice of the benchmark only.
"""

from __future__ import annotations

import sys
from importlib import import_module

BENCHMARKS = {
    "tree": "what the tree cores cost: match, insert, evict",
    "overhead": "scheduler time per request on live servers, sam against stock",
    "hints": "latency of management requests on a server with a full batch",
    "soak": "random hints at full load, then the books are checked",
    "memory": "bytes per node and per session; pauses of the garbage collector",
    "replay": "agent work on stock and on sam, side by side, with a report",
    "pool": "sessions in the L3 pool: resume with and without prefetch, peak bytes",
    "costs": "what tokens cost on this machine: a file for `python -m sam.sim --costs`",
    "predict": "the replay on a simulated server, beside what live ones did",
    "page": "whether the live page stays smooth with many sessions, in headless Chromium",
    "frees": "what it costs to give evicted tokens back to SGLang's allocators",
    "removes": "what it costs to take pages out of a storage backend",
}
USAGE = "usage: python -m sam.bench NAME [--help] [options]\n" + "\n".join(
    f"  {name:10}{about}" for name, about in BENCHMARKS.items()
)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in BENCHMARKS:
        print(USAGE, file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    return import_module(f"sam.bench.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
