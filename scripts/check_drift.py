#!/usr/bin/env python3
"""Says what another upstream version does to the patch series, before anybody upgrades.

Owns the command line of the drift check and the fetching of a release. Must never touch
an installation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

# Also under -I, -P and PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from patchlib.drift import render_table, survey_drift, to_json  # noqa: E402
from patchlib.errors import Exit, PatchToolError  # noqa: E402
from patchlib.gitcmd import is_repository, try_git  # noqa: E402
from patchlib.series import Series, load_series  # noqa: E402
from patchlib.target import find_target  # noqa: E402
from patchlib.trees import BaseTree, Tree, tree_of, tree_version  # noqa: E402

REPO = Path(__file__).resolve().parent.parent

_EPILOG = """\
classes:
  APPLIES   as it is
  OFFSET    applies, but the lines moved
  CONFLICT  does not apply
  MERGED    upstream has it: it reverse-applies, or Remove-When holds
  SYMBOL    applies, but a name that it, its Remove-When or the overlay needs is gone

exit codes: 0 all of APPLIES, OFFSET, MERGED; 1 a CONFLICT or SYMBOL; 2 wrong usage
"""


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        series = load_series(args.patches)
        location = _locate(args.against, args.cache, args.python)
        tree = tree_of(location)
        version = tree_version(tree, location) or _described(location)
        overlay = [path.read_bytes() for path in _overlay_files(args.overlay)]
        rows = survey_drift(series, tree, version, _base(args, series), overlay)
    except PatchToolError as error:
        print(f"drift: {error}", file=sys.stderr)
        return int(Exit.USAGE)
    if args.json:
        print(json.dumps(to_json(rows, args.against, version), indent=1))
    else:
        print(render_table(rows, f"{args.against} (version {version or 'unknown'})"))
    return int(not all(row.harmless for row in rows))


def _described(checkout: Path) -> str | None:
    out = try_git(checkout, "describe", "--tags") if is_repository(checkout) else None
    return out.decode().strip() if out else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="check_drift.py",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--against",
        required=True,
        metavar="VERSION|DIR|WHEEL",
        help="a release (fetched with pip), an unpacked wheel, a checkout, or a wheel file",
    )
    parser.add_argument("--patches", type=Path, default=REPO / "patches", metavar="DIR")
    parser.add_argument(
        "--overlay",
        type=Path,
        default=REPO / "sam",
        metavar="PATH",
        help="the module or package whose upstream imports must survive",
    )
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="the pinned base (default: the installed one)"
    )
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="interpreter that has pip"
    )
    parser.add_argument("--cache", type=Path, default=_default_cache(), metavar="DIR")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _overlay_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []


def _default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sglang-drift"


def _locate(against: str, cache: Path, python: Path) -> Path:
    if Path(against).exists():
        return Path(against)
    if not re.fullmatch(r"\d+(\.\d+)*[\w.+]*", against):
        raise PatchToolError(
            Exit.USAGE, f"{against}: no such file or directory, and no version number", ""
        )
    found = _cached(cache, against)
    if not found:
        cache.mkdir(parents=True, exist_ok=True)
        _download(cache, against, python)
        found = _cached(cache, against)
    if not found:
        raise PatchToolError(Exit.USAGE, f"pip brought no wheel of sglang {against}", "")
    return found[0]


def _cached(cache: Path, version: str) -> list[Path]:
    return sorted(cache.glob(f"sglang-{version}-*.whl"))


def _download(cache: Path, version: str, python: Path) -> None:
    command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(cache), f"sglang=={version}"]
    if subprocess.run(command, check=False).returncode:
        raise PatchToolError(
            Exit.USAGE,
            f"pip could not fetch sglang {version}",
            "fetch the wheel by hand and pass its path",
        )


def _base(args: argparse.Namespace, series: Series) -> Tree | None:
    """The pinned sources, to tell a lost name from one that never was there."""
    try:
        target = find_target(
            series,
            directory=args.base,
            python=None,
            repo=REPO,
            running=Path(sys.executable),
        )
        target.prove_version(series)
        return BaseTree(series, target)
    except PatchToolError:
        if args.base is not None:
            raise
        print("note: no pinned base found, lost names are found less well", file=sys.stderr)
        return None


if __name__ == "__main__":
    sys.exit(main())
