"""A scheduler's worth of calls on the real cache stack, on CPU, without a server.

Owns: a `Rig` = real request pool, KV pool, allocator, host pool, cache; and the order in
which the scheduler calls them for one request (queue, match, load back, lock, allocate,
checkpoint, release). KV rows carry a fingerprint of their token prefix, so that every
prefill proves that what it reuses is what it would have computed. Must never reach into
the cache to make it pass: it only calls what the scheduler calls.
"""

import itertools
from array import array
from types import SimpleNamespace

import torch
from harness_pools import (
    check_balance,
    fingerprints,
    make_allocator,
    make_kv_pool,
    prepare,
    server_settings,
)
from sglang.srt.managers.io_struct import KvHintsReqInput
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    Req,
    release_req,
)
from sglang.srt.mem_cache.allocation import alloc_for_decode_default, alloc_for_extend
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome, InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from sam.config import SamConfig
from sam.core.sessions import SessionKey
from sam.srt.mem_cache.cache import SessionRadixCache

TENANT = "t"
MAX_CONTEXT = 1024
FINISHES = {
    "stop": lambda: FINISH_MATCHED_TOKEN(0),
    "length": lambda: FINISH_LENGTH(0),
    "abort": lambda: FINISH_ABORT("client went away"),
}


def key(session_id, tenant=TENANT):
    return SessionKey(tenant, session_id)


