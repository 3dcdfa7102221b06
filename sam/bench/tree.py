"""What the tree cores cost: match, insert and evict on stock Rust, stock Python, sam on each.

Owns: the workload, the interleaving of the arms and the figures. Must never compare arms of
two runs: all four do the same calls in turns of one process. The cores are driven by SGLang's
`UnifiedRadixCache`, or sam's subclass of it; only the allocator is a stub, so that its cost
is not in the figures.

sam's arms carry sessions: one per path up to 10,000, each tagged as a live server would.
Medians per call, evict of 500 tokens; a whole request under pressure is match, lock, evict what
it needs, insert, tag, unlock, and what the tree does for its session. `worst_ms` is the longest
match, insert or evict. All is CPU time of the thread, less what reading its clock takes: load
beside the benchmark hardly shows.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
from array import array
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from time import thread_time
from typing import Any

import torch

ARMS = {"rust": "rust", "python": "python", "sam": "sam_rust", "sam_python": "sam_python"}
EVICT_TOKENS = 500
MAX_SESSIONS = 10_000
COLUMNS = ("match_us", "insert_us", "evict_us", "request_us")


class _StubAllocator:
    """Enough of an allocator for a tree: everything is free, frees cost nothing."""

    device = torch.device("cpu")

    def available_size(self) -> int:
        return 1 << 40

    def free_segment(self, indices: torch.Tensor, start_pos: int) -> None:
        pass

    free = free_full_segment = free_segment


@dataclass
class Times:
    """Seconds per call, by kind, the clock's own included."""

    match: list[float] = field(default_factory=list)
    insert: list[float] = field(default_factory=list)
    evict: list[float] = field(default_factory=list)
    request: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        clock = _clock_s()
        kinds = (self.match, self.insert, self.evict, self.request)
        figures = {
            column: round((median(kind) - clock) * 1e6, 2)
            for column, kind in zip(COLUMNS, kinds, strict=True)
        }
        longest = max(max(kind, default=0.0) for kind in kinds[:3])
        return {**figures, "worst_ms": round(longest * 1e3, 3)}


def _clock_s() -> float:
    """What one reading of the clock adds to a call."""
    return min(-(thread_time() - thread_time()) for _ in range(10_000))


class Arm:
    """One cache on one core. `paths` are the token ids of what was inserted, oldest first."""

    def __init__(self, name: str, n_shared: int) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        from sam.srt.mem_cache.cache import SessionRadixCache

        self.name = name
        self.n_shared = n_shared
        self.times = Times()
        self.paths: deque[array] = deque()
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=_StubAllocator(),
            page_size=1,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=ARMS[name],
        )
        sams = ARMS[name].startswith("sam")
        self.cache = SessionRadixCache(params) if sams else UnifiedRadixCache(params)
        self.n_sessions = 0
        self._tracker = self.cache.hints.retention if sams else None
        self._now_s = 0.0

    def insert(self, ids: array, values: torch.Tensor, *, timed: bool = True) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        params = InsertParams(key=_key(ids), value=values[: len(ids)])
        start = thread_time()
        result = self.cache.insert(params)
        if timed:
            self.times.insert.append(thread_time() - start)
        self.paths.append(ids)
        session = self._session(ids)
        self._start_session(session)
        self._tag(session, result.last_device_node)
        self._end_session(session)

    def match(self, ids: array) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        params = MatchPrefixParams(key=_key(ids))
        start = thread_time()
        self.cache.match_prefix(params)
        self.times.match.append(thread_time() - start)

    def evict(self, *, timed: bool = True) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        start = thread_time()
        self.cache.evict(EvictParams(num_tokens=EVICT_TOKENS))
        if timed:
            self.times.evict.append(thread_time() - start)

    def request(self, ids: array, values: torch.Tensor) -> None:
        """One request from match to release, with the eviction of what it brings in."""
        from sglang.srt.mem_cache.base_prefix_cache import (
            EvictParams,
            InsertParams,
            MatchPrefixParams,
        )

        cache, key, session = self.cache, _key(ids), self._session(ids)
        start = thread_time()
        self._start_session(session)
        found = cache.match_prefix(MatchPrefixParams(key=key))
        lock = cache.inc_lock_ref(found.last_device_node)
        cache.evict(EvictParams(num_tokens=len(ids) - found.device_prefix_len))
        node_id = cache.insert(InsertParams(key=key, value=values[: len(ids)])).last_device_node
        own_lock = cache.inc_lock_ref(node_id)
        cache.dec_lock_ref(found.last_device_node, lock.to_dec_params())
        self._tag(session, node_id)
        cache.dec_lock_ref(node_id, own_lock.to_dec_params())
        self._end_session(session)
        self.times.request.append(thread_time() - start)
        self.paths.append(ids)

    def _session(self, ids: array) -> Any:
        """The session of a path, known by its first own token; None on a stock core."""
        if self._tracker is None:
            return None
        from sam.core.sessions import SessionKey, SessionRef

        self.n_sessions += 1
        self._now_s = self.n_sessions * 0.05
        return SessionRef(SessionKey("t", f"s{ids[self.n_shared] % MAX_SESSIONS}"), 1)

    def _start_session(self, session: Any) -> None:
        """As the hint manager does when a request is queued."""
        if session is not None:
            self.cache.tree_core.tell_time(self._now_s)
            self._tracker.queued(session.key, self._now_s)

    def _tag(self, session: Any, node_id: int) -> None:
        if session is not None:
            core = self.cache.tree_core
            core.tags.set_branch(session, core.find_node(node_id))

    def _end_session(self, session: Any) -> None:
        """One in fifty stays queued."""
        if session is not None and self.n_sessions % 50:
            self._tracker.idle(session.key, self._now_s, "tool")


