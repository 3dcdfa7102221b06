"""A Mooncake pool of a test's own, through `scripts/pool.sh`.

Owns: starting it on free ports, killing its parts, bringing them back, stopping it. Must never
touch a pool that it did not start.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sam.testing.server import free_port

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "scripts" / "pool.sh"
MIB = 1 << 20


def mooncake_folder() -> Path | None:
    """Where `scripts/pool.sh install` put Mooncake; None if it did not."""
    folder = Path(os.environ.get("SAM_POOL_LIB", REPO / ".cache" / "mooncake"))
    return folder if (folder / "mooncake").is_dir() else None


@dataclass
class MooncakePool:
    """Master and store; `folder` is empty and keeps pid files and logs.

    `lease_ms`: how long a page stays after its last use when others need room. Raises
    `RuntimeError`, with what the script said, where a command fails.
    """

    folder: Path
    n_bytes: int = 64 * MIB
    lease_ms: int = 10_000
    port: int = 0

    def start(self) -> None:
        """Bring up what does not run."""
        self.port = self.port or _three_free_ports()
        self._script("start")

    def stop(self) -> None:
        self._script("stop")

    def is_up(self) -> bool:
        return self._run("status").returncode == 0

    def kill(self, part: str) -> None:
        """SIGKILL the `master` or the `store`."""
        os.kill(self.pid(part), signal.SIGKILL)
        while Path(f"/proc/{self.pid(part)}/exe").exists():
            time.sleep(0.01)

    def pause(self, part: str, *, resume: bool = False) -> None:
        """Make it as slow as can be, or itself again."""
        os.kill(self.pid(part), signal.SIGCONT if resume else signal.SIGSTOP)

    def pid(self, part: str) -> int:
        return int((self.folder / f"{part}.pid").read_text())

    def extra_config(self, **more: Any) -> dict[str, Any]:
        """Of SGLang's storage backend `mooncake`."""
        return {
            "master_server_address": f"127.0.0.1:{self.port}",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "global_segment_size": 0,
            "local_hostname": "127.0.0.1",
            **more,
        }

    def client(self) -> Any:
        """Another writer and reader, in this process; Mooncake must be importable."""
        from mooncake.store import MooncakeDistributedStore

        store = MooncakeDistributedStore()
        address = f"127.0.0.1:{self.port}"
        failed = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", address)
        if failed:
            raise RuntimeError(f"no client of Mooncake: error {failed}")
        return store

    def _script(self, command: str) -> None:
        done = self._run(command)
        if done.returncode:
            raise RuntimeError(f"pool.sh {command}: {done.stderr}")

    def _run(self, command: str) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "SAM_POOL_RUN": str(self.folder),
            "SAM_POOL_PORT": str(self.port),
            "SAM_POOL_BYTES": str(self.n_bytes),
            "SAM_POOL_MASTER_FLAGS": f"--default_kv_lease_ttl={self.lease_ms}",
            "SAM_PYTHON": sys.executable,
        }
        return subprocess.run(
            [SCRIPT, command], env=env, capture_output=True, text=True, check=False
        )


def _three_free_ports() -> int:
    """The first of three in a row."""
    while True:
        port = free_port()
        try:
            for more in (1, 2):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + more))
        except (OSError, OverflowError):
            continue
        return port
