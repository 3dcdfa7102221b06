"""Commands that other modules of this package carry out: doctor, bench, sim, the patch tool.

Owns how they are found and started; the patch tool and the patches lie in the package where it
was installed from a wheel, beside it in a checkout. Must never interpret their options.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import sam
from sam.cli.errors import CliError, Exit

_PACKAGE = Path(sam.__file__).resolve().parent
_INSTALLED, _CHECKOUT = _PACKAGE / "_patchset", _PACKAGE.parent


def become(*command: str) -> NoReturn:
    """Go on as another Python command: its output, signals and exit code are ours."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *command])


def need(module: str, remedy: str) -> None:
    """Raises CliError if a module that a command needs is not installed."""
    if find_spec(module) is None:
        raise CliError(Exit.FINDING, f"this command needs {module}, which is not installed", remedy)


def patch_tool() -> Path:
    """The patch tool that belongs to this package. Raises CliError."""
    for root in (_INSTALLED, _CHECKOUT):
        tool = root / "scripts" / "patchtool.py"
        if tool.is_file() and (root / "patches" / "series").is_file():
            return tool
    text = f"neither {_INSTALLED} nor {_CHECKOUT} holds the patches"
    raise CliError(Exit.FINDING, text, "reinstall agent-sam from its wheel or checkout")


def patch(command: str, options: Sequence[str]) -> int:
    """Run a command of the patch tool on this interpreter's SGLang; its exit code."""
    tool = str(patch_tool())
    if "--json" in options and command in ("apply", "revert"):
        return _changed_as_json(tool, command, [one for one in options if one != "--json"])
    become(tool, command, *options)


def _changed_as_json(tool: str, command: str, options: list[str]) -> int:
    """`apply` and `revert` have no JSON of their own: do it, then show the status as JSON."""
    done = _run(tool, command, *options)
    sys.stderr.write(done.stdout + done.stderr)
    report: dict[str, object] = {"command": command, "exit_code": done.returncode}
    if done.returncode:
        report["error"] = done.stderr.strip()
    else:
        kept = [one for one in options if one != "--no-doctor"]
        report["status"] = json.loads(_run(tool, "status", "--json", *kept).stdout)
    print(json.dumps(report))
    return done.returncode


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)
