"""`python -m sam.bench NAME ...`: benchmarks that need no server.

Owns the choice of the benchmark only.
"""

from __future__ import annotations

import sys

USAGE = "usage: python -m sam.bench tree [--leaves N] [--repeats N] [--no-paths] [--json]"


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] != "tree":
        print(USAGE, file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    from sam.bench.tree import main as tree_main

    return tree_main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
