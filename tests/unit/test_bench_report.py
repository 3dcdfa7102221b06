"""Arithmetic and JSON of the quickstart's report, and its machine checks."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from sam.bench import quickstart
from sam.bench.hit_cost import HitCost, kind_of
from sam.bench.progress import Steps
from sam.bench.serve import _is_free, curl_lines, server_command
from sam.bench.swarm_client import Answer, SwarmRun
from sam.bench.swarm_report import (
    arms_table,
    cost_table,
    differing,
    new_tokens,
    percentile,
    summarize,
    to_json,
)

ABOUT = {"seed": 0, "tree_core": {"stock": "A", "sam": "B"}, "machine": "toy"}
WANTED = {"recomputed_tokens", "device_tokens", "host_tokens", "ttft_p50_s", "ttft_p95_s"}


def answer(ids=(1, 2), *, prompt=(5, 6, 7), device=0, host=0, ttft=0.5):
    return Answer("x", tuple(prompt), tuple(ids), len(prompt), device, host, 0, ttft, 1.0)


def run_of(**answers):
    run = SwarmRun()
    for name, value in answers.items():
        run.sent.append((name, 0))
        run.answers[name, 0] = value
    return run


def text_of(table):
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return console.file.getvalue()


def test_percentile():
    assert percentile([], 0.5) == 0
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile(range(101), 0.95) == pytest.approx(95)


def test_summary_adds_up():
    run = run_of(a=answer(prompt=range(10), device=4, host=3), b=answer(prompt=range(10)))
    found = summarize(run)
    assert found["prompt_tokens"] == 20
    assert found["recomputed_tokens"] == 3 + 10
    assert (found["device_tokens"], found["host_tokens"]) == (4, 3)
    assert found["cached_share"] == 0.35


def test_new_tokens_is_what_an_endless_cache_would_compute():
    run = run_of(
        a=answer(prompt=(1, 2, 3), ids=(4,)),
        b=answer(prompt=(1, 2, 3, 4, 5), ids=()),
        c=answer(prompt=(1, 2, 9), ids=()),
        d=answer(prompt=(1, 2, 3), ids=()),
    )
    assert new_tokens(run) == 3 + 1 + 1 + 1
    assert new_tokens(SwarmRun()) == 0


@pytest.mark.parametrize("other", [{"a": answer((1, 3))}, {}, {"a": answer(), "b": answer()}])
def test_differing_counts_other_tokens_and_missing_requests(other):
    assert len(differing(run_of(a=answer()), run_of(**other))) == 1


def test_json_has_the_promised_shape():
    cost = HitCost(prompt_tokens=9, ttft_s={"recompute": [2.0, 4.0, 3.0], "device_hit": [0.5]})
    runs = {"stock": run_of(a=answer()), "sam": run_of(a=answer(device=2))}
    report = json.loads(json.dumps(to_json(runs, cost, ABOUT)))
    assert report["identical_outputs"] is True
    assert set(report["arms"]) == {"stock", "sam"}
    assert all(arm.keys() >= WANTED for arm in report["arms"].values())
    shown = {"prompt_tokens": 9, "recompute_s": 3.0, "device_hit_s": 0.5}
    assert report["hit_vs_recompute"] == shown


@pytest.mark.parametrize(
    "runs",
    [
        {},
        {"stock": run_of(a=answer())},
        {"stock": run_of(), "sam": run_of()},
        {"stock": run_of(a=answer()), "sam": run_of(a=answer((9,)))},
        {"stock": run_of(a=answer()), "sam": run_of()},
    ],
)
def test_outputs_are_identical_only_if_all_were_compared(runs):
    assert to_json(runs, None, ABOUT)["identical_outputs"] is False


def test_tables_show_every_arm_and_what_was_not_seen():
    runs = {"stock": run_of(a=answer()), "sam": run_of(a=answer())}
    report = to_json(runs, HitCost(9, {"recompute": [2.0], "device_hit": [0.5]}), ABOUT)
    arms, cost = text_of(arms_table(report)), text_of(cost_table(report))
    assert "stock" in arms and "sam" in arms and "yes" in arms
    assert "25 %" in cost and "not seen" in cost
    assert cost_table(to_json(runs, None, ABOUT)) is None


def test_kind_of_wants_nearly_the_whole_prompt_from_one_place():
    prompt = range(100)
    assert kind_of(answer(prompt=prompt)) == "recompute"
    assert kind_of(answer(prompt=prompt, device=99)) == "device_hit"
    assert kind_of(answer(prompt=prompt, host=99)) == "host_hit"
    assert kind_of(answer(prompt=prompt, host=50, device=49)) == ""


def test_progress_without_a_terminal_is_a_few_lines():
    console = Console(file=io.StringIO(), width=100)
    with Steps(console, "work", 50) as steps:
        for _ in range(50):
            steps.step()
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 5 and lines[-1] == "work: 50 of 50"


def test_missing_memory_disk_or_folder_is_said(monkeypatch, tmp_path):
    memory = SimpleNamespace(available=1 << 30, total=1 << 30)
    with monkeypatch.context() as patch:
        patch.setattr(quickstart.psutil, "virtual_memory", lambda: memory)
        with pytest.raises(quickstart.Unfit, match="memory"):
            quickstart.check_machine(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(quickstart.psutil, "disk_usage", lambda _: SimpleNamespace(free=1))
        with pytest.raises(quickstart.Unfit, match="--workdir"):
            quickstart.check_machine(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(quickstart.Unfit, match="not writable"):
        quickstart.check_machine(tmp_path / "file" / "below")


def test_serve_passes_options_through_and_lets_them_win(tmp_path):
    args = SimpleNamespace(host="h", port=7, model="tiny", workdir=tmp_path)
    command = server_command(args, ["--model-path", "m", "--max-total-tokens", "5"])
    assert command.count("--model-path") == 1
    last = len(command) - 1 - command[::-1].index("--max-total-tokens")
    assert command[last + 1] == "5"
    assert command[-4:] == ["--host", "h", "--port", "7"]
    assert not any(tmp_path.iterdir())


def test_curl_lines_carry_valid_json():
    for title, line in curl_lines("http://x"):
        assert title and line.startswith("curl ")
        if " -d '" in line:
            assert json.loads(line.split(" -d '")[1].removesuffix("'"))


def test_a_taken_port_is_seen():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not _is_free("127.0.0.1", taken.getsockname()[1])
