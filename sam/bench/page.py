"""Whether the live page stays smooth with many sessions, in headless Chromium.

Owns: a server with so many sessions, changes to some of them each second, and what the browser
tells of frames and long tasks while the tree is scrolled. Must never count a page that failed.
Needs what `scripts/browser.sh install` brings. On a machine without a display Chromium draws on
the CPUs that the server uses as well: compare figures of one machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from sam.bench.quickstart import describe_machine, hide_accelerators
from sam.testing.server import CPU_HICACHE_ARGS, CPU_SERVER_ARGS, ServerFailed, ServerProcess
from sam.testing.tiny_model import build_tiny_model

PER_MESSAGE = 50
_WATCH = """
window.longTasks = [];
new PerformanceObserver((list) => list.getEntries().forEach((entry) =>
  longTasks.push(entry.duration))).observe({ type: "longtask", buffered: true });
"""
_SCROLL = """async (seconds) => {
  const box = document.querySelector(".window");
  const frames = [];
  longTasks.length = 0;
  const end = performance.now() + 1000 * seconds;
  let last = performance.now();
  while (last < end) {
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
    box.scrollTop += 40;
    if (box.scrollTop + box.clientHeight >= box.scrollHeight - 2) box.scrollTop = 0;
  }
  frames.sort((a, b) => a - b);
  const at = (share) => Math.round(10 * frames[Math.floor(share * (frames.length - 1))]) / 10;
  return { frames: frames.length, p50_ms: at(0.5), p95_ms: at(0.95), max_ms: at(1),
    long_tasks: longTasks.length, longest_task_ms: Math.round(Math.max(0, ...longTasks)),
    rows_drawn: document.querySelectorAll(".row").length,
    elements: document.querySelectorAll("*").length };
}"""


def bind(server: ServerProcess, names: list[str], message: str) -> None:
    """Open or touch sessions, every tenth one a root."""
    for at in range(0, len(names), PER_MESSAGE):
        actions = [
            {
                "action_id": f"b{i}",
                "action_type": "session.bind",
                "action_version": "0.1",
                "payload": {"session_id": name, "parent_session_id": name.partition(":")[0]},
            }
            for i, name in enumerate(names[at : at + PER_MESSAGE])
        ]
        envelope = {"protocol_version": "0.1", "message_id": f"{message}-{at}", "actions": actions}
        server.request("/kv_hints", envelope)


def answer_ms(server: ServerProcess, n_looks: int = 5) -> list[float]:
    """Milliseconds of looks for which the scheduler was asked, when nothing changes."""
    news, times = server.request("/sam/api/live"), []
    known = f"epoch={news['epoch']}&version=1000000000&event={news['next_event']}"
    for _ in range(n_looks):
        time.sleep(1.1)
        start = time.perf_counter()
        server.request(f"/sam/api/live?{known}")
        times.append(round(1e3 * (time.perf_counter() - start), 1))
    return times


def measure(server: ServerProcess, n_sessions: int, seconds: float) -> dict[str, Any]:
    """Figures of one page on a server where a tenth of the sessions changes each second."""
    from playwright.sync_api import sync_playwright

    names = [f"swarm-{i // 10}" + (f":agent-{i}" if i % 10 else "") for i in range(n_sessions)]
    bind(server, names, "first")
    stop = threading.Event()

    def keep_changing() -> None:
        turn = 0
        while not stop.wait(1.0):
            turn += 1
            bind(server, names[turn % 10 :: 10], f"turn-{turn}")

    figures: dict[str, Any] = {"sessions": n_sessions, "answer_ms": answer_ms(server)}
    thread = threading.Thread(target=keep_changing, daemon=True)
    thread.start()
    try:
        with sync_playwright() as playwright:
            arguments = ["--no-sandbox"] if os.getuid() == 0 else []
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=arguments
            )
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.set_default_timeout(60_000)
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.add_init_script(_WATCH)
            page.goto(f"{server.url}/sam/")
            rows = f"[role=treegrid][aria-rowcount='{n_sessions + 1}']"
            page.wait_for_selector(rows)
            figures |= page.evaluate(_SCROLL, seconds)
            figures["errors"] = errors
    finally:
        stop.set()
        thread.join()
    return figures


def main(argv: list[str] | None = None) -> int:
    """0, or 1 where the page or the server failed."""
    parser = argparse.ArgumentParser(prog="sam.bench page", description=__doc__)
    parser.add_argument("--sessions", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of scrolling")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    args = parser.parse_args(argv)
    hide_accelerators(Console(stderr=True))
    model = build_tiny_model(Path(".cache") / "models" / "tiny", preset="tiny")
    flags = [*CPU_SERVER_ARGS, *CPU_HICACHE_ARGS, "--model-path", str(model)]
    flags += ["--radix-cache-backend", "sam", "--sam-hint-rate-per-s", "0"]
    try:
        with ServerProcess(flags) as server:
            figures = measure(server, args.sessions, args.seconds)
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    figures["machine"] = describe_machine()
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:18}{value}")
    return 1 if figures["errors"] else 0
