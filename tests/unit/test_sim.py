"""`python -m sam.sim`: its command line, its conservation laws, its schedules."""

import gzip
import json
import os
from pathlib import Path

import pytest

from sam.sim import policies, traces
from sam.sim.__main__ import main
from sam.sim.costs import Costs
from sam.sim.loop import AT_ONCE, FCFS, INSTANT, LPM, AllFound, ClosedLoop, LoopParams
from sam.sim.runner import Experiment, Question
from sam.sim.schedule import Kind
from sam.sim.trace import TraceError

REPO = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SAM_SHARED", REPO.parent / "shared"))
REAL = SHARED / "traces" / "claude_code_sessions.jsonl.gz"
needs_real = pytest.mark.skipif(not REAL.is_file(), reason=f"no {REAL} (set SAM_SHARED)")
KEYS = {
    "hit_rate",
    "lru_hit_rate",
    "min_hit_rate",
    "min_nb_hit_rate",
    "gap_closed",
    "recompute_vs_lru",
}
STEADY = "synthetic:steady:40"


def run(capsys, *args):
    code = main([*args, "--quiet"])
    return code, capsys.readouterr()


def result(capsys, *args):
    code, out = run(capsys, *args, "--json")
    assert code == 0
    return json.loads(out.out)


def answer_of(trace, question, names=("next-use",), seed=0):
    experiment = Experiment(trace, question, names, seed=seed)
    for _ in experiment.steps():
        pass
    return experiment.answer


def session_line(sid="s", **over):
    turns = [
        {"in": 640, "keep": 0, "out": 10, "think": 0, "api": 1, "stop": "tool_use", "t": 0},
        {"in": 1280, "keep": 640, "out": 10, "think": 5, "api": 1, "stop": "end_turn", "t": 6},
    ]
    return json.dumps({"sid": sid, "shared_prefix": 128, "turns": turns} | over)


# -- command line -----------------------------------------------------------------------


def test_json_of_one_policy_is_one_flat_object(capsys):
    got = result(capsys, "--trace", STEADY, "--capacity", "0.3", "--sessions", "8")
    assert KEYS <= set(got)
    assert got["policy"] == "next-use" and got["sessions"] == 8 and got["partial"] is False
    assert got["lru_hit_rate"] < got["hit_rate"] < got["min_nb_hit_rate"]
    assert got["min_nb_hit_rate"] <= got["min_hit_rate"] <= got["ceiling_hit_rate"]
    gap = got["min_nb_hit_rate"] - got["lru_hit_rate"]
    assert got["gap_closed"] == pytest.approx((got["hit_rate"] - got["lru_hit_rate"]) / gap)
    lost = (1 - got["hit_rate"]) / (1 - got["lru_hit_rate"])
    assert got["recompute_vs_lru"] == pytest.approx(lost)


def test_same_seed_same_answer_other_seed_another(capsys):
    args = ("--trace", STEADY, "--policy", "next-use-hints", "--capacity", "0.3")
    first = result(capsys, *args, "--seeds", "2")
    assert result(capsys, *args, "--seeds", "2") == first
    rates = [seed["hit_rate"] for seed in first["per_seed"]]
    assert len(rates) == 2 and rates[0] != rates[1]
    assert result(capsys, *args)["hit_rate"] == rates[0]


def test_several_of_everything(capsys):
    args = ("--policy", "lru,session-ref", "--capacity", "0.2,0.4", "--sessions", "4,8")
    got = result(capsys, "--trace", STEADY, "--no-times", *args)["results"]
    assert len(got) == 8
    assert all(r["gap_closed"] == 0 and r["ttft"] is None for r in got if r["policy"] == "lru")
    code, out = run(capsys, "--trace", STEADY, "--no-times", *args)
    assert code == 0 and len(out.out.split("\n\n")[0].splitlines()) == 9


