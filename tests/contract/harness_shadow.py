"""Twins of real `UnifiedRadixCache`s: sam on the Rust core beside the stock Rust core.

Owns: the second kind of rig, random operations on both at once, and the comparison of
everything that can be seen of them. Must never tell one twin what the other did.
"""

import random
from array import array

import torch
from harness_cache import Rig
from harness_pools import fingerprints
from harness_twin import Twin, random_text
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey


class ShadowRig(Rig):
    """A rig on the Rust core, as a server has it."""

    backends = {"rust": "sam_rust"}

    def __init__(self, *, stock=False, **settings):
        self.stock = stock
        super().__init__(stock=stock, core="rust", **settings)

    @property
    def host_pool(self):
        return self.cache.cache_controller.mem_pool_host.anchor_entry.host_pool

    def check_shadow(self):
        core = self.cache.tree_core
        assert core.ordering and core.n_mismatches == 0
        core.check_tags()

    def check_idle(self):
        super().check_idle()
        if not self.stock and self.cache.tree_core.n_mismatches == 0:
            self.check_shadow()

    def seen(self):
        """What a caller can see: free lists in order, sizes."""
        core = self.cache.tree_core
        free = self.allocator.get_all_free_pages().tolist()
        host = []
        if self.cache.cache_controller is not None:
            pool = self.host_pool
            host = torch.cat([pool.free_slots, *pool.release_slots]).tolist()
        sizes = (core.full_evictable_size(), core.full_protected_size(), core.total_size())
        return free, host, sizes, core.write_back_duplicate_reclaim_digest

    def refill_from_pool(self, ids, from_root):
        """Source: `UnifiedRadixCache._handle_prefetch_result`, with made-up hashes."""
        cache, core = self.cache, self.cache.tree_core
        found = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids), None)))
        anchor, start = found.last_host_node, found.device_prefix_len + found.host_hit_length
        if from_root:
            anchor, start = core.root_node_handle(), 0
        key = RadixKey(array("q", ids[start:]), None).page_aligned(self.page_size)
        if not len(key):
            return found
        lock = cache.inc_host_lock_ref(anchor).to_dec_params()
        pool = cache.cache_controller.mem_pool_host
        if pool.available_size() < len(key):
            cache.evict_host(len(key) - pool.available_size())
        slots = pool.alloc(len(key))
        result = None
        if slots is not None:
            content = fingerprints(ids)[start : start + len(key)]
            self.host_pool.kv_buffer[:, :, slots] = content[:, None, None]
            hashes = [f"{i:064x}" for i in range(len(key) // self.page_size)]
            result = core.insert_host(anchor, key, slots, hashes)
            cache._apply_cache_actions(result.cache_actions)
            kept_from = len(key) if result.host_insert_dropped else result.prefix_len
            if kept_from:
                pool.free(slots[:kept_from])
        cache.dec_host_lock_ref(anchor, lock)
        return found, result


class ShadowTwin(Twin):
    """Beside the stock Rust core; the shadow must agree with its core, too."""

    def __init__(self, make, **settings):
        super().__init__(make, **settings)
        self.n_host_ops = 0

    def same(self, ours, theirs):
        return repr(ours) == repr(theirs)

    def admitted(self, req):
        return *super().admitted(req), req.last_node

    def check(self, *, deep):
        self.both(lambda rig, i: rig.seen())
        if deep:
            shadow = self.sam.cache.tree_core.shadow
            ids = list(shadow.nodes)
            self.both(lambda rig, i: rig.cache.tree_core.collect_path_info(ids))
            self.both(lambda rig, i: [rig.cache.tree_core.is_backuped(n) for n in ids])
            self.sam.check_shadow()

    def drain(self):
        for rig in self.rigs:
            rig.slow_transfers = ""
        for pair in list(self.running):
            self.finish(pair, "stop")
        for pair in self.queued:
            for rig, req in zip(self.rigs, pair, strict=True):
                rig.abort_queued(req)
        self.queued.clear()
        self.check(deep=True)


def one_op(twin, rng, hicache):
    op = rng.random()
    prefilled = [p for p in twin.running if twin.sam.prefilled(p[0])]
    chunked = [p for p in twin.running if p not in prefilled]
    if op < 0.26 and len(twin.queued) + len(twin.running) < 6:
        twin.queue(random_text(twin, rng))
    elif op < 0.50 and (twin.queued or chunked):
        pair = rng.choice(chunked or twin.queued)
        if not pair[0].kv.holds_kv or twin.sam.has_room(pair[0]):
            twin.admit(pair, rng.choice([None, None, 16]))
    elif op < 0.60 and prefilled:
        pair = rng.choice(prefilled)
        if twin.sam.has_room(pair[0]):
            for rig, req in zip(twin.rigs, pair, strict=True):
                rig.decode(req, 2)
    elif op < 0.76 and twin.running:
        twin.finish(rng.choice(twin.running), rng.choice(["stop", "length", "abort"]))
    elif op < 0.79 and prefilled:
        twin.retract(rng.choice(prefilled))
    elif op < 0.83:
        n = rng.choice([1, 16, 40])
        twin.both(lambda rig, i: rig.cache.evict(EvictParams(num_tokens=n)))
    elif op < 0.91 and hicache:
        host_op(twin, rng)
    elif op < 0.912 and not twin.running and not twin.queued:
        for rig in twin.rigs:
            rig.slow_transfers = ""
            rig.step()
            rig.flush()
    else:
        for rig in twin.rigs:
            rig.step()


def host_op(twin, rng):
    kind = rng.random()
    twin.n_host_ops += 1
    if kind < 0.3:
        n = rng.choice([1, 16, 50])
        twin.both(lambda rig, i: rig.cache.evict_host(n))
    elif kind < 0.8:
        ids, from_root = random_text(twin, rng), rng.random() < 0.4
        if kind < 0.4:  # nothing new, maybe all of it there already
            ids = rng.choice(twin.texts[-10:])[: rng.choice([16, 40, 999])]
        twin.texts.append(ids)
        twin.both(lambda rig, i: rig.refill_from_pool(ids, from_root))
    else:
        slow = rng.choice(["", "", "write", "load", "both"])
        for rig in twin.rigs:
            rig.slow_transfers = slow


def pause(twin, rng):
    """Nothing runs: a flush, or the other write policy as an attach of storage sets it."""
    twin.drain()
    for rig in twin.rigs:
        rig.step()
        rig.step()
    what = rng.choice(["flush", "write_through", "write_through_selective", "write_back"])
    if what == "flush":
        for rig in twin.rigs:
            rig.flush()
    elif twin.both(lambda rig, i: rig.cache.tree_core.is_write_through_compatible()):
        for rig in twin.rigs:
            rig.cache._storage_attachment._apply_policies(None, what)


def run_twin(make, n_ops, seed, *, hicache, page_size, host_ratio=1.5, switches=False):
    settings = {"page_size": page_size, "tokens": 256, "hicache": hicache != "off"}
    if hicache != "off":
        settings |= {"write_policy": hicache, "host_ratio": host_ratio}
    twin = ShadowTwin(make, **settings)
    rng = random.Random(seed)
    for i in range(n_ops):
        one_op(twin, rng, hicache != "off")
        if switches and i % 250 == 249:
            pause(twin, rng)
        twin.check(deep=i % 5 == 0)
    twin.drain()
    return twin
