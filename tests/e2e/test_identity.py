"""Same tokens with sam, without it, and without any cache; stock counts where sam is off."""

from pathlib import Path

import pytest
import sglang

from sam.testing.random_swarm import make_plan, run_swarm, settled_summary
from sam.testing.server import ServerProcess
from sam.testing.unpatched import make_unpatched_site
from tests.e2e.conftest import STRICT_ENV

pytestmark = pytest.mark.e2e
SEEDS = (11, 12)


def swarms(server, *, hints, concurrency=1):
    return [
        run_swarm(server, make_plan(seed), hints=hints, concurrency=concurrency) for seed in SEEDS
    ]


def outputs(answers):
    return [{turn: answer.output_ids for turn, answer in part.items()} for part in answers]


@pytest.fixture(scope="module")
def uncached(server_args):
    """Reference: every prompt computed from scratch, alone."""
    with ServerProcess(server_args("--disable-radix-cache", hicache=False)) as server:
        return outputs(swarms(server, hints=False))


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory):
    site = make_unpatched_site(tmp_path_factory.mktemp("unpatched"))
    assert not (site / "sglang/srt/managers/kv_hint_ingress.py").exists()
    assert (Path(sglang.__file__).parent / "srt/managers/kv_hint_ingress.py").exists()
    return site


@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_sam_under_pressure_gives_the_tokens_of_no_cache(server_args, uncached, page_size):
    args = server_args(
        "--radix-cache-backend", "sam", "--page-size", str(page_size), total_tokens=3_072
    )
    with ServerProcess(args, env=STRICT_ENV) as server:
        answers = swarms(server, hints=True, concurrency=3)
        summary = settled_summary(server)
    assert outputs(answers) == uncached
    hits = [answer.cached for part in answers for answer in part.values()]
    assert sum(hit.get("device", 0) for hit in hits) > 0
    assert sum(hit.get("host", 0) for hit in hits) > 0
    assert summary["errors"] == 0
    moved = summary["actions"]
    assert any(kind.startswith("session.evict:") for kind in moved)
    assert any(kind.startswith("session.demote:") for kind in moved)


def test_shortest_first_serves_prompts_in_chunks(server_args, uncached):
    """SGLang's own shortest-prefill-first runs out of memory with such prompts."""
    args = server_args(
        *("--radix-cache-backend", "sam", "--sam-admission", "shortest"),
        *("--chunked-prefill-size", "256"),
        total_tokens=3_072,
    )
    with ServerProcess(args, env=STRICT_ENV) as server:
        answers = swarms(server, hints=True, concurrency=6)
        assert settled_summary(server)["errors"] == 0
    assert max(answer.prompt_tokens for part in answers for answer in part.values()) > 2 * 256
    assert outputs(answers) == uncached


def test_without_the_backend_a_patched_server_is_the_stock_server(server_args, uncached, unpatched):
    args = server_args(total_tokens=3_072)
    with ServerProcess(args) as server:
        patched = swarms(server, hints=False)
        hinted = swarms(server, hints=False)
        assert "RustUnifiedTreeCore" in server.log_text()
        with pytest.raises(OSError):
            server.request("/sessions")
    with ServerProcess(args, env={"PYTHONPATH": str(unpatched)}) as server:
        stock = swarms(server, hints=False)
        assert swarms(server, hints=False) == hinted
    assert patched == stock
    assert outputs(patched) == uncached
