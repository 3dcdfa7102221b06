"""`python -m sam.bench replay` as a user runs it: it compares, goes on, and leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

COMMAND = [sys.executable, "-m", "sam.bench", "replay", "--quick", "--seeds", "0", "--json"]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def marker(monkeypatch):
    """A variable that every process of one test inherits, to tell them from any others."""
    value = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("SAM_TEST_MARK", value)
    return value


def left_over(marker):
    """Running processes that carry the mark, this one apart."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get("SAM_TEST_MARK") == marker:
                found.append(process)
        except psutil.Error:
            continue
    return found


def replay(tmp_path, *args):
    command = [*COMMAND, "--workdir", str(tmp_path / "work"), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_interrupted_comparison_is_partial_and_goes_on(tmp_path, marker):
    arms = ["--arms", "stock", "sam-hints"]
    process = replay(tmp_path, *arms)
    starts = 0
    for line in process.stderr:
        starts += "starting a server" in line
        if starts == 2:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err[-3000:]
    report = json.loads(out.splitlines()[-1])
    assert report["runs"] < report["runs_wanted"] == 2
    assert "partial" in out and not left_over(marker)

    page = tmp_path / "report.html"
    process = replay(tmp_path, *arms, "--html", str(page))
    out, err = process.communicate(timeout=800)
    assert process.returncode == 0, err[-3000:]
    report = json.loads(out.splitlines()[-1])
    assert report["runs"] == 2 and not left_over(marker)
    assert page.read_text().rstrip().endswith("</html>")
    stock, sam = report["arms"]["stock"], report["arms"]["sam-hints"]
    assert report["differing_requests"] == {"sam-hints": 0}
    for arm in (stock, sam):
        tiers = arm["device_tokens"] + arm["host_tokens"] + arm["storage_tokens"]
        assert tiers + arm["recomputed_tokens"] == arm["prompt_tokens"] > 0
        assert arm["recomputed_tokens"] >= arm["new_tokens"] > 0
        assert arm["scheduler"]["work_s"] > 0 and arm["counters"]["evicted_tokens"] > 0
    assert stock["prompt_tokens"] == sam["prompt_tokens"]
    assert not stock["outcomes"] and sam["outcomes"]["evict:done"] > 0


def test_a_finished_comparison_without_hints_starts_no_server(tmp_path, marker):
    """Workload (d): nobody sends a hint, and the same comparison again is only a report."""
    arms = ["--workload", "nohints", "--arms", "stock", "sam-plain"]
    first = replay(tmp_path, *arms)
    out, err = first.communicate(timeout=800)
    assert first.returncode == 0, err[-3000:]
    report = json.loads(out.splitlines()[-1])
    assert report["differing_requests"] == {"sam-plain": 0}
    assert not any(arm["outcomes"] or arm["management"]["n"] for arm in report["arms"].values())
    assert {(t["against"], t["metric"]) for t in report["targets"]} == {
        ("stock", "ttft_mean"),
        ("stock", "tokens_per_s"),
    }
    again = replay(tmp_path, *arms)
    repeated, err = again.communicate(timeout=120)
    assert again.returncode == 0 and "starting a server" not in err
    figures = [json.loads(text.splitlines()[-1])["arms"] for text in (out, repeated)]
    assert figures[0] == figures[1]
    assert not left_over(marker)
