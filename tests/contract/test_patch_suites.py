"""The upstream-style tests inside the patches, run against the patched installation.

A wheel install has no `test/` tree, so the patch tool skips those files there; here they are
cut out of the patches and run as upstream would.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PATCHES = REPO / "patches"


def new_test_files(patch: str) -> dict[str, str]:
    """Path -> content of the files below `test/` that a patch adds."""
    files = {}
    for part in patch.split("\ndiff --git ")[1:]:
        path = re.search(r"^\+\+\+ b/(test/\S+)$", part, re.MULTILINE)
        if path and "\n--- /dev/null\n" in part:
            body = part.split("\n@@ ", 1)[1].split("\n")[1:]
            lines = [line[1:] for line in body if line.startswith("+")]
            files[path[1]] = "\n".join(lines) + "\n"
    return files


def test_every_patch_brings_a_test_and_it_passes(tmp_path):
    series = [
        line.strip()
        for line in (PATCHES / "series").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    written = []
    for name in series:
        files = new_test_files((PATCHES / name).read_text())
        assert files, f"{name} adds no test below test/"
        for path, content in files.items():
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
            written.append(str(target))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *written],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if run.returncode:
        pytest.fail(run.stdout[-4_000:] + run.stderr[-2_000:])
    assert " passed" in run.stdout
