"""The simulator against PyPI `kvcache-simulator`, on traces in its format.

Another code, another author: LRU, the clairvoyant bound and the ceiling must agree within
0.3 points of hit rate. scripts/test.sh installs the package; skipped where it is absent.
"""

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from sam.sim import traces
from sam.sim.runner import Experiment, Question
from sam.sim.schedule import Kind

peer_plan = pytest.importorskip("kvcache_sim.plan")
peer_policies = pytest.importorskip("kvcache_sim.policies")
peer_trace = pytest.importorskip("kvcache_sim.trace")

BLOCK = 64
WITHIN = 0.003
REPO = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SAM_SHARED", REPO.parent / "shared"))
REAL = SHARED / "traces" / "claude_code_sessions.jsonl.gz"


def random_records(seed, n=3_000):
    """Prompts that extend, branch off and repeat each other, with partial last blocks."""
    rng = random.Random(seed)
    prompts, fresh = [[1, 2, 3]], 10
    for _ in range(n):
        base = rng.choice(prompts[-40:])
        blocks = list(base[: rng.randint(1, len(base))] if rng.random() < 0.3 else base)
        for _ in range(rng.randint(1, 12)):
            blocks.append(fresh)
            fresh += 1
        if len(blocks) > 80:
            blocks = [1, 2, 3, fresh]
            fresh += 1
        prompts.append(blocks)
        length = len(blocks) * BLOCK - rng.randint(0, BLOCK - 1)
        yield {"hash_ids": blocks, "input_length": length, "block_size": BLOCK}


def real_records(n_sessions=12, concurrent=6):
    """Prompts of real sessions, interleaved as in a closed loop, as block hashes."""
    lines = gzip.open(REAL, "rt").readlines()[:n_sessions]
    trace = traces.sessions.read(((i, json.loads(x)) for i, x in enumerate(lines, 1)), "slice")
    experiment = Experiment(trace, Question(concurrent=concurrent), ["lru"], seed=0)
    steps = experiment.steps()
    next(steps)
    schedule = experiment._schedule()
    for kind, run, turn, _ in schedule.events():
        if kind == Kind.STARTED:
            path = schedule.path(run, turn)
            blocks = [f"{stream}/{i}" for stream, pages in path for i in range(pages)]
            yield {"hash_ids": blocks, "input_length": len(blocks) * BLOCK, "block_size": BLOCK}


def both(records, capacity, tmp_path):
    """(LRU, bound, ceiling) hit rates of the last half of the requests, ours and theirs."""
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    plan = peer_plan.build_execution_plan(peer_trace.parse_trace_file(file), warmup_fraction=0.5)
    theirs = [
        peer_policies.simulate_trie_policy(plan, capacity, optimal=False),
        peer_policies.simulate_trie_policy(plan, capacity, optimal=True),
        peer_policies.simulate_ceiling(plan),
    ]
    assert all(result.measurementMode == "fixed_window" for result in theirs)
    question = Question(concurrent=0, capacity_pages=capacity, warmup=0.5)
    experiment = Experiment(traces.load(str(file)), question, ["lru"], seed=0)
    for _ in experiment.steps():
        pass
    answer = experiment.answer
    ours = (answer.outcomes["lru"].hit_tokens, answer.min_tokens, answer.ceiling_tokens)
    return [n / answer.prompt_tokens for n in ours], [result.hitRate for result in theirs]


@pytest.mark.parametrize("capacity", [60, 300, 1_500])
def test_random_prompts(capacity, tmp_path):
    ours, theirs = both(random_records(capacity), capacity, tmp_path)
    assert ours == pytest.approx(theirs, abs=WITHIN)


@pytest.mark.skipif(not REAL.is_file(), reason=f"no {REAL} (set SAM_SHARED)")
def test_real_sessions(tmp_path):
    ours, theirs = both(real_records(), 3_000, tmp_path)
    assert ours[0] < ours[1] - 0.01, "a capacity at which the order does not matter tells nothing"
    assert ours == pytest.approx(theirs, abs=WITHIN)
