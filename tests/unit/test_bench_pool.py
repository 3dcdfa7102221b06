"""The report of `sam.bench pool`: complete, cut short, and what is wrong with the options."""

import io

import pytest
from rich.console import Console

from sam.bench.pool_report import build_report, print_report

ABOUT = {"machine": "m", "seed": 3}


def arm(peak=None, back=()):
    found = {"about": "an arm", "ttft_s": {}, "tokens": {}}
    for way, rows in dict(back).items():
        found["ttft_s"][way] = [seconds for seconds, _ in rows]
        found["tokens"][way] = [tokens for _, tokens in rows]
    if peak is not None:
        sizes = {"peak_pool_bytes": peak, "pool_bytes_after": peak // 2}
        found["swarm"] = {"requests": 5, "wall_s": 1.5, **sizes}
    return found


def shown(report):
    out = Console(file=io.StringIO(), width=140)
    print_report(report, out)
    return out.file.getvalue()


def test_both_arms():
    rows = [(0.3, (100, 0, 0, 96)), (0.1, (100, 16, 0, 80)), (0.2, (100, 0, 0, 96))]
    report = build_report({"stock": arm(200 << 20), "sam": arm(150 << 20, {"back": rows})}, ABOUT)
    assert report["peak_pool_bytes_change"] == -0.25
    back = report["arms"]["sam"]["back"]["back"]
    assert (back["n"], back["ttft_p50_s"], back["ttft_max_s"]) == (3, 0.2, 0.3)
    assert (back["prompt_tokens"], back["device_tokens"], back["storage_tokens"]) == (100, 0, 96)
    text = shown(report)
    assert "-25.0%" in text and "200.0" in text and "0.200" in text


@pytest.mark.parametrize("found", [{}, {"stock": arm()}, {"stock": arm(1 << 20)}])
def test_an_interrupted_run_shows_what_it_has(found):
    report = build_report(found, ABOUT)
    assert report["peak_pool_bytes_change"] is None
    assert "seed 3" in shown(report)


@pytest.mark.parametrize("option", [["--users", "0"], ["--l1", "-1"], ["--model", "huge"]])
def test_wrong_options(option, capsys):
    pytest.importorskip("sglang")
    from sam.bench.pool import main

    with pytest.raises(SystemExit) as ended:
        main(option)
    assert ended.value.code == 2 and option[0] in capsys.readouterr().err
