"""The simulated server: its clock, its scheduler by hand, and a whole plan played on it."""

import asyncio
import json
from pathlib import Path

import pytest

from sam.bench.costs import rates
from sam.bench.predict import cli
from sam.bench.predict.engine import Engine, EngineParams
from sam.bench.predict.virtual import Stuck, run
from sam.bench.predict.wire import Renderer
from sam.bench.replay import cli as replay
from sam.bench.replay.arms import ARMS
from sam.bench.replay.comparison import spec_of
from sam.bench.replay.state import State
from sam.bench.workloads import build
from sam.sim import policies
from sam.sim.costs import SHIPPED, Costs
from sam.sim.policy import Setup
from sam.testing.tiny_model import PRESETS

REPO = Path(__file__).resolve().parents[2]
COSTS = Costs(
    prefill_tokens_per_s=100.0,
    decode_tokens_per_s=10.0,
    load_back_tokens_per_s=1_000.0,
    pool_tokens_per_s=1_000.0,
)
A, B = list(range(100)), list(range(1_000, 1_100))


def served(*tasks, device=1_000, host=2_000, policy="lru", order="fcfs", running=16, chunk=2_048):
    """Results of coroutine functions that get the engine, all started at second 0."""
    found = []

    async def main():
        made = policies.create(policy, Setup(tiers_pages=(device, host)))
        engine = Engine(EngineParams(device, 1, running, chunk, order, COSTS), made)
        loop = asyncio.create_task(engine.run())
        found.extend(await asyncio.gather(*(task(engine) for task in tasks)))
        loop.cancel()

    run(main())
    return found


def asks(*prompts, answer=(7, 8), session=None):
    """One request after the other."""

    async def task(engine):
        return [await engine.ask(session, p, list(answer), label="other") for p in prompts]

    return task


# -- clock ------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_sleeping_takes_no_time():
    assert run(asyncio.sleep(100_000.0)) == pytest.approx(100_000.0)


def test_a_deadlock_is_an_error():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        run(main())


# -- scheduler --------------------------------------------------------------------------


def test_times_and_finds_by_hand():
    ((first, second),) = served(asks(A, [*A, 7, 9, 9]))
    assert first.ttft_s == pytest.approx(1.0) and first.total_s == pytest.approx(1.1)
    assert (first.device_tokens, first.host_tokens) == (0, 0)
    assert second.device_tokens == 101  # the prompt and the answer but for its last token
    assert second.ttft_s == pytest.approx(0.02)


def test_requests_of_one_batch_do_not_find_each_other():
    (a,), (b,) = served(asks(A), asks(A))
    assert a.device_tokens == b.device_tokens == 0 and a.ttft_s == pytest.approx(2.0)


def test_a_full_chunk_ends_a_batch():
    (a,), (b,) = served(asks(A), asks(A), chunk=100)
    assert a.device_tokens == 0 and b.device_tokens == 99  # the last token is always computed
    assert a.ttft_s == pytest.approx(1.0) and b.ttft_s == pytest.approx(1.01)


def test_what_left_the_device_comes_from_the_host():
    ((_, _, back),) = served(asks(A, B, A), device=150)
    assert 0 < back.device_tokens < 99 and back.device_tokens + back.host_tokens == 99
    seconds = 0.01 + back.host_tokens / 1_000.0
    assert back.ttft_s == pytest.approx(seconds)


def test_nothing_is_found_where_nothing_fits():
    ((_, _, back),) = served(asks(A, B, A), device=101, host=101)
    assert back.device_tokens + back.host_tokens <= 1


def test_running_requests_hold_the_device():
    (a,), (b,) = served(asks(A), asks(B), device=150)
    assert a.total_s == pytest.approx(1.1)
    assert b.ttft_s == pytest.approx(2.1)  # waited for the whole answer of the other


@pytest.mark.parametrize("order", ["fcfs", "lpm", "shortest-prefill-first", "sam-shortest"])
def test_order_of_service(order):
    C = list(range(5_000, 5_100))

    async def late(engine):
        await asyncio.sleep(1.2)  # B runs; C came first, A is in the cache
        return [await engine.ask(None, [*A, 1], [7, 8], label="other")]

    async def second(engine):
        await asyncio.sleep(1.15)
        return [await engine.ask(None, B, [7, 8], label="other")]

    async def third(engine):
        await asyncio.sleep(1.18)
        return [await engine.ask(None, C, [7, 8], label="other")]

    _, _, _, (hit,) = served(asks(A), second, third, late, order=order, running=1)
    waited_s = 1.15 + 1.1 - 1.2 + (1.1 if order == "fcfs" else 0.0)
    assert hit.device_tokens == 100 and hit.ttft_s == pytest.approx(waited_s + 0.01)


def test_shortest_first_with_credit_for_the_wait():
    """100 tokens that wait meet ever new ones of 20: only their credit brings them on."""
    aged = _turn_of_the_long_one("sam-shortest", n_short=400)
    assert 200 <= aged <= 300, "100 tokens are worth 5,000 computed ones, 250 of the others"
    assert _turn_of_the_long_one("shortest-prefill-first", n_short=400) == 400


