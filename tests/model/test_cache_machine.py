"""The real cache under random traffic and hints, against a naive model of its sessions.

Owns: the state machine. Small pools, HiCache on: most steps evict, split or transfer
something. After every step the pools balance, tags and tree agree, nothing belongs to a
session that is gone, and every session is in the state that the model says.
`SAM_MODEL_EXAMPLES` raises the number of examples.
"""

import os
import sys
from array import array
from pathlib import Path

import pytest

pytest.importorskip("sglang")
hypothesis = pytest.importorskip("hypothesis")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sam.config import SamConfig
from sam.platform import shims

if not shims.is_active():
    pytest.skip("needs the sam CPU platform", allow_module_level=True)

from harness_cache import Rig, key
from harness_model import SessionModel
from harness_pools import all_nodes, path_ids

IDS = ["a", "b", "c", "d", "root", "default_session"]
FINAL = ("done", "clipped", "dropped", "missing", "rejected", "expired")
SESSIONS = st.one_of(st.none(), st.sampled_from(IDS[:4]), st.sampled_from(IDS))
PARENTS = st.one_of(st.none(), st.sampled_from(IDS[:5]))
PICK = st.integers(0, 7)
KINDS = st.sampled_from(["evict", "demote", "prefetch"])
EXTRA = st.fixed_dictionaries(
    {}, optional={"scope": st.sampled_from(["session", "subtree"]), "release": st.just("now")}
)
EDITS = st.lists(st.tuples(KINDS, st.sampled_from(IDS[:5]), EXTRA), max_size=2)
SETUPS = st.fixed_dictionaries(
    {
        "core": st.sampled_from(["python", "rust"]),
        "page_size": st.sampled_from([1, 4]),
        "tokens": st.sampled_from([64, 128]),
        "host_ratio": st.sampled_from([0.5, 1.05, 2.0]),
        "hicache": st.sampled_from([True, True, True, False]),
        "write_policy": st.sampled_from(
            ["write_through", "write_through_selective", "write_back"]
        ),
    }
)


def new_tokens(token, n):
    return [token % 9 * 100 + i for i in range(n)]