@pytest.mark.parametrize("policy", policies.names())
def test_every_policy_runs_with_tiers(capsys, policy):
    args = ("--trace", STEADY, "--policy", policy, "--capacity", "0.1")
    got = result(capsys, *args, "--host", "2", "--pool", "6")
    parts = [got[f"{tier}_hit_rate"] for tier in ("device", "host", "pool")]
    assert sum(parts) == pytest.approx(got["hit_rate"]) and min(parts) > 0
    assert got["hit_rate"] <= got["min_nb_hit_rate"] + 1e-9
    assert got["ttft"]["p50_s"] <= got["ttft"]["p95_s"] <= got["ttft"]["p99_s"]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--policy", "magic"], "choose from"),
        (["--capacity", "-1"], "is not in"),
        (["--capacity", "half"], "no list of numbers"),
        (["--seeds", "0"], "is not in"),
        (["--hint-share", "0.1,0.2"], "one number"),
    ],
)
def test_wrong_values_are_named(capsys, args, word):
    with pytest.raises(SystemExit) as stopped:
        main(["--trace", STEADY, *args])
    assert stopped.value.code == 2 and word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("none.jsonl", None, "No such file"),
        ("empty.jsonl", b"", "empty"),
        ("broken.jsonl", b'{"turns": [', "line 1"),
        ("other.jsonl", b'{"a": 1}\n', "no known trace format"),
        ("type.jsonl", b'{"turns": [{"in": "many"}]}\n', "line 1"),
        ("minus.jsonl", b'{"turns": [{"in": -1}]}\n', "impossible"),
        ("zero.jsonl", b'{"turns": [{"in": 0}]}\n', "no session with a request"),
        ("cut.jsonl.gz", gzip.compress(session_line().encode() * 99)[:60], "cannot be read"),
        ("plain.jsonl.gz", session_line().encode(), "cannot be read"),
        ("bare.jsonl", b'{"sid": "x", "turns": [{"in": 5}]}\n[]\n', "line 2"),
    ],
)
def test_bad_files_are_named(capsys, tmp_path, name, content, word):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    code, out = run(capsys, "--trace", str(file))
    assert code == 2 and word in out.err and name in out.err


def test_interrupt_reports_what_is_complete(capsys, monkeypatch):
    def stop_at_second_seed(self):
        if self.seed == 1:
            raise KeyboardInterrupt
        yield from steps(self)

    steps = Experiment.steps
    monkeypatch.setattr(Experiment, "steps", stop_at_second_seed)
    code, out = run(capsys, "--trace", STEADY, "--seeds", "3", "--json")
    got = json.loads(out.out)
    assert code == 130 and got["partial"] is True and got["seeds"] == [0]


# -- conservation -----------------------------------------------------------------------


@pytest.mark.parametrize("order", [INSTANT, AT_ONCE, FCFS, LPM])
def test_every_prompt_token_is_found_or_computed(order):
    trace = traces.load(STEADY)
    answer = answer_of(trace, Question(capacity=0.3, concurrent=40, order=order))
    assert answer.n_sessions == 40 and answer.n_requests == trace.n_requests
    assert answer.prompt_tokens == sum(turn.input_tokens for turn in trace.turns())
    assert answer.prompt_tokens - answer.ceiling_tokens == sum(
        max(turn.input_tokens for turn in session.turns) for session in trace.sessions
    )
    for outcome in answer.outcomes.values():
        assert outcome.hit_tokens <= answer.min_nb_tokens <= answer.min_tokens
        assert len(outcome.ttft_s) == trace.n_requests


def test_what_fits_is_computed_once():
    answer = answer_of(traces.load(STEADY), Question(capacity=1_000.0, concurrent=8))
    limits = {answer.min_tokens, answer.min_nb_tokens, answer.ceiling_tokens}
    assert limits == {outcome.hit_tokens for outcome in answer.outcomes.values()}