def _key(ids: array) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(ids, None)


@dataclass
class Shape:
    """What the paths look like: `n` of them, in groups that share a head of `shared` tokens."""

    n: int
    tokens: int
    shared: int
    grow: int

    def path(self, rng: random.Random, head: array | None = None) -> array:
        """A new path; with `head`, the next turn of that one."""
        if head is not None:
            return head + array("q", _fresh(rng, self.grow))
        group = rng.randrange(max(1, self.n // 100))
        start = array("q", range(group * 1_000_000, group * 1_000_000 + self.shared))
        return start + array("q", _fresh(rng, self.tokens - self.shared))


def _fresh(rng: random.Random, n: int) -> range:
    start = rng.randrange(1 << 50)
    return range(start, start + n)


def build(arms: list[Arm], shape: Shape, values: torch.Tensor, seed: int) -> None:
    """The same tree in every arm; long paths turn by turn, as agents make them."""
    rng = random.Random(seed)
    for _ in range(shape.n):
        path = shape.path(rng) if shape.grow == 0 else shape.path(rng)[: shape.shared + shape.grow]
        while True:
            for arm in arms:
                arm.insert(path, values, timed=False)
            if shape.grow == 0 or len(path) >= shape.tokens:
                break
            for arm in arms:
                arm.paths.pop()
            path = shape.path(rng, path)


def one_round(arm: Arm, shape: Shape, values: torch.Tensor, seed: int, n_evicts: int) -> None:
    """Some turns of agents: match, insert, and evict as much as came in."""
    rng = random.Random(seed)
    for _ in range(100):
        arm.match(arm.paths[rng.randrange(len(arm.paths))])
    for i in range(60):
        head = arm.paths[rng.randrange(len(arm.paths))] if shape.grow else None
        arm.insert(shape.path(rng, head), values)
        if i % (60 // n_evicts) == 0:
            arm.evict()
    for _ in range(60):
        head = arm.paths[rng.randrange(len(arm.paths))] if shape.grow else None
        arm.request(shape.path(rng, head), values)
    while len(arm.paths) > shape.n:
        arm.paths.popleft()


def run_shape(shape: Shape, repeats: int, names: list[str], seed: int) -> dict[str, Any]:
    arms = [Arm(name, shape.shared) for name in names]
    values = torch.arange(2 * shape.tokens + shape.grow * 100)
    build(arms, shape, values, seed)
    gc.collect()
    for arm in arms:
        arm.evict(timed=False)
    for repeat in range(repeats):
        for turn in range(len(arms)):
            arm = arms[(turn + repeat) % len(arms)]
            one_round(arm, shape, values, seed + repeat, n_evicts=6)
    return {arm.name: arm.times.figures() for arm in arms}


def report(result: dict[str, Any]) -> str:
    lines = []
    for title, cores in (
        (f"{result['leaves']} leaves", result["cores"]),
        ("40 sessions x 23k-token paths", result.get("paths")),
    ):
        if cores is None:
            continue
        lines.append(f"{title:32}  match us  insert us   evict us request us   worst ms")
        for name, row in cores.items():
            figures = "  ".join(f"{row[k]:9.1f}" for k in COLUMNS)
            lines.append(f"  {name:30}{figures}  {row['worst_ms']:9.2f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.bench tree", description=__doc__)
    parser.add_argument("--leaves", type=int, default=30_000)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--no-paths", action="store_true", help="leave out the long paths")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    leaves = Shape(n=args.leaves, tokens=300, shared=100, grow=0)
    result: dict[str, Any] = {
        "leaves": args.leaves,
        "cores": run_shape(leaves, args.repeats, args.arms, args.seed),
    }
    if not args.no_paths:
        paths = Shape(n=40, tokens=23_000, shared=1_000, grow=1_000)
        result["paths"] = run_shape(paths, args.repeats, args.arms, args.seed)
    print(json.dumps(result) if args.json else report(result))
    return 0
