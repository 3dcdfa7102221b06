"""`quickstart.sh serve`: one server with sam in the foreground, for the user's own requests.

Owns: defaults, the lines to try, and the end of the server. Must never change an option that
the user passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS
from sam.testing.tiny_model import PRESETS, build_tiny_model

_GRACE_S = 15.0
_ABOUT = """\
Runs a patched server with sam on a small random-weight model until Ctrl-C. Every option that is
not listed here goes to `python -m sglang.launch_server` as it is and wins over the defaults.
"""


def serve(argv: Sequence[str]) -> int:
    """Run until the server ends or a signal comes; the server's exit code, 0 after a signal."""
    parser = argparse.ArgumentParser(prog="scripts/quickstart.sh serve", description=_ABOUT)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--model", choices=sorted(PRESETS), default="small")
    parser.add_argument("--workdir", type=Path, default=Path(".cache/quickstart"))
    args, extra = parser.parse_known_args(argv)
    log = Console(stderr=True, highlight=False, soft_wrap=True)
    if not _is_free(args.host, args.port):
        log.print(f"{args.host}:{args.port} is taken: pass another --port", style="red")
        return 2
    command = server_command(args, extra)
    log.print(" ".join(command), style="dim")
    return _run(command, args, log)


def server_command(args: argparse.Namespace, extra: Sequence[str]) -> list[str]:
    """Defaults first, so that the user's options win."""
    command = [sys.executable, "-m", "sglang.launch_server", *CPU_SERVER_ARGS, *CPU_HICACHE_ARGS]
    if not any(item.split("=")[0] in ("--model-path", "--model") for item in extra):
        model = build_tiny_model(args.workdir / f"model-{args.model}", preset=args.model)
        command += ["--model-path", str(model)]
    command += ["--radix-cache-backend", "sam", *extra]
    return [*command, "--host", args.host, "--port", str(args.port)]


def curl_lines(url: str) -> list[tuple[str, str]]:
    """What to try, each with what it does."""
    chat = f"{url}/v1/chat/completions"
    ask = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
    lineage = {"session_id": "leader:coder", "parent_session_id": "leader"}
    edits = {"manage_request": True, "edits": [{"type": "evict", "target": "session"}]}
    managed = {**lineage, "context_management": edits}
    return [
        ("a plain chat", _curl(chat, ask)),
        ("the same as part of a session", _curl(chat, {**ask, "agent_hint": lineage})),
        ("what sam knows", f"curl -s {url}/sessions"),
        ("the session is over", _curl(chat, {"messages": [], "agent_hint": managed})),
    ]


def _curl(url: str, body: dict[str, Any]) -> str:
    data = json.dumps({"model": "default", **body})
    return f"curl -s {url} -H 'Content-Type: application/json' -d '{data}'"


def _run(command: list[str], args: argparse.Namespace, log: Console) -> int:
    host = "127.0.0.1" if args.host == "0.0.0.0" else args.host
    asked = threading.Event()
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: asked.set())
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    told = False
    try:
        while server.poll() is None and not asked.wait(0.5):
            if not told and _is_healthy(f"http://{host}:{args.port}"):
                told = True
                _tell(f"http://{host}:{args.port}", log)
    finally:
        _stop(server)
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked.is_set():
        log.print("stopped; no process is left")
        return 0
    return server.returncode


def _tell(url: str, log: Console) -> None:
    log.print(f"\nready: {url} (Ctrl-C ends it). To try:", style="green")
    for title, line in curl_lines(url):
        log.print(f"\n# {title}", style="dim")
        log.print(line, markup=False)
    log.print()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ask, wait, then kill what is left of the server's process group."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    server.wait(timeout=30)
    time.sleep(0.1)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