def _turn_of_the_long_one(order, *, n_short):
    """How many of the short ones were answered before it."""
    ends = []

    async def ask(engine, start_s, ids):
        await asyncio.sleep(start_s)
        await engine.ask(None, ids, [7], label="other")
        ends.append(len(ids))

    def short(i):
        ids = list(range(10_000 + 20 * i, 10_020 + 20 * i))
        return lambda engine: ask(engine, 0.19 * i, ids)

    served(*map(short, range(n_short)), lambda engine: ask(engine, 0.01, A), order=order, running=1)
    return ends.index(len(A))


def test_sessions_are_told_to_the_policy():
    (found,) = served(asks(A, [*A, 7, 9], session="s"), policy="next-use")
    assert [one.device_tokens for one in found] == [0, 101]


# -- a whole plan -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    args = replay.parse(["--quick", "--workdir", str(tmp_path_factory.mktemp("predict"))])
    return cli.Predictor(args, None)


@pytest.mark.parametrize("name", ["stock-lpm", "stock-session", "sam-idle"])
def test_a_plan_is_played_to_its_end(predictor, name):
    rows = predictor.rows(ARMS[name], 0)
    plan = build(predictor.args.workload, spec_of(predictor.args, 0), predictor.words)
    assert len(rows) == plan.n_requests()
    for row in rows:
        assert 0 <= row["device"] + row["host"] < row["prompt"]
        assert 0 < row["ttft_s"] <= row["total_s"]
    assert cli.rates_of(rows)["hit_rate"] > 0.3
    assert rows == predictor.rows(ARMS[name], 0)


def test_comparison_with_a_run(predictor, tmp_path):
    state = State(tmp_path, {})
    rows = predictor.rows(ARMS["stock"], 0)
    halved = [{**row, "device": 0, "host": row["host"]} for row in rows]
    state.add({"seed": 0, "arm": "stock", "rows": halved})
    args = replay.parse(["--quick", "--arms", "stock", "stock-tlru", "--workdir", str(tmp_path)])
    predictor.args, kept = args, predictor.args
    found = cli.compare(predictor, state)
    predictor.args = kept
    assert [(one["arm"], one["seed"]) for one in found] == [("stock", seed) for seed in args.seeds]
    assert found[1]["live"] is None and found[1]["points"] is None
    expected = 100 * sum(row["device"] for row in rows) / sum(row["prompt"] for row in rows)
    assert found[0]["points"] == pytest.approx(expected)
    assert json.dumps(found)


def test_tools_and_calls_are_rendered(predictor):
    renderer: Renderer = predictor.renderer
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "go"}]
    short = renderer.prompt({"messages": messages, "tools": [tool]})
    assert len(short) > len(renderer.prompt({"messages": messages}))
    reply = {"role": "assistant", "content": "yes", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    grown = renderer.prompt({"messages": [*messages, reply, result], "tools": [tool]})
    answer = renderer.answer("yes")
    assert grown[: len(short) + len(answer)] == [*short, *answer]


# -- costs ------------------------------------------------------------------------------


def test_rates_by_hand():
    seconds = {"cold": 1.1, "device": 0.1, "host": 0.2, "storage": 0.09}
    found, bounds = rates(seconds, 0.1 + 64 / 40)
    assert found.prefill_tokens_per_s == pytest.approx(2048.0)
    assert found.decode_tokens_per_s == pytest.approx(40.0)
    assert found.request_s == pytest.approx(0.1)
    assert found.load_back_tokens_per_s == pytest.approx(20_480.0)
    assert bounds == ("storage",)  # faster than a device hit: below what can be told
    assert found.pool_tokens_per_s == pytest.approx(2048 / 0.005)


# -- what once went wrong -----------------------------------------------------------------


def test_a_prompt_takes_its_host_room_when_it_is_computed():
    """A session that has been queued again by then is not taken for an idle one."""

    found = []

    async def task(engine):
        host = engine.policy.tiers[1]
        await engine.ask("a", A, [7, 8], label="other")
        b = asyncio.create_task(engine.ask("b", B, [7, 8], label="other"))
        await asyncio.sleep(0.5)
        found.append(host.used_pages)  # half of B is computed: A and its answer alone
        await b
        found.append(host.used_pages)

    served(task, device=150, host=300, policy="next-use")
    assert found == [101, 202]


def test_a_request_costs_time_beside_its_tokens():
    costs = Costs(prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0, request_s=0.5)
    found = []

    async def main():
        made = policies.create("lru", Setup(tiers_pages=(1_000, 2_000)))
        engine = Engine(EngineParams(1_000, 1, 16, 2_048, "fcfs", costs), made)
        loop = asyncio.create_task(engine.run())
        asked = (engine.ask(None, prompt, [7, 8], label="other") for prompt in (A, B))
        found.extend(await asyncio.gather(*asked))
        loop.cancel()

    run(main())
    assert [one.ttft_s for one in found] == pytest.approx([2.5, 2.5])  # it passes for both at once


def test_sizes_and_rates_are_those_of_the_replay(tmp_path, predictor):
    assert predictor.costs == SHIPPED["tiny"].costs  # --quick is on that model
    assert set(SHIPPED) == set(PRESETS)
    args = replay.parse(
        ["--quick", "--workdir", str(tmp_path), "--server-arg=--chunked-prefill-size=128"]
    )
    kept, predictor.args = predictor.args, args
    small = predictor.rows(ARMS["stock"], 0)
    predictor.args = kept
    assert small != predictor.rows(ARMS["stock"], 0), "smaller batches, other finds"
