#!/usr/bin/env python3
"""Checks the patch series against its rules; one line per finding, exit code 1 if any.

Owns the command line of the lint. Must never change anything.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Also under -I, -P and PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from patchlib.errors import Exit, PatchToolError  # noqa: E402
from patchlib.rules import lint  # noqa: E402
from patchlib.series import Series, load_series  # noqa: E402
from patchlib.target import Target, find_target  # noqa: E402
from patchlib.trees import BaseTree, Tree, tree_of  # noqa: E402

REPO = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="lint_patches.py",
        description=__doc__,
        epilog="exit codes: 0 clean (warnings allowed), 1 findings, 2 unreadable patches",
    )
    parser.add_argument("--patches", type=Path, default=REPO / "patches", metavar="DIR")
    parser.add_argument(
        "--python", type=Path, metavar="PATH", help="where the base is installed"
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="unpacked wheel, site-packages, wheel, checkout",
    )
    parser.add_argument("--strict", action="store_true", help="warnings count as findings")
    args = parser.parse_args(argv)
    try:
        series = load_series(args.patches)
        base, target = _base(args, series)
    except PatchToolError as error:
        print(f"lint: {error}", file=sys.stderr)
        return int(Exit.USAGE if error.code is Exit.USAGE else Exit.INTERNAL)
    if base is None:
        print(
            "note: no base found, rules that need upstream's files are skipped", file=sys.stderr
        )
    findings = lint(series, REPO, base, target)
    for finding in findings:
        print(finding)
    return int(any(args.strict or not finding.warning for finding in findings))


def _base(args: argparse.Namespace, series: Series) -> tuple[Tree | None, Target | None]:
    if args.base is not None and (
        args.base.is_file() or not list(args.base.glob("*.dist-info"))
    ):
        return tree_of(args.base), None
    try:
        running = Path(sys.executable)
        target = find_target(
            series, directory=args.base, python=args.python, repo=REPO, running=running
        )
    except PatchToolError:
        if args.base is not None or args.python is not None:
            raise
        return None, None
    target.prove_version(series)
    return BaseTree(series, target), target


if __name__ == "__main__":
    sys.exit(main())
