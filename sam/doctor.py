"""`python -m sam.doctor`: is this environment ready to serve with sam?

Owns the checks and their remedies. Must never change anything, and never report a check as
passed that it did not make. Exit code 0: ready; 1: something is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points

import msgspec

from sam import __version__


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one check; `remedy` is empty when it passed."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def check_python() -> Check:
    ok = sys.version_info >= (3, 11)
    remedy = "" if ok else "Use Python 3.11 or newer: SGLang 0.5.23 needs it."
    return Check(name="python", ok=ok, found=sys.version.split()[0], remedy=remedy)


def check_sglang() -> Check:
    from sam.srt import upstream

    found = upstream.installed_version()
    ok = found == upstream.PINNED_VERSION
    remedy = f"pip install --no-deps sglang=={upstream.PINNED_VERSION}"
    return Check(name="sglang", ok=ok, found=str(found), remedy="" if ok else remedy)


def check_patches() -> Check:
    from sam.srt import upstream

    missing = upstream.missing_patches()
    n_all = len(upstream.PATCH_MARKERS)
    found = f"{n_all - len(missing)} of {n_all}"
    if not missing:
        return Check(name="patches", ok=True, found=found)
    return Check(
        name="patches",
        ok=False,
        found=f"{found}; missing: {', '.join(missing)}",
        remedy="sam patch apply (in a checkout: scripts/apply_patches.sh), in this environment",
    )


def check_members() -> Check:
    from sam.srt import upstream

    gone = upstream.missing_members()
    n_all = sum(len(names) for names in upstream.USED_MEMBERS.values())
    found = f"{n_all - len(gone)} of {n_all}"
    remedy = f"Missing: {', '.join(gone)}. Reinstall sglang, then apply the patches."
    return Check(name="used members", ok=not gone, found=found, remedy=remedy if gone else "")


def check_plugin() -> Check:
    names = [ep.name for ep in entry_points(group="sglang.srt.plugins")]
    allowed = [n.strip() for n in os.environ.get("SGLANG_PLUGINS", "").split(",") if n.strip()]
    if "sam" not in names:
        remedy = "pip install --no-deps -e . (in the checkout of sam)"
        return Check(name="plugin", ok=False, found=f"entry points: {names}", remedy=remedy)
    if allowed and "sam" not in allowed:
        remedy = "Add sam to SGLANG_PLUGINS, or unset it."
        return Check(name="plugin", ok=False, found=f"SGLANG_PLUGINS={allowed}", remedy=remedy)
    return Check(name="plugin", ok=True, found="entry point sam")


def check_backend() -> Check:
    from sglang.srt.mem_cache.registry import registered_radix_cache_backends
    from sglang.srt.plugins import load_plugins

    load_plugins()
    names = registered_radix_cache_backends()
    remedy = "The plugin failed to load; run with SGLANG_LOG_LEVEL=debug to see why."
    ok = "sam" in names
    return Check(name="backend", ok=ok, found=", ".join(names), remedy="" if ok else remedy)


def check_platform() -> Check:
    from sglang.srt.platforms import current_platform

    name = type(current_platform).__name__
    ok = name != "SRTPlatform"
    remedy = (
        "No accelerator found and the CPU platform is not active: reinstall sam "
        "(pip install --no-deps -e .); if SGLANG_PLUGINS is set, add sam_cpu to it."
    )
    return Check(name="platform", ok=ok, found=name, remedy="" if ok else remedy)


def check_config() -> Check:
    from sam.config import ConfigError, load_config

    try:
        load_config()
    except ConfigError as error:
        return Check(name="config", ok=False, found=str(error), remedy="Correct or unset it.")
    return Check(name="config", ok=True, found="SAM_* variables are valid")


CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_sglang,
    check_patches,
    check_members,
    check_plugin,
    check_backend,
    check_platform,
    check_config,
)


def run_checks() -> list[Check]:
    """All checks in order; one that breaks counts as failed and does not hide the others."""
    results = []
    for check in CHECKS:
        try:
            results.append(check())
        except Exception as error:
            name = check.__name__.removeprefix("check_")
            text = f"{type(error).__name__}: {error}"
            results.append(
                Check(name=name, ok=False, found=text, remedy="Fix the failures above first.")
            )
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sam.doctor",
        description="Check that this environment can serve with --radix-cache-backend sam.",
        epilog="Exit code 0: ready; 1: at least one check failed.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    results = run_checks()
    ready = all(result.ok for result in results)
    if args.json:
        report = {"version": __version__, "ready": ready}
        print(json.dumps({**report, "checks": [msgspec.to_builtins(r) for r in results]}))
        return 0 if ready else 1
    for result in results:
        print(f"{'ok  ' if result.ok else 'FAIL'} {result.name:13} {result.found}")
        if result.remedy:
            print(f"     -> {result.remedy}")
    print(f"sam {__version__}: {'ready' if ready else 'not ready'}")
    return 0 if ready else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
