"""The quickstart as a user runs it: what it prints, and that nothing is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "scripts" / "quickstart.sh"
SMALL = ["--model", "tiny", "--waves", "1", "--members", "3"]
COUNTS = {"recomputed_tokens", "device_tokens", "host_tokens"}
TIMES = {"ttft_p50_s", "ttft_p95_s"}

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def marker(monkeypatch):
    """A variable that every process of one test inherits, to tell them from any others."""
    value = f"SAM_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(*value.split("="))
    monkeypatch.setenv("SAM_VENV", sys.prefix)
    return value


def left_over(marker):
    """Running processes that carry the mark, this one apart."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            name, value = marker.split("=")
            if process.environ().get(name) == value:
                found.append(process)
        except psutil.Error:
            continue
    return found


def start(*args):
    pipe = subprocess.PIPE
    return subprocess.Popen([SCRIPT, *args], stdout=pipe, stderr=pipe, text=True)


def test_it_compares_and_leaves_nothing(marker):
    done = subprocess.run([SCRIPT, "--json", *SMALL], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["identical_outputs"] is True
    assert list(report["arms"]) == ["stock", "sam"]
    for arm in report["arms"].values():
        assert all(isinstance(arm[key], int) for key in COUNTS)
        assert all(arm[key] > 0 for key in TIMES)
        assert sum(arm[key] for key in COUNTS) == arm["prompt_tokens"]
        assert arm["recomputed_tokens"] >= arm["new_tokens"] > 0
    assert report["arms"]["sam"]["management_requests"] > 0
    cost = report["hit_vs_recompute"]
    assert cost["device_hit_s"] < cost["recompute_s"]
    assert cost["host_hit_s"] < cost["recompute_s"]
    assert not left_over(marker)


def test_an_interrupt_ends_it_with_130_and_no_process(marker):
    process = start("--json", *SMALL)
    for line in process.stderr:
        if "warming up" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err[-3000:]
    assert json.loads(out.splitlines()[-1])["identical_outputs"] is False
    assert not left_over(marker)


def test_serve_answers_until_interrupted(marker):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start("serve", "--model", "tiny", "--port", str(port), "--log-level", "error")
    said = ""
    for line in process.stderr:
        said += line
        if "the session is over" in line:
            break
    assert "/v1/chat/completions" in said, said[-3000:]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/sessions", timeout=30) as response:
        assert json.load(response)["n_sessions"] == 0
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert not left_over(marker)


def test_a_taken_port_is_said_and_costs_no_start(marker):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("serve", "--port", str(taken.getsockname()[1]))
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "--port" in err
