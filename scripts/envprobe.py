#!/usr/bin/env python3
"""What is in the environment that `setup_env.sh` makes, and whether all of it is whole.

Owns: the stamp `.sam-setup.json` in the environment, and the removal of half-installed packages
there. Runs on the environment's bare interpreter. Must never install or import a package.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

STAMP = ".sam-setup.json"
PACKAGE = "agent-sam"
TEST_PACKAGES = ("pytest", "pytest-timeout", "pytest-rerunfailures", "hypothesis")
# Patched in place, so its sizes are not those of its RECORD.
ENGINE = "sglang"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;#]+)\s*(?:#.*)?$")


class Environment:
    """The environment of this interpreter, against what the checkout asks for."""

    def __init__(self, root: Path, pins: list[str], *, tests: bool) -> None:
        self.root, self.pins, self.tests = root, pins, tests
        self.site = Path(sysconfig.get_paths()["purelib"])
        self.stamp = Path(sys.prefix) / STAMP

    def expected(self) -> dict[str, str]:
        """Versions that have to be there, by normalized name."""
        lines = (self.root / "requirements" / "cpu.txt").read_text().splitlines()
        found = (_PIN.match(line.strip()) for line in [*lines, *self.pins])
        return {_normal(match[1]): match[2] for match in found if match}

    def installed(self) -> dict[str, str]:
        names = (path.name.removesuffix(".dist-info") for path in self._infos())
        parted = (name.rpartition("-") for name in names)
        return {_normal(name): version for name, _, version in parted}

    def problems(self) -> list[str]:
        """Why the environment is not what the checkout asks for; empty if it is."""
        there = self.installed()
        wrong = [
            f"{name}: {there.get(name, 'missing')}, not {version}"
            for name, version in self.expected().items()
            if there.get(name, "").partition("+")[0] != version.partition("+")[0]
        ]
        wanted = TEST_PACKAGES if self.tests else ()
        wrong += [f"{name}: missing" for name in wanted if name not in there]
        if not self._is_editable():
            wrong.append(f"{PACKAGE}: not installed from {self.root}")
        return wrong

    def digest(self) -> str:
        sums = hashlib.sha256(f"{sys.version} {self.root} {self.pins}".encode())
        for name in ("requirements/cpu.txt", "pyproject.toml"):
            sums.update((self.root / name).read_bytes())
        return sums.hexdigest()

    def is_ready(self) -> bool:
        try:
            stamp = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return False
        return stamp == {"digest": self.digest()} and not self.problems()

    def write_stamp(self) -> None:
        self.stamp.write_text(json.dumps({"digest": self.digest()}))

    def broken(self) -> Iterator[Path]:
        """Metadata folders of packages whose files are not all there."""
        for info in self._infos():
            if not self._is_whole(info):
                yield info

    def heal(self) -> list[str]:
        """Make pip see half-installed packages as missing; their names."""
        names = []
        for info in list(self.broken()):
            name = info.name.removesuffix(".dist-info")
            if _normal(name.rpartition("-")[0]) == ENGINE:
                shutil.rmtree(self.site / ENGINE, ignore_errors=True)
            shutil.rmtree(info)
            names.append(name)
        for leftover in self.site.glob("~*"):
            shutil.rmtree(leftover, ignore_errors=True)
        return names

    def _infos(self) -> list[Path]:
        return sorted(self.site.glob("*.dist-info"))

    def _is_editable(self) -> bool:
        for path in self.site.glob("agent_sam-*.dist-info/direct_url.json"):
            return json.loads(path.read_text()).get("url") == self.root.as_uri()
        return False

    def _is_whole(self, info: Path) -> bool:
        record = info / "RECORD"
        if not record.is_file() or not (info / "METADATA").is_file():
            return False
        patched = info.name.startswith(f"{ENGINE}-")
        with record.open(newline="") as file:
            for path, _, size, *_ in csv.reader(file):
                if not size or path.endswith(".pyc"):
                    continue
                try:
                    found = (self.site / path).stat().st_size
                except OSError:
                    return False
                if found != int(size) and not patched:
                    return False
        return True


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(argv: list[str]) -> int:
    command, root, tests, *pins = argv
    env = Environment(Path(root), pins, tests=bool(tests))
    if command == "ready":
        return 0 if env.is_ready() else 1
    if command == "unstamp":
        env.stamp.unlink(missing_ok=True)
    elif command == "has-engine":
        there = env.installed()
        return 0 if "torch" in there and ENGINE in there else 1
    elif command == "heal":
        for name in env.heal():
            print(f"setup: {name} was half installed; it is installed again", file=sys.stderr)
    elif command == "stamp":
        wrong = env.problems()
        if wrong:
            print("setup: not as asked for: " + "; ".join(wrong), file=sys.stderr)
            return 1
        env.write_stamp()
    else:
        raise SystemExit(f"unknown command {command!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
