"""What the pool knows of sessions: their manifests, their own pages, what is under way.

Owns the manifest store of this server, the ledger of private pages and the worker that talks
to the backend. Must never do I/O on the scheduler thread, remove a page that another session
may need, or fail a request: whatever goes wrong in the pool is a miss, counted.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sam.core.manifests import (
    BranchTokens,
    ManifestMiss,
    ManifestStore,
    decode_manifest,
    encode_manifest,
    manifest_key,
)
from sam.core.page_ledger import PageLedger
from sam.core.sessions import SessionKey, SessionRef
from sam.srt.mem_cache.storage.accounting import PoolAccount
from sam.srt.mem_cache.storage.backlog import Backlog
from sam.srt.mem_cache.storage.keep_alive import KeepAlive
from sam.srt.mem_cache.storage.objects import PoolObjects, objects_of
from sam.srt.mem_cache.storage.offload import PoolOffloadTask
from sam.srt.mem_cache.storage.page_keys import (
    fingerprint_of,
    page_keys,
    token_bytes,
    writes_manifests,
)
from sam.srt.mem_cache.storage.reclaim import (
    PoolEvictTask,
    PoolOnlyEvictTask,
    PoolSpanEvictTask,
    Removed,
)
from sam.srt.mem_cache.storage.resume import PoolPrefetchTask
from sam.srt.mem_cache.storage.stored import StoredNodes
from sam.srt.mem_cache.storage.transfers import TransferWatch
from sam.srt.mem_cache.storage.worker import BoundedNames, Job, PoolWorker

if TYPE_CHECKING:
    from sam.config import SamConfig

REMOVE_BATCH = 512
STOP_TIMEOUT_S = 5.0
COUNTERS = ("manifests_written", "manifests_failed", "manifests_read",
            "pages_removed", "removals_unsupported", "tokens_prefetched")  # fmt: skip


class SessionPool:
    """See the module. `cache` is the SessionRadixCache it serves."""

    def __init__(self, cache: Any, config: SamConfig) -> None:
        self._cache = cache
        self._config = config
        self.transfers = TransferWatch()
        self.account = PoolAccount(cache.hints.table, self.transfers)
        self.manifests = ManifestStore(config.pool_manifest_bytes)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.misses: dict[str, int] = {}
        self.n_prefetches = 0
        self.stored = StoredNodes(cache)
        self._worker = PoolWorker(config.pool_max_jobs)
        self.backlog = Backlog(self._worker, config, cache.hints.table)
        self.keep_alive = KeepAlive(
            config.pool_keep_alive_bytes, config.pool_keep_alive_s, config.max_sessions
        )
        # Of the worker thread:
        self._ledger = PageLedger(config.pool_group_pages, config.pool_ledger_bytes)
        self._written = BoundedNames(config.pool_manifest_bytes)
        self._counted_in: Any = None

    @property
    def attached(self) -> bool:
        return self._cache.enable_storage

    # -- on the scheduler thread --------------------------------------------------

    def remember(self, key: SessionKey, req: Any, time_s: float) -> None:
        """The session's request ended: its tokens are the session's branch now."""
        if not self.attached:
            return
        found = req.storage_hit_length and (req.storage_hit_start or 0) + req.storage_hit_length
        tokens = BranchTokens(
            token_ids=token_bytes(req.origin_input_ids, req.output_ids),
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
            time_s=time_s,
            n_shared_pages=-(-found // self._cache.page_size),
        )
        # The KV of the last token was never computed.
        self.keep(key, tokens.first(self._whole(max(0, len(tokens) - 1))))

    def keep(self, key: SessionKey, tokens: BranchTokens) -> None:
        """The session's branch consists of these tokens, whole pages, as of now."""
        if not len(tokens):
            return
        former = self.manifests.peek(key)
        if former is not None and former.n_shared_pages > tokens.n_shared_pages:
            tokens = msgspec.structs.replace(tokens, n_shared_pages=former.n_shared_pages)
        self.manifests.put(key, tokens)
        self.backlog.lives(key)
        self.keep_alive.touch(key)
        self._submit_note(key, tokens)

    def _submit_note(self, key: SessionKey, tokens: BranchTokens | None = None) -> None:
        """Without `tokens`: what is remembered by now."""
        tokens = tokens or self.manifests.peek(key)
        if tokens is None:
            return
        if not self._worker.submit_latest(key, lambda: self._note(key, tokens)):
            self.backlog.note_later(key)

    def writes(self, operation_id: int, node_id: int) -> None:
        """The node's pages are on their way to the pool."""
        self.stored.writes(operation_id, node_id)

    def cleared(self) -> None:
        """All that lay in the pool is gone."""
        self.stored.clear()
        self._worker.submit(self._forget_all)

    def is_stored(self, node_id: int) -> bool:
        """Whether that is known; the pool itself drops what it has twice."""
        return node_id in self.stored

    def agree_on_losses(self) -> None:
        """Before what is stored decides anything; all ranks in the same step."""
        self.stored.agree_on_losses(self.keep_alive.n_losses)

    def recall(self, key: SessionKey) -> BranchTokens | Job | None:
        """The session's tokens, or the job that looks for them in the pool, whose result is
        `BranchTokens` or None; None where neither is possible."""
        found: Any = self.manifests.get(key)
        if not self.attached:
            return found
        if found is None:
            found = self._worker.submit(lambda: self._read(key), same_on_ranks=True)
        else:
            self.keep_alive.touch(key)
        if found is not None:
            self.backlog.lives(key)
        return found

    def reclaim(self, keys: Sequence[SessionKey], *, owe: bool = True) -> Job | None:
        """The sessions are over: take their private pages and manifests out of the pool. The
        job's result is `Removed`; None where nothing can be done, or, if `owe`, not yet."""
        for key in keys:
            self.keep_alive.forget(key)
            self.manifests.pop(key)
            self.backlog.ended(key)
            self._worker.seal(key)
        if not keys or not self.attached:
            return None
        job = self._worker.submit(lambda: self._remove_sessions(keys))
        if job is None and owe:
            self.backlog.owe(list(keys))
        return job

    def reclaim_tail(self, key: SessionKey, n_tokens: int) -> Job | None:
        """The session's branches end after `n_tokens` now; what it alone had beyond goes."""
        start = -(-n_tokens // self._cache.page_size)
        self._worker.seal(key)
        if not self.attached:
            return None
        job = self._worker.submit(lambda: self._remove_tail(key, start))
        tokens = self.manifests.get(key)
        if tokens is not None and len(tokens) > n_tokens:
            self.manifests.cut(key, self._whole(n_tokens))
            self.keep(key, tokens.first(self._whole(n_tokens)))
        return job

    def evict_task(self, *args: Any) -> PoolEvictTask:
        return PoolEvictTask(*args)

    def evict_unknown(self, key: SessionKey) -> PoolOnlyEvictTask:
        """A session that another server, or this one before a restart, left in the pool."""
        return PoolOnlyEvictTask(self._cache, key)

    def offload_task(self, *args: Any, **kwargs: Any) -> PoolOffloadTask:
        return PoolOffloadTask(*args, **kwargs)

    def span_evict_task(self, *args: Any) -> PoolSpanEvictTask:
        return PoolSpanEvictTask(*args)

    def prefetch_task(
        self, key: SessionKey, ref: SessionRef | None, budget: Any, opened: Any = None
    ) -> PoolPrefetchTask:
        return PoolPrefetchTask(self._cache, key, ref, budget, opened)

    def sync(self) -> None:
        """Once per step of the scheduler: jobs that are over on all ranks become ready."""
        self.stored.see_writes(self.transfers.refused)
        if self.attached:
            self.backlog.work(self._remove_sessions, self._submit_note)
        if self.attached and self.keep_alive.is_due():
            self._worker.submit_latest(KeepAlive, self._renew)
        if self.attached and self.account.is_due():
            self._worker.submit_latest(PoolAccount, self._measure)
        if not self._worker.n_tracked:
            return
        agree = self._cache.lowest_of_ranks
        for job in self._worker.take(agree(self._worker.n_finished())):
            if job.same_on_ranks:
                digest = 0 if job.result is None else zlib.crc32(job.result.token_ids)
                if agree(digest) != -agree(-digest):
                    job.result = None

    def close(self) -> None:
        self._worker.stop(STOP_TIMEOUT_S)

    def report(self) -> dict[str, Any]:
        """Counters and sizes, for inspection."""
        return {
            **self.counters,
            "attached": self.attached,
            "page_bytes": self._page_bytes() if self.attached else 0,
            **self.account.report(self.counters["pages_removed"]),
            "manifest_misses": dict(self.misses),
            "manifests": len(self.manifests),
            "manifest_bytes": self.manifests.n_bytes,
            "manifests_dropped": self.manifests.n_dropped,
            "sessions_in_ledger": len(self._ledger),
            "ledger_bytes": self._ledger.n_bytes,
            "ledger_forgotten": self._ledger.n_forgotten,
            "sessions_kept_alive": len(self.keep_alive),
            "pages_renewed": self.keep_alive.n_renewed_pages,
            "renewals_over_budget": self.keep_alive.n_over_budget,
            "losses_seen": self.keep_alive.n_losses,
            "jobs_waiting": self._worker.n_waiting,
            "jobs_refused": self._worker.n_refused,
            "reclaims_owed": len(self.backlog.owed),
            "errors": self._worker.n_errors,
        }

    def pages_of(self, key: SessionKey) -> tuple[int, int]:
        """(pages, of them private) that the session wrote or read, as far as is known."""
        return self._ledger.n_pages(key)

    # -- on the worker thread -----------------------------------------------------

    def _note(self, key: SessionKey, tokens: BranchTokens) -> None:
        """`tokens.n_shared_pages`: those that the pool had. Whose they are is known from the
        session's own manifest, or not at all."""
        n_shared = 0
        if key not in self._ledger and tokens.n_shared_pages:
            n_shared = (self._read(key) or tokens).n_shared_pages
        sharers = self._ledger.note(key, self._pages(tokens), n_shared)
        self._write(key, tokens)
        for other in sharers:
            theirs = self.manifests.peek(other)
            if theirs is not None:
                self._write(other, theirs)

    def _write(self, key: SessionKey, tokens: BranchTokens) -> None:
        controller = self._cache.cache_controller
        objects = objects_of(controller.storage_backend)
        if objects is None or not writes_manifests(controller):
            return
        fingerprint = fingerprint_of(controller)
        n_shared = self._ledger.n_shared(key)
        tokens = msgspec.structs.replace(tokens, n_shared_pages=n_shared)
        name = manifest_key(key, fingerprint)
        try:
            data = encode_manifest(key, tokens, fingerprint)
        except ManifestMiss as miss:
            self._count_miss(miss)
            return
        self._drop(objects, self._found_sizes(controller.storage_backend, objects))
        written = objects.write(name, data)
        self.transfers.took("manifests", written, controller.storage_backend)
        self.counters["manifests_written" if written else "manifests_failed"] += 1
        if written:
            self._drop(objects, self._written.put(name, len(data)))

    def _found_sizes(self, backend: Any, objects: PoolObjects) -> list[str]:
        """Manifests from before this backend was attached count as well; what is too much."""
        if backend is self._counted_in:
            return []
        self._counted_in = backend
        self._written = BoundedNames(self._config.pool_manifest_bytes)
        return [old for name, size in objects.sizes() for old in self._written.put(name, size)]

    @staticmethod
    def _drop(objects: PoolObjects, names: list[str]) -> None:
        for name in names:
            objects.remove(name)

    def _read(self, key: SessionKey) -> BranchTokens | None:
        controller = self._cache.cache_controller
        objects = objects_of(controller.storage_backend)
        if objects is None:
            return None
        fingerprint = fingerprint_of(controller)
        try:
            tokens = decode_manifest(objects.read(manifest_key(key, fingerprint)), key, fingerprint)
        except ManifestMiss as miss:
            self._count_miss(miss)
            return None
        self.counters["manifests_read"] += 1
        return tokens

    def _forget_all(self) -> None:
        for key in self._ledger.owners():
            self._ledger.forget(key)
        self._counted_in = None
        self.keep_alive.forget_found()

    def _measure(self) -> None:
        self.account.measure(self._ledger, self._page_bytes(), self.counters["pages_removed"])

    def _renew(self) -> None:
        backend = self._cache.cache_controller.storage_backend
        self.keep_alive.renew(backend, self._ledger.pages, self._page_bytes())

    def _remove_sessions(self, keys: Sequence[SessionKey]) -> Removed:
        removed, controller = Removed(), self._cache.cache_controller
        objects = objects_of(controller.storage_backend)
        for key in keys:
            if key not in self._ledger and (known := self._read(key)) is not None:
                self._ledger.note(key, self._pages(known), known.n_shared_pages)
            removed.n_sessions += key in self._ledger
            self._remove_pages(self._ledger.private_pages(key), removed)
            self._ledger.forget(key)
            if objects is not None and writes_manifests(controller):
                name = manifest_key(key, fingerprint_of(controller))
                self._written.pop(name)
                objects.remove(name)
        return removed

    def _remove_tail(self, key: SessionKey, start: int) -> Removed:
        removed = Removed()
        self._remove_pages(self._ledger.private_pages(key, start), removed)
        self._ledger.cut(key, start)
        return removed

    def _remove_pages(self, pages: list[bytes], removed: Removed) -> None:
        backend = self._cache.cache_controller.storage_backend
        self.keep_alive.forget_found(pages)
        for i in range(0, len(pages), REMOVE_BATCH):
            batch = [page.hex() for page in pages[i : i + REMOVE_BATCH]]
            n_pages = backend.batch_remove(batch) if backend is not None else None
            if n_pages is None:
                self.counters["removals_unsupported"] += 1
                removed.supported = False
                return
            removed.n_pages += n_pages
            self.counters["pages_removed"] += n_pages

    # -- inside -------------------------------------------------------------------

    def _pages(self, tokens: BranchTokens) -> list[bytes]:
        """Digests of the branch's whole pages, root first."""
        is_bigram = self._cache.tree_core.is_eagle
        keys = page_keys(tokens, self._cache.page_size, is_bigram=is_bigram)
        return [bytes.fromhex(key) for key in keys]

    def _page_bytes(self) -> int:
        """Of one page, on this rank."""
        controller = self._cache.cache_controller
        return controller.storage_host_pool.size_per_token * controller.page_size

    def _count_miss(self, miss: ManifestMiss) -> None:
        self.misses[miss.reason.value] = self.misses.get(miss.reason.value, 0) + 1

    def _whole(self, n_tokens: int) -> int:
        return n_tokens // self._cache.page_size * self._cache.page_size
