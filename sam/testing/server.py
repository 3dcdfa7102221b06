"""A real SGLang server as a child process, for tests and measurements.

Owns: starting, waiting for, talking to and stopping one `python -m sglang.launch_server`. Must
never leave a process behind: the server runs in its own process group, which is killed on exit.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

# What a server needs on the CPU platform; append --model-path and sizes.
CPU_SERVER_ARGS: tuple[str, ...] = (
    "--device", "cpu",
    "--dtype", "float32",
    "--context-length", "32768",
    "--max-total-tokens", "16384",
    "--max-running-requests", "16",
    "--chunked-prefill-size", "2048",
    "--sampling-backend", "pytorch",
    "--grammar-backend", "xgrammar",
    "--enable-cache-report",
)  # fmt: skip
# HiCache on top; the layout may also be page_first_direct.
CPU_HICACHE_ARGS: tuple[str, ...] = (
    "--enable-hierarchical-cache",
    "--hicache-ratio", "2",
    "--hicache-io-backend", "direct",
    "--hicache-mem-layout", "layer_first",
)  # fmt: skip
_TAIL_BYTES = 6000


class ServerFailed(RuntimeError):
    """The server died or did not become healthy; the text ends with the tail of its log."""


@dataclass(frozen=True)
class Generation:
    """Answer of `/generate`: the text and upstream's `meta_info`."""

    text: str
    meta_info: Mapping[str, Any]
    seconds: float

    @property
    def cached(self) -> Mapping[str, int]:
        """Cached prompt tokens by tier: `device`, `host`, and `storage` if L3 is on."""
        details = self.meta_info.get("cached_tokens_details") or {}
        return {tier: n for tier, n in details.items() if isinstance(n, int)}


@dataclass
class ServerProcess:
    """Context manager around one server.

    `args` are the server's own flags without host and port; `env` overrides the environment.
    Raises `ServerFailed` on entering if the process ends or is not healthy in `start_timeout_s`.
    """

    args: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 240.0
    log_path: Path | None = None
    url: str = ""

    def __enter__(self) -> Self:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        if self.log_path is None:
            handle, name = tempfile.mkstemp(prefix="sam-server-", suffix=".log")
            os.close(handle)
            self.log_path = Path(name)
        command = [sys.executable, "-m", "sglang.launch_server", *self.args]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.env},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        try:
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self, grace_s: float = 15.0) -> None:
        """Ask the server to end, then kill whatever of its process group is left."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=grace_s)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(timeout=30)
        deadline = time.monotonic() + 10.0
        while self.leftovers() and time.monotonic() < deadline:
            time.sleep(0.05)

    def leftovers(self) -> list[int]:
        """Process ids of the server's group that still run (zombies do not)."""
        found = []
        for process in psutil.process_iter(["status"]):
            try:
                if os.getpgid(process.pid) != self._process.pid:
                    continue
            except ProcessLookupError:
                continue
            if process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        return found

    def log_tail(self) -> str:
        """End of the server's log."""
        return self.log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")

    def log_text(self) -> str:
        """The server's log so far."""
        return self.log_path.read_text(errors="replace")

    def request(self, path: str, body: Any = None, *, method: str = "", timeout_s=300.0) -> Any:
        """JSON answer of `path` (text if it is not JSON); POST if there is a `body`.

        Raises `urllib.error.HTTPError` on an error status.
        """
        data = None if body is None else json.dumps(body).encode()
        verb = method or ("POST" if data is not None else "GET")
        request = urllib.request.Request(self.url + path, data=data, method=verb)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def generate(
        self, prompt: str | Sequence[int], *, logprobs: bool = False, **sampling: Any
    ) -> Generation:
        """One greedy completion of a text or of token ids; `sampling` overrides parameters.

        With `logprobs`, `meta_info["output_token_logprobs"]` holds (logprob, id, text) rows.
        """
        params = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True, **sampling}
        key = "text" if isinstance(prompt, str) else "input_ids"
        value = prompt if isinstance(prompt, str) else list(prompt)
        start = time.perf_counter()
        body = {key: value, "sampling_params": params, "return_logprob": logprobs}
        answer = self.request("/generate", body)
        return Generation(answer["text"], answer["meta_info"], time.perf_counter() - start)

    def flush_cache(self) -> None:
        """Empty the device and host caches; the server must be idle."""
        self.request("/flush_cache", method="POST")

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise ServerFailed(f"server ended with code {code}\n{self.log_tail()}")
            try:
                self.request("/health", timeout_s=5)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise ServerFailed(f"not healthy after {self.start_timeout_s:g} s\n{self.log_tail()}")


def _die_with_parent() -> None:
    """In the child: SIGTERM when the parent dies, also by SIGKILL. Linux only, else no-op."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def free_port() -> int:
    """A TCP port that was free on the loopback interface a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