def test_schedule_always_has_as_many_sessions_as_asked_for():
    loop = ClosedLoop(traces.load(STEADY), LoopParams(8, None, Costs()), seed=3)
    schedule, live, started = loop.run(AllFound(loop)), 0, []
    for kind, run_, turn, _ in schedule.events():
        if kind == Kind.ARRIVED and turn == 0:
            live += 1
        if kind == Kind.ANSWERED and turn + 1 == len(schedule.sessions[run_].turns):
            live -= 1
        started.append(live)
    assert max(started) == 8 and started[-1] == 7
    full = started.index(8)
    assert min(started[full:-1]) >= 7


def test_running_requests_never_exceed_the_device_tier():
    trace = traces.load(STEADY)
    loop = ClosedLoop(trace, LoopParams(16, 2_000, Costs()), seed=0)
    schedule, running, most = loop.run(AllFound(loop)), {}, 0
    for kind, run_, turn, _ in schedule.events():
        if kind == Kind.STARTED:
            running[run_] = schedule.sessions[run_].turns[turn].pages
            most = max(most, sum(running.values()))
        elif kind == Kind.ANSWERED:
            del running[run_]
    assert 1_500 < most <= 2_000


def test_hints_are_the_same_for_every_policy_and_a_share_of_sessions_sends_them():
    from sam.sim.replay import Hints

    hints = Hints(sigma=0.5, share=0.5)
    sent = [hints.for_answer(0, run_, 0, 60.0) for run_ in range(400)]
    assert sent == [hints.for_answer(0, run_, 0, 60.0) for run_ in range(400)]
    given = sorted(hint for hint in sent if hint is not None)
    assert 150 < len(given) < 250
    assert 50 < given[len(given) // 2] < 72
    assert Hints(sigma=0.0).for_answer(1, 2, 3, 60.0) == 60.0


# -- the project's format ---------------------------------------------------------------


def test_sessions_with_one_prefix_share_it(tmp_path):
    file = tmp_path / "two.jsonl"
    other = session_line("b", shared_prefix=192)
    file.write_text("\n".join([session_line("a"), session_line("c"), other]) + "\n")
    a, c, b = traces.load(str(file)).sessions
    shared = a.turns[0].path[0][0]
    assert a.turns[0].path == ((shared, 2), (0, 8)) == c.turns[0].path
    assert b.turns[0].path[0] != a.turns[0].path[0]
    assert a.turns[1].path == ((shared, 2), (0, 18))
    assert [turn.label for turn in a.turns] == ["tool", "human"]
    assert [turn.says_end for turn in a.turns] == [False, True]


def test_a_prompt_that_keeps_less_is_a_new_branch(tmp_path):
    turns = [{"in": 640}, {"in": 640, "keep": 320}, {"in": 640, "keep": 640}, {"in": 64}]
    file = tmp_path / "cut.jsonl"
    file.write_text(json.dumps({"sid": "x", "turns": turns}))
    (session,) = traces.load(str(file)).sessions
    paths = [turn.path for turn in session.turns]
    assert paths == [((0, 10),), ((0, 5), (1, 5)), ((0, 5), (1, 5)), ((2, 1),)]


def test_sub_agents_run_beside_their_parent(tmp_path):
    sub = {"agent": "a1", "t": 3.0, "turns": [{"in": 128, "out": 1}]}
    turns = [{"in": 640, "api": 1, "t": 0}, {"in": 704, "keep": 640, "think": 9, "t": 10}]
    turns[1]["sub_before"] = [sub]
    file = tmp_path / "sub.jsonl"
    file.write_text(json.dumps({"sid": "x", "turns": turns}))
    trace = traces.load(str(file))
    assert trace.sessions[0].turns[1].subs[0][0] == 2.0
    answer = answer_of(trace, Question(concurrent=1))
    assert answer.n_sessions == 2 and answer.n_requests == 3


def test_a_bad_trace_raises_trace_error():
    for spec in ("nothing", "steady:0", "steady:x"):
        with pytest.raises(TraceError, match="choose from"):
            traces.load(f"synthetic:{spec}")


# -- what is known of real traces (the project's policy notes) ------------------------------


@needs_real
def test_findings_on_a_slice_of_real_sessions(capsys, tmp_path):
    file = tmp_path / "slice.jsonl"
    with gzip.open(REAL, "rt") as lines:
        file.write_text("".join(line for line, _ in zip(lines, range(90), strict=False)))
    names = "next-use,next-use-hints,next-use-guard,session-ref"
    got = result(capsys, "--trace", str(file), "--policy", names, "--capacity", "0.5",
                 "--no-times")["results"]  # fmt: skip
    plain, hinted, guarded, refs = got
    assert 0.2 < plain["gap_closed"] < hinted["gap_closed"]
    assert refs["gap_closed"] < plain["gap_closed"]
    assert guarded["notes"]["guard_switches"] == 0
    assert guarded["hit_rate"] == plain["hit_rate"]


@pytest.mark.parametrize("name", ["alternating", "false-ends", "swapped-labels"])
def test_hard_inputs_cost_little_with_the_guard(capsys, name):
    got = result(capsys, "--trace", f"synthetic:{name}:120", "--policy", "next-use-guard",
                 "--capacity", "0.3", "--no-times")  # fmt: skip
    assert got["recompute_vs_lru"] < 1.05


# -- costs, orders, lies ----------------------------------------------------------------


def test_costs_from_a_file(tmp_path, capsys):
    path = tmp_path / "costs.json"
    slow = {"prefill_tokens_per_s": 100.0, "decode_tokens_per_s": 5.0}
    path.write_text(json.dumps({"costs": slow, "machine": "a desk"}))
    args = ("--trace", STEADY, "--capacity", "0.3", "--sessions", "4")
    by_file = result(capsys, *args, "--costs", str(path))
    by_flags = result(capsys, *args, "--prefill-rate", "100", "--decode-rate", "5")
    assert by_file == by_flags
    over = result(capsys, *args, "--costs", str(path), "--prefill-rate", "200")
    assert over["ttft"]["mean_s"] < by_file["ttft"]["mean_s"]


@pytest.mark.parametrize("text", ["{", "{}", '{"costs": {"prefill_tokens_per_s": 0}}', None])
def test_costs_that_are_none(tmp_path, capsys, text):
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    code, out = run(capsys, "--trace", STEADY, "--costs", str(path))
    assert code == 2 and str(path) in out.err


def test_an_instant_request_lets_its_recorded_time_pass(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(session_line())
    loop = ClosedLoop(traces.load(str(path)), LoopParams(1, None, Costs(), INSTANT), seed=0)
    schedule = loop.run(AllFound(loop))
    events = list(schedule.events())
    assert [kind for kind, *_ in events] == [Kind.ARRIVED, Kind.STARTED, Kind.ANSWERED] * 2
    starts = [time_s for kind, _, _, time_s in events if kind == Kind.STARTED]
    assert starts[1] - starts[0] == pytest.approx(1 + 5)  # the call, then the client's time
    assert schedule.idle_s(0, 0) == pytest.approx(6) and schedule.idle_s(0, 1) is None


def test_a_failed_call_gives_its_seconds_to_the_next_turn(tmp_path):
    turns = json.loads(session_line())["turns"]
    failed = {"in": 0, "keep": 0, "out": 3, "think": 7, "api": 2, "stop": ""}
    path = tmp_path / "t.jsonl"
    path.write_text(session_line(turns=[turns[0], failed, turns[1], failed]))
    (session,) = traces.load(str(path)).sessions
    assert [turn.think_s for turn in session.turns] == [0, 7 + 2 + 5]
    assert [turn.says_end for turn in session.turns] == [False, True]


@pytest.mark.parametrize("name", ["alternating", "false-ends", "swapped-labels", "lying-hints"])
def test_hard_inputs_cost_little(name):
    question = Question(capacity=0.3, concurrent=16)
    answer = answer_of(traces.load(f"synthetic:{name}:100"), question, ["next-use-guard"])
    lost = answer.prompt_tokens - answer.outcomes["next-use-guard"].hit_tokens
    assert lost <= 1.05 * (answer.prompt_tokens - answer.outcomes["lru"].hit_tokens)