class Rig:
    """The stack of one scheduler rank. `tokens`: device pool; host pool: `host_ratio` x;
    `core`: the tree core that sam decorates, or, with `stock`, that serves alone."""

    backends = {"python": "sam_python", "rust": "sam_rust_traced"}

    def __init__(
        self,
        *,
        page_size=1,
        tokens=256,
        rows=16,
        hicache=True,
        host_ratio=2.0,
        write_policy="write_through_selective",
        stock=False,
        core="python",
        config=None,
        dtype=torch.float32,
        layout="layer_first",
    ):
        prepare()
        self.page_size, self.tokens = page_size, tokens
        self._override = server_settings(
            page_size=page_size,
            hicache=hicache,
            host_ratio=host_ratio,
            write_policy=write_policy,
            layout=layout,
        )
        self._server_args = self._override.install()
        self.pool = ReqToTokenPool(rows, MAX_CONTEXT, "cpu", False)
        self.kv = make_kv_pool(tokens, page_size, dtype)
        self.allocator = make_allocator(self.kv, tokens, page_size)
        self.cache = self._make_cache(stock, core, config)
        self.sent = []
        self.cache.kv_hint_sink = lambda output, route: self.sent.append(output)
        if hicache:
            self.cache.init_hicache(self._server_args, self._params)
            self._count_ready = self.cache._count_ready_acks
            self.cache._count_ready_acks = self._ready
        self.slow_transfers = ""
        self.clock = 1_000.0
        self.last_consumer_index = None
        self.running, self.queued = {}, {}
        self._ids = itertools.count()

    def _make_cache(self, stock, core, config):
        self._params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core if stock else self.backends[core],
        )
        if stock:
            return UnifiedRadixCache(self._params)
        self.config = config or SamConfig(raise_on_error=True)
        return SessionRadixCache(self._params, config=self.config)

    def _ready(self, queue):
        """How many transfers the device has finished; `slow_transfers` holds them back."""
        loads = queue is self.cache.cache_controller.ack_load_queue
        slow = self.slow_transfers in ("both", "load" if loads else "write")
        return 0 if slow else self._count_ready(queue)

    def close(self):
        self.cache.shutdown()
        self._override.restore()

    # -- one request, as the scheduler drives it -----------------------------------

    def queue(self, ids, *, session=None, envelope=None, rid=None, max_new=64, **bind):
        """A request enters the queue; with `session`, bound as the ingress would."""
        if session is not None:
            envelope = self.envelope([("bind", session, bind)])
        rid = rid or f"r{next(self._ids)}"
        req = Req(
            rid,
            "",
            array("q", ids),
            SamplingParams(max_new_tokens=max_new),
            kv_hints=envelope and decode_kv_hints_envelope(envelope),
        )
        self.cache.on_request_queued(req, is_retracted=False)
        self.queued[rid] = req
        return req

    def has_room(self, req, *, host_hit=0, new_tokens=8):
        """The admission test: room for the whole rest of the request."""
        free = self.allocator.available_size() + self.cache.full_evictable_size()
        return free >= len(req.full_untruncated_fill_ids) - req.prefix_len + new_tokens + (
            2 * self.page_size
        )

    def admit(self, req, *, chunk=None):
        """Prefill a queued request, or its next chunk; False if there is no room.

        Source: `PrefillAdder.add_one_req`, `Scheduler._get_new_batch_prefill_raw`.
        """
        cache = self.cache
        if req.kv.holds_kv:
            checkpoint_kv_cache(req, cache)  # Source: `Scheduler.stash_chunked_request`.
            req.refresh_fill_ids()
        else:
            req.init_next_round_input(cache)
            lock = cache.lock(req.last_node)
            try:
                if not self.has_room(req):
                    return False
                if req.needs_host_load_back():
                    self._load_back(req)
                req.lock = cache.lock(req.last_node)
                req.reused = req.prefix_len
            finally:
                cache.unlock(lock)
        rest = len(req.full_untruncated_fill_ids) - req.prefix_len
        if chunk is not None and chunk < rest:
            end = (req.prefix_len + chunk) // self.page_size * self.page_size
            rest = end - req.prefix_len if end > req.prefix_len else rest
        req.extend_end = req.prefix_len + rest
        self.last_consumer_index = cache.ready_to_load_host_cache()
        self._forward_extend(req)
        self.queued.pop(req.rid, None)
        self.running[req.rid] = req
        if req.extend_end == len(req.full_untruncated_fill_ids):
            req.output_ids.append(self._sample(req))
            checkpoint_kv_cache(req, cache)
        return True

    def prefilled(self, req):
        return bool(req.output_ids)

    def decode(self, req, n_tokens=1):
        for _ in range(n_tokens):
            length = req.kv.kv_committed_len
            batch = self._batch([req], [length])
            slot = alloc_for_decode_default(batch, 1)
            ids = list(req.origin_input_ids) + list(req.output_ids)
            self._write(slot, ids[: length + 1], length)
            req.output_ids.append(self._sample(req))

    def finish(self, req, how="stop"):
        """Source: `SchedulerBatchResultProcessor`, a finished or aborted running request."""
        req.finished_reason = FINISHES[how]()
        req.finished_len = len(req.output_ids)
        release_kv_cache(req, self.cache, checkpoint=True)
        del self.running[req.rid]
        self.clock += 1.0

    def abort_queued(self, req):
        """Source: `Scheduler._release_aborted_request`."""
        self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
        del self.queued[req.rid]

    def abort_chunked(self, req):
        """Source: `Scheduler.process_pending_chunked_abort`."""
        req.finished_reason = FINISH_ABORT("Aborted")
        req.to_finish = None
        self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
        release_kv_cache(req, self.cache, checkpoint=False)
        del self.running[req.rid]

    def retract(self, req, *, drop=False, aborting=False):
        """Source: `ScheduleBatch.retract_decode`; with `drop`, out of memory for good;
        with `aborting`, marked by `Scheduler.abort_request` just before."""
        if drop or aborting:
            req.to_finish = FINISH_ABORT("Out of memory")
        del self.running[req.rid]
        release_req(
            req=req,
            remaing_req_count=0,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            hisparse_coordinator=None,
        )
        if not drop:
            self.cache.on_request_queued(req, is_retracted=True)
            self.queued[req.rid] = req

    def run(self, ids, *, session=None, n_out=4, how="stop", **bind):
        """A whole request; returns it, `reused` says how many tokens it reused."""
        req = self.queue(ids, session=session, **bind)
        assert self.admit(req), "no room"
        self.decode(req, n_out)
        self.finish(req, how)
        return req

    def full_ids(self, req):
        return list(req.origin_input_ids) + list(req.output_ids)

    # -- hints and events ----------------------------------------------------------

    def envelope(self, actions, message_id=None):
        """`actions`: (kind, session_id, extra payload); stamped with the rig's clock."""
        self.clock += 0.001
        out = []
        for i, (kind, session_id, extra) in enumerate(actions):
            payload = {"session_id": session_id, "tenant": TENANT, "time_s": self.clock}
            out.append(
                {
                    "action_id": f"a{i}",
                    "action_type": f"session.{kind}",
                    "action_version": "0.1",
                    "payload": payload | extra,
                }
            )
        message_id = message_id or f"m{next(self._ids)}"
        return {"protocol_version": "0.1", "message_id": message_id, "actions": out}

    def hint(self, kind, session_id, **extra):
        """One management action; returns its first result."""
        return self.submit(self.envelope([(kind, session_id, extra)]))[0]

    def outcome(self, kind, session_id, **extra):
        """One management action and its final result, after as many steps as it takes."""
        result = self.hint(kind, session_id, **extra)
        for _ in range(4):
            self.step()
        return self.later_result() or result

    def submit(self, envelope):
        self.last_message_id = envelope["message_id"]
        request = KvHintsReqInput(kv_hints=decode_kv_hints_envelope(envelope))
        return self.cache.apply_kv_hints(request)

    def step(self):
        """Source: `Scheduler._process_hicache_events`."""
        if self.cache.cache_controller is not None:
            self.cache.check_hicache_events()

    def later_result(self, message_id=None):
        """The newest outcome that was sent for a message."""
        message_id = message_id or self.last_message_id
        found = [o for o in self.sent if o.message_id == message_id]
        return found[-1].results[-1] if found else None

    def flush(self):
        """Source: `Scheduler.flush_cache`."""
        self.cache.reset()
        self.pool.clear()
        self.allocator.clear()

    # -- what is where -------------------------------------------------------------

    def session(self, session_id):
        return self.cache.hints.table.get(key(session_id))

    def ref(self, session_id):
        return self.session(session_id).ref

    def branch(self, session_id):
        return self.cache.tree_core.tags.branch_nodes(self.ref(session_id))

    def ranks(self, nodes):
        """What the nodes count as in the eviction order of the tier they would leave next."""
        return {self.cache.tree_core.orders.key_of(node).rank for node in nodes}

    def on_tiers(self, session_id):
        """(device, host) tokens on the session's branches."""
        sizes = [self.cache.tree_core.tokens_of(node) for node in self.branch(session_id)]
        return sum(d for d, _ in sizes), sum(h for _, h in sizes)

    def held(self):
        """Device tokens that running requests hold outside the tree, in whole pages."""
        total = 0
        for req in self.running.values():
            pages = -(-req.kv.kv_allocated_len // self.page_size)
            total += pages * self.page_size - req.kv.cache_protected_len
        return total

    def check_balance(self):
        check_balance(self)

    def check_idle(self):
        """What must hold when nothing runs: also no lock, no transfer, no waiting task."""
        for _ in range(4):
            self.step()
        self.check_balance()
        self.cache.sanity_check()
        assert self.pool.available_size() == self.pool.size
        assert self.cache.tree_core.full_protected_size() == 0
        assert not self.cache.ongoing_write_through and not self.cache.ongoing_load_back
        if isinstance(self.cache, SessionRadixCache):
            assert self.cache.n_errors == 0
            assert getattr(self.cache.tree_core, "ordering", True)
            assert self.cache.hints.n_pending == 0
            assert not self.cache.hints.requests

    # -- inside --------------------------------------------------------------------

    def _load_back(self, req):
        promised = req.host_hit_length
        params = InitLoadBackParams(
            best_match_node=req.best_match_node, host_hit_length=promised, req=req
        )
        lock_host = self.cache.inc_host_lock_ref(req.best_match_node).to_dec_params()
        lock = self.cache.lock(req.best_match_node)
        req.host_loaded_length, req.last_node = self.cache.init_load_back(params)
        self.cache.unlock(lock)
        self.cache.dec_host_lock_ref(req.best_match_node, lock_host)
        assert req.host_loaded_length in (0, promised)
        req.prefix_len += req.host_loaded_length
        req.kv.cache_protected_len = req.prefix_len

    def _batch(self, reqs, lengths):
        seq_lens = torch.tensor(lengths, dtype=torch.int64)
        rows = [req.kv.req_pool_idx for req in reqs if req.kv.holds_kv]
        return SimpleNamespace(
            reqs=reqs,
            device="cpu",
            tree_cache=self.cache,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            hisparse_coordinator=None,
            is_dllm=lambda: False,
            maybe_evict_swa=lambda: None,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            req_pool_indices=torch.tensor(rows, dtype=torch.int64),
            req_pool_indices_cpu=torch.tensor(rows, dtype=torch.int64),
        )

    def _forward_extend(self, req):
        batch = self._batch([req], [req.extend_end])
        batch.prefix_lens = [req.prefix_len]
        batch.extend_lens = [req.extend_end - req.prefix_len]
        batch.extend_num_tokens = batch.extend_lens[0]
        slots, _, _ = alloc_for_extend(batch)
        ids = list(req.full_untruncated_fill_ids)[: req.extend_end]
        row = self.pool.req_to_token[req.kv.req_pool_idx, : req.prefix_len].long()
        want = fingerprints(ids)[: req.prefix_len]
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            held = buffer[row, 0, 0].to(want.dtype)
            assert torch.equal(held, want), "a reused KV row holds something else"
        self._write(slots, ids, req.prefix_len)

    def _write(self, slots, ids, start):
        values = fingerprints(ids)[start:]
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer[slots.long()] = values[:, None, None].expand(-1, *buffer.shape[1:])

    def _sample(self, req):
        """A deterministic next token: what a model with these weights would say."""
        ids = list(req.origin_input_ids) + list(req.output_ids)
        return int(fingerprints(ids)[-1]) % 50