class CacheMachine(RuleBasedStateMachine):
    rig = None

    @initialize(setup=SETUPS, ages=st.booleans())
    def start(self, setup, ages):
        self.ages = ages
        limits = {"session_idle_timeout_s": 40.0, "max_sessions": 3} if ages else {}
        config = SamConfig(raise_on_error=True, prefetch_lease_s=3.0, **limits)
        self.rig = Rig(config=config, **setup)
        self.model = SessionModel(config, key)
        self.texts = {None: []}
        self.all_texts = {session: [] for session in (None, *IDS)}
        self.asked, self.last_envelope = {}, None

    # -- requests ------------------------------------------------------------------

    @precondition(lambda self: self.n_requests() < 6)
    @rule(
        session=SESSIONS,
        parent=PARENTS,
        source=SESSIONS,
        keep=st.sampled_from([0, 6, 13, 25, 60]),
        fresh=st.integers(1, 14),
        token=st.integers(0, 2),
        edits=EDITS,
    )
    def queue(self, session, parent, source, keep, fresh, token, edits):
        """A turn: the head of some session's text (its own, mostly), then new tokens."""
        text = self.texts.get(source if token else session) or self.texts.get(session) or []
        actions = [(kind, to, dict(extra)) for kind, to, extra in edits]
        if session is not None:
            bind = {} if parent is None else {"parent_session_id": parent}
            actions.insert(0, ("bind", session, bind))
        self.enqueue(session, text[:keep] + new_tokens(token, fresh), actions)

    @precondition(lambda self: self.n_requests() < 6)
    @rule(
        session=st.sampled_from(IDS[:4]),
        of=st.sampled_from(IDS[:4]),
        keep=st.sampled_from([0, 20, 60, 60]),
        fresh=st.integers(8, 30),
        n_out=st.integers(0, 6),
    )
    def turn(self, session, of, keep, fresh, n_out):
        """A whole turn at once, mostly on top of the session's own text."""
        text = self.texts.get(of if keep == 20 else session) or []
        ids = text[:keep] + new_tokens(len(text), fresh)
        req = self.enqueue(session, ids, [("bind", session, {})])
        if self.rig.admit(req):
            if self.rig.has_room(req, new_tokens=n_out):
                self.rig.decode(req, n_out)
            self.over(req, "stop")

    @rule(session=st.sampled_from(IDS[:4]))
    def away_and_back(self, session):
        """Off the device for sure, then a prefetch that nothing follows yet."""
        self.submit(self.rig.envelope([("demote", session, {"release": "now"})]))
        for _ in range(2):
            self.rig.step()
        self.submit(self.rig.envelope([("prefetch", session, {})]))

    def enqueue(self, session, ids, actions):
        envelope = self.rig.envelope(actions) if actions else None
        req = self.rig.queue(ids, envelope=envelope)
        req.of_session, req.envelope = session, envelope
        self.all_texts[session].append(ids)
        self.model.queued(req.rid, envelope)
        if envelope is not None:
            rest = envelope["actions"][1 if session is not None else 0 :]
            self.note(envelope["message_id"], rest)
        return req

    @precondition(lambda self: 0 < self.n_requests() < 6)
    @rule(pick=PICK)
    def queue_sample(self, pick):
        """Another sample of a request that is still there: the same envelope."""
        first = [*self.rig.queued.values(), *self.rig.running.values()][pick % self.n_requests()]
        req = self.rig.queue(list(first.origin_input_ids), envelope=first.envelope)
        req.of_session, req.envelope = first.of_session, first.envelope
        self.model.queued(req.rid, first.envelope)

    @precondition(lambda self: self.n_requests() > self.n_running(prefilled=True))
    @rule(pick=PICK, chunk=st.sampled_from([None, None, 5, 9]))
    def prefill(self, pick, chunk):
        waiting = [r for r in self.rig.running.values() if not self.rig.prefilled(r)]
        waiting += list(self.rig.queued.values())
        req = waiting[pick % len(waiting)]
        if not req.kv.holds_kv or self.rig.has_room(req):
            self.rig.admit(req, chunk=chunk)

    @precondition(lambda self: self.n_running(prefilled=True))
    @rule(pick=PICK, n=st.integers(1, 5))
    def decode(self, pick, n):
        req = self.pick_running(pick, prefilled=True)
        if self.rig.has_room(req, new_tokens=n):
            self.rig.decode(req, n)

    @precondition(lambda self: self.n_running(prefilled=True))
    @rule(pick=PICK, how=st.sampled_from(["stop", "stop", "length", "abort"]))
    def finish(self, pick, how):
        req = self.pick_running(pick, prefilled=True)
        self.over(req, how)

    def over(self, req, how):
        self.texts[req.of_session] = self.rig.full_ids(req)
        self.all_texts[req.of_session].append(self.rig.full_ids(req))
        self.rig.finish(req, how)
        self.model.over(req.rid, how, how == "abort")

    @precondition(lambda self: self.rig and self.rig.queued)
    @rule(pick=PICK)
    def abort_queued(self, pick):
        fresh = list(self.rig.queued.values())
        req = fresh[pick % len(fresh)]
        self.rig.abort_queued(req)
        self.model.over(req.rid, None, True)

    @precondition(lambda self: self.n_running(prefilled=False))
    @rule(pick=PICK)
    def abort_chunked(self, pick):
        req = self.pick_running(pick, prefilled=False)
        self.rig.abort_chunked(req)
        self.model.over(req.rid, None, True)

    @precondition(lambda self: self.n_running(prefilled=True))
    @rule(pick=PICK, drop=st.booleans(), client_left=st.booleans())
    def retract(self, pick, drop, client_left):
        """Out of memory; `drop`: for good; `client_left`: with an abort under way."""
        req = self.pick_running(pick, prefilled=True)
        self.all_texts[req.of_session].append(self.rig.full_ids(req))
        client_left = client_left or req.to_finish is not None
        if client_left or drop:
            self.model.over(req.rid, None, True)
        self.rig.retract(req, drop=drop, aborting=client_left)
        if client_left and not drop:
            self.model.queued(req.rid, req.envelope)

    # -- hints and events ----------------------------------------------------------

    @rule(edits=st.lists(st.tuples(KINDS, st.sampled_from(IDS), EXTRA), min_size=1, max_size=3))
    def hint(self, edits):
        self.submit(self.rig.envelope([(k, s, dict(extra)) for k, s, extra in edits]))

    @rule(
        session=st.sampled_from(IDS[:4]),
        kind=st.sampled_from(["evict", "evict", "demote"]),
        start=st.integers(0, 40),
        length=st.one_of(st.none(), st.integers(1, 40)),
        older=st.booleans(),
        known=st.booleans(),
        now=st.booleans(),
    )
    def ranges(self, session, kind, start, length, older, known, now):
        """A part of one of the session's windows, the newest or an older one."""
        windows = self.all_texts[session]
        if not windows:
            return
        ids = windows[len(windows) // 2 if older else -1]
        payload = {"target": "tokens", "start": min(start, len(ids))}
        if length is not None and payload["start"] + length <= len(ids):
            payload["end"] = payload["start"] + length
        if known:
            payload["token_ids"] = array("i", ids).tobytes()
        if now and kind == "demote":
            payload["release"] = "now"
        self.submit(self.rig.envelope([(kind, session, payload)]))

    @rule(session=st.sampled_from(IDS), seconds=st.sampled_from([0.0, 2.0, 50.0]))
    def keep_or_expect(self, session, seconds):
        expect = {"expected_idle_s": seconds}
        actions = [("expect", session, expect), ("retain", session, {"ttl_s": seconds})]
        self.submit(self.rig.envelope(actions))

    @rule(session=st.sampled_from(IDS), parent=PARENTS)
    def bind(self, session, parent):
        extra = {} if parent is None else {"parent_session_id": parent}
        self.submit(self.rig.envelope([("bind", session, extra)]))

    @precondition(lambda self: self.rig and self.last_envelope)
    @rule()
    def retry(self):
        """The client sends the same message again."""
        self.submit(self.last_envelope)

    @rule(seconds=st.sampled_from([0.5, 2.0, 30.0]))
    def time_passes(self, seconds):
        self.rig.clock += seconds

    @rule()
    def step(self):
        self.rig.step()

    @rule(slow=st.sampled_from(["", "write", "load", "both"]))
    def transfers(self, slow):
        """From now on, transfers of that direction stay in flight."""
        self.rig.slow_transfers = slow

    @precondition(lambda self: self.rig and not self.rig.running)
    @rule()
    def flush(self):
        self.rig.flush()

    # -- what must hold ------------------------------------------------------------

    @invariant()
    def pools_balance(self):
        if self.rig:
            self.rig.check_balance()

    @invariant()
    def tree_and_tags_agree(self):
        if self.rig:
            cache = self.rig.cache
            # Upstream's check counts nodes as settled duplicates while they are being loaded.
            cache.tree_core.check_tags() if cache.ongoing_load_back else cache.sanity_check()
            tags = self.rig.cache.tree_core.tags
            gone = set(tags.refs()) - self.model.live_refs()
            assert not gone, f"tags of {gone}"
            assert all(ref.key.session_id != "default_session" for ref in tags.refs())

    @invariant()
    def sessions_are_as_modelled(self):
        if self.rig:
            table = self.rig.cache.hints.table
            found = {}
            for k, s in table._store.all.nodes.items():
                parent = s.parent.key.session_id if s.parent else None
                found[k] = (str(s.state), s.generation, parent, s.n_running, s.waiting_tool)
            assert found == self.model.states()

    @invariant()
    def branches_hold_the_sessions_text(self):
        """What a session's current branch names is the head of one of its texts."""
        if self.rig:
            tags = self.rig.cache.tree_core.tags
            for session in IDS[:4]:
                record = self.rig.session(session)
                anchor = tags.current(record.ref) if record and record.live else None
                if anchor is not None and not record.n_running:
                    ids = path_ids(self.rig.cache.tree_core, anchor)
                    assert any(ids == text[: len(ids)] for text in self.all_texts[session])

    @invariant()
    def bookkeeping_is_bounded(self):
        if self.rig:
            hints = self.rig.cache.hints
            in_flight = set(self.rig.queued) | set(self.rig.running)
            assert set(hints.requests) <= in_flight
            resuming = [r for r in self.model.table.records if r.state == "resuming"]
            assert len(hints.moves.leased) <= len(resuming)

    def teardown(self):
        if self.rig is None:
            return
        try:
            self.quiesce()
        finally:
            self.rig.close()

    def quiesce(self):
        """Everything ends; then no action is left open and nothing stays behind."""
        rig = self.rig
        rig.slow_transfers = ""
        for req in list(rig.queued.values()):
            rig.abort_queued(req)
        for req in list(rig.running.values()):
            rig.finish(req, "abort") if rig.prefilled(req) else rig.abort_chunked(req)
        rig.check_idle()
        for output in rig.sent:
            for result in output.results:
                self.asked[output.message_id, result.action_id] = result.status
        still_open = {k: v for k, v in self.asked.items() if v not in FINAL}
        assert not still_open, still_open
        hints, tags = rig.cache.hints, rig.cache.tree_core.tags
        assert not hints._open_envelopes and not hints._after_run
        if not self.ages:
            left = [n.id for n in all_nodes(rig.cache.tree_core) if not n.children]
            assert not set(left) & set(tags._released), "an evict left leaves behind"

    # -- helpers -------------------------------------------------------------------

    def submit(self, envelope):
        self.last_envelope = envelope
        self.note(envelope["message_id"], [])
        results = self.rig.submit(envelope)
        for action, result in zip(envelope["actions"], results, strict=True):
            self.model.action(action, envelope["message_id"])
            self.asked[envelope["message_id"], action["action_id"]] = result.status

    def note(self, message_id, actions):
        for action in actions:
            self.asked[message_id, action["action_id"]] = "accepted"

    def n_requests(self):
        return len(self.rig.queued) + len(self.rig.running) if self.rig else 0

    def n_running(self, *, prefilled):
        return len(self.of_running(prefilled)) if self.rig else 0

    def of_running(self, prefilled):
        running = self.rig.running.values()
        return [req for req in running if self.rig.prefilled(req) == prefilled]

    def pick_running(self, pick, *, prefilled):
        found = self.of_running(prefilled)
        return found[pick % len(found)]


CacheMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("SAM_MODEL_EXAMPLES", "200")),
    stateful_step_count=40,
    derandomize="SAM_MODEL_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCacheMachine = CacheMachine.TestCase
