"""The `sam` cache backend: SGLang's UnifiedRadixCache with sessions.

Owns the wiring between the scheduler's cache calls, the hint manager and the session tree
core, and the few primitives that tier tasks need. Must never decide about sessions (the
hint manager does) nor about victims (the tree core does), and must keep every upstream
call's meaning: a request without a session takes the upstream path.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.managers.io_struct import KvHintsReqOutput
from sglang.srt.managers.kv_hints import KvHintResult
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.allocator.page_interleave import page_interleave_shard_size
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestOutcome,
    EvictParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel

from sam.config import SamConfig, load_config
from sam.core.actions import ActionResult
from sam.core.lineage import SHARED_SESSION_IDS
from sam.core.pool_usage import SHARED
from sam.srt.managers.admission_order import AdmissionOrder, create_order
from sam.srt.managers.bindings import ANSWERED_ACTION, QUERY_ACTION, Route
from sam.srt.managers.hint_manager import HintManager
from sam.srt.managers.regret import RegretWatch
from sam.srt.mem_cache.headroom import Headroom, OwnCopies, busy_tokens
from sam.srt.mem_cache.storage.accounting import STATES
from sam.srt.mem_cache.storage.pool import SessionPool
from sam.srt.mem_cache.tree_core import DropResult, SessionTreeCore
from sam.srt.observability.log_limit import limit_storage_logs
from sam.srt.observability.metrics import SchedulerMetrics
from sam.srt.observability.page_report import answer_query
from sam.srt.observability.pool_metrics import PoolMetrics
from sam.srt.observability.timeline_report import note_request
from sam.srt.upstream import pool_names_tell_format

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

logger = logging.getLogger(__name__)


class SessionRadixCache(UnifiedRadixCache):
    """Source: `sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache`."""

    tree_core: SessionTreeCore

    def __init__(self, params: CacheInitParams, config: SamConfig | None = None) -> None:
        self.config = config if config is not None else load_config()
        self.hints = HintManager(self, self.config)
        self.pool = self.hints.moves.pool = SessionPool(self, self.config)
        self.headroom, self.own_copies = Headroom(), OwnCopies(self)
        self._order = create_order(self.config)
        self.n_errors = 0
        self._own_load: tuple[Any, int] | None = None
        self._inserting: str | None = None
        super().__init__(params)
        self.tree_core.use_policy(self.config.retention_policy)
        self.hints.attach(self.tree_core)
        self.tree_core.orders.is_stored = self.pool.is_stored
        self.regret = self._create_regret_watch()
        if params.enable_metrics and get_parallel().tp_rank == 0:
            self.hints.metrics = SchedulerMetrics()
            self.pool.account.metrics = PoolMetrics((*STATES, SHARED))

    # -- scheduler calls ----------------------------------------------------------

    def on_request_queued(self, req: Any, *, is_retracted: bool) -> None:
        super().on_request_queued(req, is_retracted=is_retracted)
        self.headroom.add(req)
        self._guard(self.hints.request_queued, req)

    def waiting_queue_order(self) -> AdmissionOrder | None:
        return self._order

    def insert(self, params: Any) -> Any:
        """Pages that this brings into the pool are told whose they are."""
        if params.session_id is None:
            params.session_id = self._inserting
        return super().insert(params)

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        binding = self.hints.requests.get(req.rid)
        name = binding.key.session_id if binding is not None and binding.key else None
        self._inserting = None if name in SHARED_SESSION_IDS else name
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        finally:
            self._inserting = None
        if not self.disable and self.hints.requests:
            self._guard(self._tag_branch, req)
        if self.regret is not None and len(self.hints.retention) and req.finished():
            self._guard(self._watch_regret, req)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._request_over(req)
        self._guard(self.hints.poll)

    def claim_kv_row(self, req: Any) -> bool:
        claimed = super().claim_kv_row(req)
        if claimed:
            self._request_over(req)
        return claimed

    def finish(self, handle: Any, outcome: Any) -> None:
        super().finish(handle, outcome)
        self.headroom.drop(handle.rid)
        if outcome != CacheRequestOutcome.SUCCESS:
            self._guard(self.hints.request_released, handle.rid, finish_reason=None, aborted=True)

    def apply_kv_hints(self, recv_req: Any) -> list[Any]:
        envelope = recv_req.kv_hints
        first = envelope.actions[0].action_type if envelope.actions else ""
        if first == QUERY_ACTION:
            return [answer_query(self, envelope.actions[0])]
        if first == ANSWERED_ACTION:
            self._guard(self.hints.answered, envelope.actions[0].payload)
            return []
        results = self._guard(self.hints.apply, envelope, Route(recv_req.http_worker_ipc))
        return [_to_upstream(result) for result in results or ()]

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        self._start_own_loads()
        self._guard(self.pool.sync)
        self._guard(self.hints.poll)

    def ready_to_load_host_cache(self) -> int:
        """Consumer index for the next batch: it also waits for a prefetch in flight."""
        index = super().ready_to_load_host_cache()
        if index >= 0 or self._own_load is None:
            return index
        ack, own_index = self._own_load
        if any(queued is ack for queued in self.cache_controller.ack_load_queue):
            return own_index
        self._own_load = None
        return index

    def _evict(self, params: Any, available_size_targets: Any = None, **kwargs: Any) -> Any:
        """A target cannot be reached before as many tokens are free as are asked for. What
        copies of ours lock is waited for where nothing else is left: a want of memory ends
        the scheduler."""
        stops_early = kwargs.get("allocation_reclaim_satisfied") is not None
        self.tree_core.free_at_once = 0 if stops_early else params.num_tokens
        copying = self.own_copies.under_way()
        result = super()._evict(params, available_size_targets, **kwargs)
        missing = params.num_tokens - result.num_tokens_evicted
        if missing > 0 and copying and not stops_early:
            self.writing_check(write_back=True)
            more = super()._evict(EvictParams(num_tokens=missing), available_size_targets)
            result.num_tokens_evicted += more.num_tokens_evicted
        return result

    def sanity_check(self) -> None:
        super().sanity_check()
        self.tree_core.check_tags()

    def write_backup_storage(self, node_id: int, session_id: str | None = None) -> None:
        n_before = len(self.ongoing_backup)
        super().write_backup_storage(node_id, session_id)
        if len(self.ongoing_backup) > n_before:
            self.pool.writes(next(reversed(self.ongoing_backup)), node_id)

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        with pool_names_tell_format():
            return super().attach_storage_backend(*args, **kwargs)

    def clear_storage_backend(self) -> bool:
        cleared = super().clear_storage_backend()
        if cleared:
            self.pool.cleared()
        return cleared

    def shutdown(self) -> None:
        self.pool.close()
        super().shutdown()

    def _reset_full(self) -> None:
        super()._reset_full()
        self._own_load = None
        self._guard(self.hints.tree_was_reset)

    # -- primitives for tier tasks ------------------------------------------------

    def has_host_tier(self) -> bool:
        return self.cache_controller is not None and self.host_memory_mode == "cache"

    def back_up_node(self, node_id: int) -> int:
        """Queue the device-to-host copy of one node; tokens, 0 if the host is full."""
        n_tokens = self._execute_and_commit_kv_backup(BackupKV(node_ids=[node_id]))
        self.own_copies.started(node_id)
        return n_tokens

    def can_demote(self, node: Any) -> bool:
        """Whether the device copy of the node may go now without losing anything."""
        core = self.tree_core
        has_device_child = any(not child.evicted for child in node.children.values())
        return node.backuped and not has_device_child and not core.is_locked(node)

    def demote_node(self, node: Any) -> int:
        """Drop the device copy of a node that `can_demote`; tokens freed."""
        tracker = dict.fromkeys(self.tree_components, 0)
        self._demote(node.id, tracker)
        return tracker[BASE_COMPONENT_TYPE]

    def node_at(self, ids: array[int], extra_key: str | None, cache_salt: str | None) -> Any | None:
        """The node that ends right after these tokens, split off if need be; None if they
        are not all cached. `ids` are whole pages."""
        result = self.match_tokens(ids, extra_key, cache_salt)
        node = self.tree_core.find_node(result.best_match_node)
        found = node is not None and self.tree_core.path_end(node) == len(ids)
        return node if found else None

    def match_tokens(self, ids: array[int], extra_key: str | None, cache_salt: str | None) -> Any:
        """SGLang's `MatchResult` of these tokens, which are whole pages."""
        key = RadixKey(ids, extra_key, cache_salt=cache_salt)
        return self._match_tree(MatchPrefixParams(key=key))

    def storage_prefetch_room(self) -> int:
        """Tokens that may still be fetched from the pool beside what is under way."""
        controller = self.cache_controller
        return controller.prefetch_capacity_limit - controller.prefetch_tokens_occupied

    def stop_storage_prefetch(self, handle: Any) -> None:
        """End a fetch from the pool now; what has arrived stays, in the tree."""
        policy, self.prefetch_stop_policy = self.prefetch_stop_policy, "best_effort"
        try:
            self.check_prefetch_progress(handle)
        finally:
            self.prefetch_stop_policy = policy

    def lowest_of_ranks(self, value: int) -> int:
        """The smallest value on any rank; all have to ask in the same step."""
        found = torch.tensor([value], dtype=torch.int64)
        self._all_reduce(found, torch.distributed.ReduceOp.MIN)
        return int(found.item())

    @contextmanager
    def one_free(self) -> Iterator[None]:
        """What is drained meanwhile goes back to the allocator at once at the end: each free
        joins the whole free list anew."""
        shards = page_interleave_shard_size(self.token_to_kv_pool_allocator)
        if self._walk_frees is not None or shards != 1:
            yield
            return
        self._walk_frees = []
        try:
            yield
        finally:
            self._flush_walk_frees()
            self._walk_frees = None

    def drain(self, result: DropResult) -> None:
        """Give back to the pools what a drop freed."""
        self._apply_eviction_result(result)

    def prefetch_budget_tokens(self) -> int:
        """Device tokens that a prefetch may take: free or less needed than any session that
        runs or resumes; all that resume hold at most the configured share of the pool."""
        can_be_free = self._reclaimable_tokens()
        busy, resuming = busy_tokens(self)
        share = int(self._pool_tokens() * self.config.prefetch_pool_share)
        return max(0, min(can_be_free - busy - self.headroom.tokens(), share - resuming))

    def can_lock(self, n_tokens: int) -> bool:
        """Whether a copy may hold so many tokens on the device without taking the room of
        requests that run."""
        needed = self.headroom.tokens()
        return not needed or self._reclaimable_tokens() - n_tokens >= needed

    def retainable_tokens(self) -> int:
        """Device tokens that one tenant may ask to be retained."""
        return int(self._pool_tokens() * self.config.retain_pool_share)

    def send_results(self, envelope_id: str, results: list[ActionResult], route: Any) -> None:
        if self.kv_hint_sink is not None:
            upstream = [_to_upstream(result) for result in results]
            self.kv_hint_sink(KvHintsReqOutput(message_id=envelope_id, results=upstream), route)

    # -- inside -------------------------------------------------------------------

    def _pool_tokens(self) -> int:
        """Device tokens that are free or in the tree."""
        return self._reclaimable_tokens() + self.tree_core.full_protected_size()

    def _reclaimable_tokens(self) -> int:
        """Device tokens that are free or evictable."""
        free = self._component_available_size(BASE_COMPONENT_TYPE)
        return free + self.tree_core.full_evictable_size()

    def _start_own_loads(self) -> None:
        """Start loads that no batch has started: a prefetch has none to wait for."""
        controller = self.cache_controller
        if controller is None or not controller.load_queue or not self.has_free_load_back_slot():
            return
        index = controller.start_loading()
        self._own_load = (controller.ack_load_queue[-1], index)

    def _tag_branch(self, req: Any) -> None:
        tagged = self.hints.branch_ref(req.rid)
        node = self.tree_core.find_node(req.last_node)
        if tagged is not None and node is not None:
            ref, ended = tagged
            self.tree_core.tags.set_branch(ref, node, ended=ended)

    def init_hicache(self, *args: Any, **kwargs: Any) -> None:
        with pool_names_tell_format():
            super().init_hicache(*args, **kwargs)
        self.pool.transfers.watch(self.cache_controller)
        limit_storage_logs()
        if self.regret is not None:
            host_pages = self.cache_controller.mem_pool_host.available_size() // self.page_size
            inclusive = self.cache_controller.write_policy != "write_back"
            self.regret.add_host_tier(host_pages, inclusive=inclusive)

    def _create_regret_watch(self) -> RegretWatch | None:
        """None where there is nothing to regret: another policy, or the guard is off."""
        if not self.config.regret_guard or self.config.retention_policy != "next-use":
            return None
        pages = self._component_available_size(BASE_COMPONENT_TYPE) // self.page_size
        watch = RegretWatch(pages, self.page_size, self.tree_core.orders)
        self.hints.retention.attach(watch.pair)
        return watch

    def _watch_regret(self, req: Any) -> None:
        node = self.tree_core.find_node(req.last_node)
        if node is not None:
            tagged = self.hints.branch_ref(req.rid)
            ref = tagged[0] if tagged is not None and not tagged[1] else None
            ids = req.origin_input_ids + req.output_ids
            now_s = self.hints.table.now_s
            self.regret.request_over(ids, self.tree_core.path_end(node), ref, now_s)

    def _request_over(self, req: Any) -> None:
        """A retracted request comes back, unless it is released with a pending abort
        (out of memory even alone): nobody else tells of that one."""
        reason = req.finished_reason or req.to_finish
        if reason is None:
            return
        self.headroom.drop(req.rid)
        if not isinstance(reason, FINISH_ABORT):
            self._guard(note_request, self, req)
        if not self.hints.requests:
            return
        self._guard(
            self.hints.request_released,
            req.rid,
            finish_reason=reason.to_json().get("type"),
            aborted=isinstance(reason, FINISH_ABORT),
            req=req,
        )

    def _guard(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """A failing hint is counted and logged, never passed on to the request."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.hint_failed(error)
            return None

    def hint_failed(self, error: Exception) -> None:
        """Count and log it; raise it again where the configuration says so."""
        if self.config.raise_on_error:
            raise error
        self.n_errors += 1
        if self.n_errors <= 10:
            logger.error(
                "sam: a hint failed (error %d); serving goes on", self.n_errors, exc_info=error
            )


def _to_upstream(result: ActionResult) -> Any:
    detail: dict[str, Any] = {"tokens": msgspec.structs.asdict(result.tokens)}
    if result.span is not None:
        detail["span"] = list(result.span)
    return KvHintResult(
        action_id=result.action_id,
        action_type=result.action_type,
        status=result.status.value,
        reason=result.reason,
        detail=detail,
    )
