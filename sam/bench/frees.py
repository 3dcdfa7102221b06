"""What it costs to give evicted KV back: one free per eviction walk against one per victim.

Owns: the workload and the comparison, on SGLang's own cache, Rust core and allocators. Must
never time anything but evicting and allocating. One free per walk is what
`evict-frees-once.patch` makes of `evict_for_alloc`; with a predicate of the caller's own
the same call still frees victim by victim, as all did before. Without the patch both are
the same. Arms alternate in one process, each on a cache of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from array import array
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple


class Case(NamedTuple):
    """`free_share`: of the pool, before each walk of `need` tokens in victims of `victim`."""

    title: str
    page_size: int
    pool: int
    victim: int
    need: int
    free_share: float = 0.0


CASES = (
    Case("pages of 1, full pool", 1, 262_144, 64, 8_192),
    Case("pages of 1, full pool, longer victims", 1, 262_144, 512, 8_192),
    Case("pages of 1, half free", 1, 262_144, 64, 8_192, 0.5),
    Case("pages of 16, full pool", 16, 262_144, 64, 8_192),
    Case("pages of 64, full pool", 64, 262_144, 64, 8_192),
)


def make_cache(case: Case) -> tuple[Any, Any]:
    """A cache on an allocator, filled with leaves of `victim` tokens."""
    import torch
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    common = dict(dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=False)
    if case.page_size == 1:
        allocator: Any = TokenToKVPoolAllocator(case.pool, **common)
    else:
        allocator = PagedTokenToKVPoolAllocator(case.pool, case.page_size, **common)
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator,
        page_size=case.page_size, tree_components=(ComponentType.FULL,), tree_core_backend="rust",
    )  # fmt: skip
    cache = UnifiedRadixCache(params)
    for i in range(int(case.pool * (1 - case.free_share)) // case.victim):
        ids = array("q", range(i * 1_000_000, i * 1_000_000 + case.victim))
        slots = allocator.alloc(case.victim).clone()
        cache.insert(InsertParams(key=RadixKey(ids, None), value=slots))
    return cache, allocator


def walk(case: Case, cache: Any, allocator: Any, *, per_victim: bool) -> float:
    """Seconds to evict `need` tokens and to allocate them; what is free stays free."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    params = EvictParams(num_tokens=case.need)
    target = allocator.available_size() + case.need
    satisfied: Callable[[], bool] | None = None
    if per_victim:

        def satisfied() -> bool:
            return allocator.available_size() >= target

    start = perf_counter()
    cache.evict_for_alloc(params, allocation_reclaim_satisfied=satisfied)
    slots = allocator.alloc(case.need)
    seconds = perf_counter() - start
    if slots is None or allocator.available_size() != target - case.need:
        raise RuntimeError("the walk did not evict what was asked for")
    return seconds


def run_case(case: Case, walks: int) -> dict[str, Any]:
    arms = {name: make_cache(case) for name in ("per_victim", "per_walk")}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(walks):
        for name in sorted(arms, reverse=bool(i % 2)):
            cost = walk(case, *arms[name], per_victim=name == "per_victim")
            seconds[name].append(cost)
    row = {f"{name}_us": round(median(seen) * 1e6, 1) for name, seen in seconds.items()}
    return {"case": case.title, **row, "ratio": round(row["per_walk_us"] / row["per_victim_us"], 3)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.bench frees", description=__doc__)
    parser.add_argument("--walks", type=int, default=12, help="per case and arm, at most 15")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    rows = [run_case(case, min(args.walks, 15)) for case in CASES]
    if args.json:
        print(json.dumps(rows))
        return 0
    print(f"{'evict and allocate 8,192 tokens':40}per victim us  per walk us  ratio")
    for row in rows:
        print(
            f"  {row['case']:38}{row['per_victim_us']:13,.0f}{row['per_walk_us']:13,.0f}"
            f"{row['ratio']:7.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
