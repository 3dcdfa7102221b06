#!/usr/bin/env python3
"""Applies the patch series to an installed engine, proves it, and takes it back.

Owns the command line of the patchset. Runs on any bare Python 3.11 or newer; the target is
found through its interpreter or its directory. Must never hold logic of its own: that is
in `patchlib`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Also under -I, -P and PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from patchlib import operations  # noqa: E402
from patchlib.errors import EXIT_HELP, Exit, PatchToolError  # noqa: E402
from patchlib.export import Exporter  # noqa: E402
from patchlib.index import refreshed, render_index, render_lock, write_or_compare  # noqa: E402
from patchlib.operations import Report  # noqa: E402
from patchlib.series import Series, load_series  # noqa: E402
from patchlib.store import DENIED, Store  # noqa: E402
from patchlib.survey import survey  # noqa: E402
from patchlib.target import Target, find_target  # noqa: E402

REPO = Path(__file__).resolve().parent.parent

_ABOUT = """\
Applies the patches in patches/ to SGLang, all or nothing, and takes them back.

The target is an installation made from the pinned wheel, or a checkout of upstream at the
pinned tag. Before anything is changed, every file that the patches touch is proven to be
the published one. Nothing is guessed: fuzz and offsets are refused. What was applied, and
the originals, are kept in <sglang>/.sam_patches/ inside the target.
"""
_COMMANDS = {
    "apply": "apply the series; does nothing if it is applied, moves on from an older series",
    "status": "say what is there",
    "check": "prove byte for byte that the series is applied, or that it would apply",
    "revert": "put every original back, byte for byte",
    "export": "write one branch per patch into a checkout of upstream",
    "index": "generate patches/README.md from the headers",
    "lock": "generate patches/BASE.sha256 from the installed wheel",
    "refresh": "put right the line numbers of patches that apply only at an offset",
}


def build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="patchtool.py", description=_ABOUT, epilog=EXIT_HELP, formatter_class=raw
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    made = {
        name: commands.add_parser(
            name, help=text, description=text, epilog=EXIT_HELP, formatter_class=raw
        )
        for name, text in _COMMANDS.items()
    }
    for sub in made.values():
        sub.add_argument(
            "--patches", type=Path, default=REPO / "patches", metavar="DIR", help="the patches"
        )
    for name in ("apply", "status", "check", "revert", "lock", "refresh"):
        _add_target_options(made[name])
    for name in ("status", "check"):
        made[name].add_argument("--json", action="store_true", help="machine-readable output")
    for name in ("apply", "status", "check"):
        made[name].add_argument(
            "--up-to", metavar="PATCH", help="only the series up to and including this patch"
        )
    made["apply"].add_argument(
        "--no-doctor", action="store_true", help="do not run 'python -m sam.doctor' afterwards"
    )
    for name in ("index", "lock"):
        made[name].add_argument(
            "--check", action="store_true", help="write nothing; exit 1 if it is out of date"
        )
    made["export"].add_argument("checkout", type=Path, help="a clean checkout at the pinned tag")
    made["export"].add_argument("--prefix", default="sam/", help="start of the branch names")
    made["export"].add_argument(
        "--force", action="store_true", help="move branches that hold something else"
    )
    return parser


def _add_target_options(sub: argparse.ArgumentParser) -> None:
    group = sub.add_mutually_exclusive_group()
    group.add_argument(
        "--python",
        type=Path,
        metavar="PATH",
        help="interpreter whose sglang is meant (default: this one if it has sglang, else"
        " .venv/bin/python)",
    )
    group.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="a site-packages directory, or a checkout of upstream",
    )


def main(argv: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "apply")
    args = build_parser().parse_args(arguments)
    try:
        return int(_HANDLERS[args.command](args))
    except PatchToolError as error:
        _fail(error, as_json=getattr(args, "json", False))
        return int(error.code)
    except KeyboardInterrupt:
        print(
            "patchtool: interrupted; run it again, it puts right what was cut off", file=sys.stderr
        )
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.INTERNAL)
    except OSError as error:
        code = Exit.READ_ONLY if error.errno in DENIED else Exit.INTERNAL
        remedy = "run as the owner of the installation; 'status' says where it stands"
        _fail(PatchToolError(code, str(error), remedy), as_json=getattr(args, "json", False))
        return int(code)


def _fail(error: PatchToolError, *, as_json: bool) -> None:
    if as_json:
        value = {"exit_code": int(error.code), "error": error.message, "remedy": error.remedy}
        print(json.dumps(value, indent=1))
    print(f"patchtool: {error}", file=sys.stderr)


def _target(args: argparse.Namespace, series: Series) -> Target:
    return find_target(
        series,
        directory=args.target,
        python=args.python,
        repo=REPO,
        running=Path(sys.executable),
    )


def _report(report: Report, target: Target, *, as_json: bool) -> Exit:
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
        return report.code
    print(f"{report.verdict}: {target.kind} {target.root} (sglang {target.version()})")
    found = report.found
    for patch in found.series.patches if found else ():
        print(f"  patch {patch.name}: {patch.header.subject}")
    for fact in found.facts if found else ():
        print(f"  file  {fact.path}: {fact.kind}")
    for note in report.notes:
        print(f"  note: {note}")
    return report.code


# --- commands ---------------------------------------------------------------------------


def _apply(args: argparse.Namespace) -> Exit:
    series = load_series(args.patches, up_to=args.up_to)
    target = _target(args, series)
    code = _report(operations.apply(series, target), target, as_json=False)
    if not args.no_doctor:
        _run_doctor(target)
    return code


def _run_doctor(target: Target) -> None:
    """The overlay's own look at the result; informs, never decides."""
    if target.python is None:
        print("  note: doctor skipped, no interpreter is known for a --target directory")
        return
    probe = "import importlib.util as u, sys; sys.exit(not u.find_spec('sam.doctor'))"
    python = str(target.python)
    if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode:
        print("  note: doctor skipped, the overlay package is not importable there")
        return
    try:
        code = subprocess.run([python, "-m", "sam.doctor"], timeout=300, check=False).returncode
    except subprocess.TimeoutExpired:
        print("  note: doctor did not finish in time; the patches stay applied")
        return
    text = "doctor is content" if code == 0 else f"doctor failed ({code}); the patches stay applied"
    print(f"  note: {text}")


