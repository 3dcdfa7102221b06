"""The wheel of this checkout, and environments that have it installed.

Owns how both are made. Must never install anything into the environment that runs the tests.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def build_wheel(place: Path) -> Path:
    """Build from a copy of what git would have, in the folder `place`."""
    source = place / "source"
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPO, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in names:
        if (REPO / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPO / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(place), str(source)], check=True, timeout=300)
    (built,) = place.glob("*.whl")
    return built


def install_wheel(wheel: Path, root: Path) -> Path:
    """A virtual environment with the wheel; what the wheel depends on is this one's."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    (site,) = root.glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", str(root / "bin" / "python"), "install"]
    subprocess.run([*command, "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return root
