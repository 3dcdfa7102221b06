"""The pool (L3) of one run: none, a folder of files, or Mooncake on this machine.

Owns: a fresh, empty pool for each run, the flags and the environment that every arm's server
gets for it, and its largest size meanwhile. Must never leave a pool's process behind, and must
never give two arms different flags.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sam.bench.replay.measure import PeakBytes, folder_bytes, metric_bytes
from sam.testing.server import ServerFailed, free_port

KINDS = ("off", "file", "mooncake")
_STORAGE_DIR = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "pool.sh"
_STORE_BYTES = "1G"
_ALLOCATED = "master_allocated_bytes"
_START_S = 300.0
_NOT_OURS = ("--radix-cache-backend", "--page-size", "--enable-hierarchical-cache")


class PoolFailed(ServerFailed):
    """The pool did not start; the text is what its script said."""


@dataclass(frozen=True)
class Pool:
    """`flags`, `env`: of every server that uses it. `peak`: its size while a run is played."""

    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    peak: PeakBytes | None = None


@contextmanager
def fresh_pool(kind: str, workdir: Path) -> Iterator[Pool]:
    """An empty pool of a kind, gone afterwards. Raises PoolFailed."""
    if kind == "off":
        yield Pool()
    elif kind == "file":
        yield _files(workdir / "l3")
    else:
        with _mooncake(workdir.resolve() / "pool") as pool:
            yield pool


def _files(folder: Path) -> Pool:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    flags = ("--hicache-storage-backend", "file")
    return Pool(flags, {_STORAGE_DIR: str(folder)}, PeakBytes(lambda: folder_bytes(folder)))


@contextmanager
def _mooncake(run: Path) -> Iterator[Pool]:
    port = free_port()
    env = {
        **os.environ,
        "SAM_POOL_RUN": str(run),
        "SAM_POOL_PORT": str(port),
        "SAM_POOL_BYTES": os.environ.get("SAM_POOL_BYTES", _STORE_BYTES),
    }
    stop = [str(_SCRIPT), "stop"]
    subprocess.run(stop, env=env, capture_output=True)
    started = subprocess.run(
        [str(_SCRIPT), "start"], env=env, capture_output=True, text=True, timeout=_START_S
    )
    try:
        if started.returncode:
            raise PoolFailed(f"scripts/pool.sh start: {started.stderr.strip()[-2000:]}")
        flags, of_servers = read_flags(started.stdout)
        url = f"http://127.0.0.1:{port + 1}/metrics"
        yield Pool(flags, of_servers, PeakBytes(lambda: _allocated(url)))
    finally:
        subprocess.run(stop, env=env, capture_output=True)


def read_flags(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """What `pool.sh start` prints: flags without those that make an arm, and the environment."""
    about_env, _, about_flags = text.partition("flags of each server")
    env = dict(line.strip().split("=", 1) for line in about_env.splitlines()[1:] if "=" in line)
    words = shlex.split(about_flags.partition("\n")[2])
    flags: list[str] = []
    for place, word in enumerate(words):
        if word.startswith("--"):
            following = words[place + 1 : place + 2]
            value = [w for w in following if not w.startswith("--")]
            flags += [word, *value] if word not in _NOT_OURS else []
    return tuple(flags), env


def _allocated(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return metric_bytes(response.read().decode(), _ALLOCATED)
    except (urllib.error.URLError, OSError):
        return 0