def _status(args: argparse.Namespace) -> Exit:
    series = load_series(args.patches, up_to=args.up_to)
    target = _target(args, series)
    operation = operations.status if args.command == "status" else operations.check
    return _report(operation(series, target), target, as_json=args.json)


def _revert(args: argparse.Namespace) -> Exit:
    series = load_series(args.patches)
    target = _target(args, series)
    return _report(operations.revert(series, target), target, as_json=False)


def _export(args: argparse.Namespace) -> Exit:
    series = load_series(args.patches)
    branches = Exporter(series, args.checkout.resolve(), args.prefix).run(force=args.force)
    for branch in branches:
        where = "on the patches before it" if branch.stacked else "on the base"
        print(f"{branch.name} {branch.commit[:12]} {where} ({branch.patch})")
    return Exit.OK


def _generated(args: argparse.Namespace, name: str, text: str) -> Exit:
    if write_or_compare(args.patches / name, text, compare=args.check):
        return Exit.OK
    print(f"{name} is out of date: run 'patchtool.py {args.command}'", file=sys.stderr)
    return Exit.INTERNAL


def _index(args: argparse.Namespace) -> Exit:
    return _generated(args, "README.md", render_index(load_series(args.patches)))


def _lock(args: argparse.Namespace) -> Exit:
    series = load_series(args.patches)
    target = _target(args, series)
    return _generated(args, "BASE.sha256", render_lock(series, target))


def _refresh(args: argparse.Namespace) -> Exit:
    series = load_series(args.patches)
    target = _target(args, series)
    found = survey(series, target, Store(target.root, target.state_dir))
    found.require_unmodified()
    base = {fact.path: fact.base for fact in found.facts}
    for name, raw in refreshed(series, base).items():
        (args.patches / name).write_bytes(raw)
        print(f"refreshed {name}")
    return Exit.OK


_HANDLERS: dict[str, Callable[[argparse.Namespace], Exit]] = {
    "apply": _apply,
    "status": _status,
    "check": _status,
    "revert": _revert,
    "export": _export,
    "index": _index,
    "lock": _lock,
    "refresh": _refresh,
}


if __name__ == "__main__":
    sys.exit(main())
