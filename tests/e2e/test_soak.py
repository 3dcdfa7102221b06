"""Two minutes of the soak (scripts/soak.sh runs half an hour)."""

import argparse

import pytest
from rich.console import Console

from sam.bench.soak import soak

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("page_size", [1, 16])
def test_two_minutes_at_full_load(tmp_path, page_size):
    args = argparse.Namespace(
        minutes=1.0, seed=page_size, clients=24, page_size=page_size, server=[],
        workdir=tmp_path,
    )  # fmt: skip
    verdict, code = soak(args, Console(stderr=True))
    report = verdict.report()
    assert code == 0 and report["good"], report
    assert report["compared_with_no_cache"] >= 40 and report["flushes"] >= 1
    assert sum(report["requests"].values()) > 500
    for action in ("evict", "demote", "prefetch"):
        assert report["actions"][f"session.{action}:done"] > 0
