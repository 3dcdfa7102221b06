"""A session comes back from the pool: L3 to host by its manifest, then host to device.

Owns the steps of that prefetch and what it holds in flight. Must never make a request wait,
load what the tree has, or leave anything in flight when it ends: a request of the session
takes over what has arrived.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from sam.core.actions import ActionStatus, TierTokens
from sam.core.manifests import BranchTokens
from sam.core.sessions import SessionKey, SessionRef
from sam.srt.mem_cache.ownership import path_up
from sam.srt.mem_cache.storage.page_keys import token_ids
from sam.srt.mem_cache.storage.worker import Job
from sam.srt.mem_cache.tier_tasks import Outcome, PrefetchBudget, PrefetchTask, not_done

RID_PREFIX = "sam-prefetch-"
MAX_WAITS = 10_000
"""Steps of the scheduler that a prefetch waits for others to leave room."""


class PoolPrefetchTask:
    """See the module. `ref` is None for a session that this server does not know: `opened`
    makes it known once the pool does, and gives None if it runs by then.
    """

    def __init__(
        self,
        cache: Any,
        key: SessionKey,
        ref: SessionRef | None,
        budget: PrefetchBudget,
        opened: Callable[[], SessionRef | None],
    ) -> None:
        self._cache = cache
        self._key = key
        self._ref = ref
        self._budget = budget
        self._opened = opened
        self.keys = {key}
        self._tokens: BranchTokens | None = None
        self._ids = array("q")
        self._handle: CacheRequestHandle | None = None
        self._in_flight: list[int] = []
        self._n_waits = 0
        self._short = ""
        self._n_loaded = 0
        self._cancelled = False
        self._inner: PrefetchTask | None = None
        self._job: Job | None = None
        self._step: Callable[[], Outcome | Callable | None] = self._find

    def poll(self) -> Outcome | None:
        """The outcome when all steps are over."""
        while True:
            step = self._step()
            if step is None or isinstance(step, Outcome):
                return step
            self._step = step

    def cancel(self, key: SessionKey) -> None:
        """The session's request is here: it goes on with what has arrived."""
        if self._inner is not None:
            self._inner.cancel(key)
            return
        if self._handle is not None:
            self._cache.stop_storage_prefetch(self._handle)
            self._arrived()
        self._step = self._resumed

    # -- steps: an outcome, the next step, or None to be asked again --------------

    def _find(self) -> Outcome | Callable | None:
        if self._job is None:
            found = self._cache.pool.recall(self._key)
            if not isinstance(found, Job):
                return self._found(found)
            self._job = found
        return self._found(self._job.result) if self._job.ready else None

    def _found(self, tokens: BranchTokens | None) -> Outcome | Callable:
        if tokens is None:
            if self._ref is None:
                return not_done(ActionStatus.MISSING, "not_in_pool")
            return self._load
        if self._ref is None:
            self._ref = self._opened()
            if self._ref is None:
                return not_done(ActionStatus.DROPPED, "already_running")
        if self._job is not None:
            self._cache.pool.keep(self._key, tokens)
        self._tokens = tokens
        page = self._cache.page_size
        self._ids = token_ids(tokens.first(len(tokens) // page * page))
        return self._fetch

    def _fetch(self) -> Outcome | Callable | None:
        """Ask the pool for what the tree lacks, under a node that is on the host too."""
        cache, match = self._cache, self._match()
        n_matched = match.device_prefix_len + match.host_hit_length
        n_missing = len(self._ids) - n_matched
        if not n_missing or not cache.pool.attached:
            return self._load
        if cache.tree_core.is_eagle:
            self._short = "unsupported"
            return self._load
        anchor = match.last_host_node
        if not (cache.is_root(anchor) or cache.is_backuped(anchor)):
            return self._back_up_above(anchor)
        if n_missing < cache.prefetch_threshold:
            self._short = "too_short"
            return self._load
        room = cache.storage_prefetch_room()
        if room < max(cache.page_size, cache.prefetch_threshold):
            self._n_waits += 1
            if cache.ongoing_prefetch and self._n_waits < MAX_WAITS:
                return None
            self._short = "pool_busy"
            return self._load
        n_asked = min(n_missing, room // cache.page_size * cache.page_size)
        self._short = "host_room" if n_asked < n_missing else ""
        self._ask(anchor, n_matched, n_matched + n_asked)
        return self._wait

    def _back_up_above(self, anchor: int) -> Callable | None:
        """What comes from the pool can only hang below what the host has."""
        cache = self._cache
        self._in_flight = [i for i in self._in_flight if i in cache.ongoing_write_through]
        if self._in_flight:
            return None
        self._n_waits += 1
        node = cache.tree_core.find_node(anchor)
        chain = cache.tree_core.unbacked_chain(node) if node is not None else []
        pending = [n.write_through_pending_id for n in path_up(node)] if node else []
        self._in_flight = [ack_id for ack_id in pending if ack_id is not None]
        for node_id in chain:
            if not cache.back_up_node(node_id):
                self._short = "host_full"
                return self._load
            self._in_flight.append(node_id)
        if not self._in_flight or self._n_waits > MAX_WAITS:
            self._short = "not_backed_up"
            return self._load
        return None

    def _ask(self, anchor: int, start: int, end: int) -> None:
        cache = self._cache
        cache.pool.n_prefetches += 1
        self._handle = CacheRequestHandle(f"{RID_PREFIX}{cache.pool.n_prefetches}", 0)
        cache.prefetch_from_storage(
            self._handle,
            anchor,
            self._ids[start:end],
            cache.get_last_hash_value(anchor),
            cache.get_prefix_hash_values(anchor)
            if cache.hicache_storage_pass_prefix_keys
            else None,
            matched_prefix_tokens=self._ids[:start],
            extra_key=self._tokens.extra_key,
            cache_salt=self._tokens.cache_salt,
        )

    def _wait(self) -> Callable | None:
        if self._handle in self._cache.ongoing_prefetch:
            return None
        self._arrived()
        return self._load

    def _load(self) -> Outcome | None:
        """The rest is a prefetch from host: of what the session owns now."""
        cache = self._cache
        if self._inner is None:
            n_end = self._own()
            if self._ids and not n_end:
                return not_done(ActionStatus.MISSING, self._short or "not_in_pool")
            if n_end < len(self._ids):
                self._short = self._short or "not_in_pool"
            self._inner = PrefetchTask(cache, self._ref, self._budget)
        outcome = self._inner.poll()
        return None if outcome is None else self._outcome(outcome)

    def _resumed(self) -> Outcome:
        status = ActionStatus.CLIPPED if self._n_loaded else ActionStatus.DROPPED
        return Outcome(status=status, tokens=TierTokens(pool=self._n_loaded), reason="resumed")

    # -- inside -------------------------------------------------------------------

    def _match(self) -> Any:
        tokens = self._tokens
        return self._cache.match_tokens(self._ids, tokens.extra_key, tokens.cache_salt)

    def _arrived(self) -> None:
        """Nothing of ours is in flight any more."""
        handle, self._handle = self._handle, None
        self._n_loaded += self._cache.pop_prefetch_loaded_tokens(handle)
        self._cache.release_aborted_request(handle)
        self._cache.pool.counters["tokens_prefetched"] += self._n_loaded

    def _own(self) -> int:
        """Make what is in the tree the session's branch; tokens of it."""
        if self._tokens is None:
            return 0
        core, match = self._cache.tree_core, self._match()
        node = core.find_node(match.best_match_node)
        if node is None or node.parent is None:
            return 0
        current = core.tags.current(self._ref)
        if current is None or any(step is current for step in path_up(node.parent)):
            core.tags.set_branch(self._ref, node)
        return core.path_end(node)

    def _outcome(self, outcome: Outcome) -> Outcome:
        tokens = msgspec.structs.replace(outcome.tokens, pool=self._n_loaded)
        status, reason = outcome.status, outcome.reason
        if self._n_loaded and reason == "already_on_device":
            reason = ""
        if self._n_loaded and status is ActionStatus.DROPPED:
            status = ActionStatus.CLIPPED
        if self._short and status is ActionStatus.DONE:
            status, reason = ActionStatus.CLIPPED, self._short
        return msgspec.structs.replace(outcome, tokens=tokens, status=status, reason=reason)
