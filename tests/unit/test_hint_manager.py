"""HintManager's bookkeeping on a cache that has nothing in it: outcomes, bounds, time.

What it does to the tree is tested on the real cache (`tests/contract/test_cache_*`).
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from sam.config import SamConfig
from sam.core.sessions import SessionKey, SessionState
from sam.srt.managers.bindings import PARALLEL_ACTION, binding_of
from sam.srt.managers.hint_manager import HintManager
from sam.srt.mem_cache.ownership import OwnershipTags


class EmptyCache:
    """No tree, no tiers: every task is over at once."""

    def __init__(self):
        self.times = []
        self.tree_core = SimpleNamespace(tags=OwnershipTags(), tell_time=self.times.append)
        self.ongoing_write_through, self.ongoing_load_back = {}, {}
        self.sent = []
        self.reasons = []

    def has_host_tier(self):
        return True

    @contextmanager
    def one_free(self):
        yield

    def hint_failed(self, error):
        raise error

    def retainable_tokens(self):
        return 100

    def prefetch_budget_tokens(self):
        return 0

    def send_results(self, envelope_id, results, route):
        self.sent.append((envelope_id, [(r.action_id, str(r.status)) for r in results]))
        self.reasons += [r.reason for r in results if r.reason]


@pytest.fixture
def manager():
    return HintManager(EmptyCache(), SamConfig(max_pending_actions=6, max_remembered_actions=10))


def envelope(*actions, message_id="m", time_s=100.0):
    """`actions`: (kind, session_id[, extra payload])."""
    out = []
    for i, (kind, session_id, *extra) in enumerate(actions):
        payload = {"session_id": session_id, "tenant": "t", "time_s": time_s}
        payload |= extra[0] if extra else {}
        action_type = kind if "." in kind else f"session.{kind}"
        out.append(
            SimpleNamespace(
                action_id=f"a{i}", action_type=action_type, action_version="0.1", payload=payload
            )
        )
    return SimpleNamespace(message_id=message_id, actions=out)


def request(rid, hints, max_new_tokens=8):
    return SimpleNamespace(
        rid=rid,
        kv_hints=hints,
        http_worker_ipc=None,
        sampling_params=SimpleNamespace(max_new_tokens=max_new_tokens),
    )


def state(manager, session_id):
    return manager.table.get(SessionKey("t", session_id)).state


def statuses(results):
    return [(str(r.status), r.reason) for r in results]


def test_binding_of_reads_hints_and_ignores_what_it_does_not_know():
    assert binding_of(request("r", None)) is None
    assert binding_of(request("r", envelope())) is None
    unknown = binding_of(request("r", envelope(("vendor.other", "s"))))
    assert unknown.key is None and statuses(unknown.rejections) == [("rejected", "unknown_action")]
    assert binding_of(request("r", envelope(*[("bind", "s")] * 100))) is None
    binding = binding_of(request("r", envelope(("bind", "s"), ("evict", ""), ("evict", "s"))))
    assert binding.key == SessionKey("t", "s") and len(binding.edits) == 1
    assert statuses(binding.rejections) == [("rejected", "bad_session_id")]


def test_a_request_has_one_session_and_its_other_binds_an_answer(manager):
    again = {"parent_session_id": "t"}
    hints = envelope(("bind", "s"), ("bind", "s"), ("bind", "t"), ("bind", "s", again))
    manager.request_queued(request("r", hints))
    manager.request_released("r", finish_reason="stop", aborted=False)
    ((_, sent),) = manager._cache.sent
    assert sorted(sent) == [
        ("a0", "done"), ("a1", "done"), ("a2", "rejected"), ("a3", "rejected"),
    ]  # fmt: skip
    assert manager._cache.reasons == ["bound_already"] * 2
    assert manager.table.get(SessionKey("t", "t")) is None


def test_a_warm_up_of_parallel_samples_carries_no_edits():
    hints = envelope(("bind", "s"), ("evict", "s"), (PARALLEL_ACTION, "s"))
    assert not binding_of(request("r", hints, max_new_tokens=0)).edits
    assert len(binding_of(request("r", hints)).edits) == 1
    without_mark = envelope(("bind", "s"), ("evict", "s"))
    assert len(binding_of(request("r", without_mark, max_new_tokens=0)).edits) == 1


def test_every_action_gets_an_answer_in_order(manager):
    results = manager.apply(
        envelope(
            ("bind", "s"),
            ("vendor.other", "s"),
            ("evict", "s", {"target": "messages"}),
            ("retain", "s"),
            ("evict", ""),
            ("demote", "s"),
            ("prefetch", "nobody"),
        ),
        None,
    )
    assert statuses(results) == [
        ("done", ""),
        ("rejected", "unknown_action"),
        ("rejected", "unsupported_target"),
        ("done", ""),
        ("rejected", "bad_session_id"),
        ("done", ""),
        ("missing", "unknown_session"),
    ]
    assert statuses(manager.apply(SimpleNamespace(message_id="x", actions=None), None)) == [
        ("rejected", "bad_envelope")
    ]


def test_shared_sessions_are_refused(manager):
    manager.request_queued(request("r", envelope(("bind", "default_session"))))
    assert manager.branch_ref("r") is None
    manager.request_released("r", finish_reason="stop", aborted=False)
    for kind in ("evict", "demote", "prefetch"):
        result = manager.apply(envelope((kind, "default_session"), message_id=kind), None)
        assert statuses(result) == [("rejected", "shared_session")]


def test_tool_calls_of_the_finish_reason_are_passed_on(manager):
    manager.request_queued(request("r", envelope(("bind", "s"))))
    manager.request_released("r", finish_reason="tool_calls", aborted=False)
    assert manager.table.get(SessionKey("t", "s")).waiting_tool


def test_edits_run_after_the_last_request_of_their_message(manager):
    hints = envelope(("bind", "s"), ("evict", "s"))
    for rid in ("r0", "r1"):
        manager.request_queued(request(rid, hints))
    manager.request_released("r0", finish_reason="stop", aborted=False)
    assert state(manager, "s") is SessionState.RUNNING and not manager._cache.sent
    manager.request_released("r1", finish_reason=None, aborted=True)
    assert state(manager, "s") is SessionState.ENDED
    assert manager._cache.sent == [("m", [("a0", "done"), ("a1", "done")])]
    manager.request_released("r1", finish_reason="stop", aborted=False)
    assert len(manager._cache.sent) == 1


def test_a_bind_is_reported_with_what_was_refused_of_it(manager):
    manager.request_queued(request("up", envelope(("bind", "s", {"parent_session_id": "t"}))))
    for rid, session_id in (("r0", "default_session"), ("r1", "t")):
        payload = {"parent_session_id": "s"}
        hints = envelope(("bind", session_id, payload), message_id=rid)
        manager.request_queued(request(rid, hints))
        manager.request_released(rid, finish_reason="stop", aborted=False)
    assert [message_id for message_id, _ in manager._cache.sent] == ["r0", "r1"]
    assert manager._cache.reasons == ["shared_session", "cycle_refused"]


def test_a_summary_says_what_is_known_last(manager):
    """The evict drops the offload that waits for the running session."""
    manager.request_queued(request("r", envelope(("bind", "s"))))
    results = manager.apply(
        envelope(("demote", "s"), ("evict", "s"), message_id="x"), SimpleNamespace()
    )
    assert statuses(results) == [("dropped", "ended"), ("deferred", "in_use")]
    assert manager._cache.sent == [("x", [("a0", "dropped")])]


def test_idempotent_per_tenant_message_and_action(manager):
    manager.apply(envelope(("bind", "s")), None)
    first = manager.apply(envelope(("evict", "s"), message_id="x"), None)
    manager.apply(envelope(("bind", "s"), message_id="y"), None)
    assert manager.apply(envelope(("evict", "s"), message_id="x"), None) == first
    assert state(manager, "s") is SessionState.IDLE
    assert statuses(manager.apply(envelope(("evict", "s"), message_id="z"), None)) == [("done", "")]


def test_a_repeated_offload_holds_one_place_and_the_last_one_counts(manager):
    manager.request_queued(request("r", envelope(("bind", "s"))))
    for i in range(20):
        found = manager.apply(
            envelope(("demote", "s"), message_id=f"w{i}", time_s=100.0 + i), SimpleNamespace()
        )
        assert statuses(found) == [("deferred", "running")] and manager.n_pending == 1
    other = envelope(("demote", "s", {"release": "now"}), message_id="now", time_s=120.0)
    manager.apply(other, SimpleNamespace())
    assert manager.n_pending == 2
    assert manager._cache.sent == [(f"w{i}", [("a0", "dropped")]) for i in range(19)]
    assert set(manager._cache.reasons) == {"repeated"}
    manager._cache.sent.clear()
    manager.request_released("r", finish_reason="stop", aborted=False)
    told = [[action for one in manager._cache.sent if one[0] == m for action in one[1]]
            for m in ("w19", "now")]  # fmt: skip
    assert told == [[("a0", "done")]] * 2 and manager.n_pending == 0


def test_waiting_actions_are_bounded(manager):
    manager.request_queued(request("r", envelope(("bind", "s"))))
    ways = [{"release": r, "scope": w} for w in ("session", "subtree") for r in ("now", "lazy")]
    kinds = [("demote", "s"), *(("demote", "s", way) for way in ways)]
    results = [
        manager.apply(envelope(one, message_id=f"w{i}"), None)[0] for i, one in enumerate(kinds)
    ]
    assert (
        statuses(results) == [("deferred", "running")] * 3 + [("dropped", "too_many_pending")] * 2
    )
    manager.request_released("r", finish_reason="stop", aborted=False)
    assert manager.n_pending == 0 and state(manager, "s") is SessionState.OFFLOADED


def test_remembered_actions_and_leases_are_bounded(manager):
    for i in range(40):
        manager.apply(envelope(("bind", f"s{i}"), ("prefetch", f"s{i}"), message_id=f"m{i}"), None)
        manager.request_queued(request(f"r{i}", envelope(("bind", f"s{i}"), message_id=f"q{i}")))
        manager.request_released(f"r{i}", finish_reason="stop", aborted=False)
    assert len(manager._seen) == 10
    assert not manager.moves.leased and not manager._open_envelopes and not manager.requests
    manager.apply(envelope(("prefetch", "s1"), message_id="last"), None)
    manager.apply(envelope(("evict", "s1"), message_id="end"), None)
    assert not manager.moves.leased


def test_time_is_the_newest_message_time(manager):
    manager.apply(envelope(("bind", "old"), message_id="1", time_s=100.0), None)
    manager.apply(envelope(("bind", "new"), message_id="2", time_s=4_000.0), None)
    assert state(manager, "old") is SessionState.ENDED
    manager.apply(envelope(("bind", "late"), message_id="3", time_s=50.0), None)
    assert manager.table.now_s == 4_000.0
    assert state(manager, "late") is SessionState.IDLE


def test_leases_end_by_message_time(manager):
    manager.apply(envelope(("bind", "s"), ("demote", "s"), ("prefetch", "s")), None)
    assert state(manager, "s") is SessionState.RESUMING
    manager.apply(envelope(("bind", "other"), message_id="later", time_s=131.0), None)
    assert state(manager, "s") is SessionState.OFFLOADED and not manager.moves.leased
