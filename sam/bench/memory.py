"""What sam keeps per node and per session, and what the garbage collector makes of it.

Owns: two fresh processes, stock's Rust core and sam over it, that do the same, and the
differences. Must never compare processes that did different work.

Each builds a tree of small nodes with a host copy of every one (HiCache, write-through, one
KV layer of a few bytes a token), then opens the sessions, each with a branch of its own, then
serves under pressure for a while. Memory is the process's anonymous memory (Linux) after a
full collection; what a tree core itself holds, and KV, is in it, in both alike. Pauses are
those of the collector as `gc.callbacks` sees them: the longest of its own accord, and a full
collection asked for, as it is and after another `gc.freeze()`. What was there before the first
node is frozen from the start, as a server's is after its warm-up.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import random
import subprocess
import sys
from array import array
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

ARMS = ("stock", "sam")
NODE_TOKENS, HEAD_TOKENS, PER_HEAD = 4, 8, 50
BOUND_MB = 200


class Pauses:
    """Seconds of every collection by generation, while entered."""

    def __init__(self) -> None:
        self.by_generation: list[list[float]] = [[], [], []]
        self._start = 0.0

    def __enter__(self) -> Pauses:
        gc.callbacks.append(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._see)

    def _see(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = perf_counter()
        else:
            self.by_generation[info["generation"]].append(perf_counter() - self._start)

    def figures(self) -> dict[str, Any]:
        longest = [max(seen, default=0.0) for seen in self.by_generation]
        return {
            "longest_ms": round(max(longest) * 1e3, 2),
            "longest_full_ms": round(longest[2] * 1e3, 2),
            "n_full": len(self.by_generation[2]),
            "total_ms": round(sum(map(sum, self.by_generation)) * 1e3, 1),
        }


class Stack:
    """The cache of one scheduler rank on real pools, without a server."""

    def __init__(self, arm: str, n_tokens: int) -> None:
        import torch
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.plugins import load_plugins

        load_plugins()
        server_args = _server_settings()
        kv = MHATokenToKVPool(
            size=n_tokens, page_size=1, dtype=torch.float32, head_num=1, head_dim=4,
            layer_num=1, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        self.allocator = TokenToKVPoolAllocator(
            n_tokens, dtype=torch.float32, device="cpu", kvcache=kv, need_sort=False
        )
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator,
            page_size=1, tree_components=(ComponentType.FULL,),
            tree_core_backend="rust" if arm == "stock" else "sam_rust",
        )  # fmt: skip
        if arm == "stock":
            self.cache = UnifiedRadixCache(params)
        else:
            from sam.config import SamConfig
            from sam.srt.mem_cache.cache import SessionRadixCache

            self.cache = SessionRadixCache(params, config=SamConfig(raise_on_error=True))
        self.hints = getattr(self.cache, "hints", None)
        self.cache.init_hicache(server_args, params)
        self.n_requests = 0

    def request(self, ids: array, session: str | None = None) -> None:
        """What the scheduler does for one request, as far as the cache is concerned."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.n_requests += 1
        rid = f"r{self.n_requests}"
        hints = None if session is None else self._envelope(session)
        req = Req(rid, "", ids, SamplingParams(max_new_tokens=1), kv_hints=hints)
        cache = self.cache
        cache.on_request_queued(req, is_retracted=False)
        matched = cache.match_prefix(MatchPrefixParams(key=RadixKey(ids, None)))
        lock = cache.lock(matched.last_device_node)
        held = cache.path_device_indices(matched.last_device_node)
        n_new = len(ids) - len(held)
        self.allocator.evict_to_free_tokens(cache, n_new)
        value = _cat(held, self.allocator.alloc(n_new))
        result = cache.insert(
            InsertParams(key=RadixKey(ids, None), value=value, prev_prefix_len=len(held))
        )
        cache.unlock(lock)
        if self.hints is not None and self.hints.branch_ref(rid) is not None:
            ref, ended = self.hints.branch_ref(rid)
            core = cache.tree_core
            core.tags.set_branch(ref, core.find_node(result.last_device_node), ended=ended)
            self.hints.request_released(rid, finish_reason="tool_calls", aborted=False)
        cache.flush_pending_backups()
        cache.check_hicache_events()

    def _envelope(self, session: str) -> Any:
        from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

        payload = {"session_id": session, "tenant": "t", "time_s": 1_000.0 + self.n_requests}
        action = {"action_id": "a", "action_type": "session.bind", "action_version": "0.1"}
        envelope = {"protocol_version": "0.1", "message_id": f"m{self.n_requests}"}
        return decode_kv_hints_envelope({**envelope, "actions": [{**action, "payload": payload}]})


def _cat(held: Any, new: Any) -> Any:
    import torch

    return torch.cat((held.to(torch.int64), new))


def _server_settings() -> Any:
    from sglang.srt.runtime_context import get_context

    return get_context().override_server_args(
        page_size=1, enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_size=0,
        hicache_io_backend="direct", hicache_mem_layout="layer_first",
        hicache_write_policy="write_through", attention_backend="torch_native",
        disaggregation_decode_retraction_backup="cpu_tensor",
    ).install()  # fmt: skip


def _own_bytes() -> int:
    """Anonymous memory of this process, after what is free went back to the system. Mapped
    files are left out: other processes that load the same libraries would count."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.split("Anonymous:")[1].split()[0]) * 1024


def _full_collection_ms() -> float:
    start = perf_counter()
    gc.collect()
    return round((perf_counter() - start) * 1e3, 1)


def measure(arm: str, n_nodes: int, n_sessions: int, n_served: int) -> dict[str, Any]:
    """In the process of one arm: build, open sessions, serve; bytes and pauses."""
    logging.disable(logging.WARNING)
    stack = Stack(arm, n_nodes * NODE_TOKENS + n_sessions * NODE_TOKENS + 4_096)
    rng = random.Random(1)
    at_start = _own_bytes()
    gc.freeze()
    heads = [array("q", _fresh(rng, HEAD_TOKENS)) for _ in range(-(-n_nodes // PER_HEAD))]
    with Pauses() as building:
        for i in range(n_nodes - len(heads)):
            stack.request(heads[i % len(heads)] + array("q", _fresh(rng, NODE_TOKENS)))
    with_nodes, objects_of_nodes = _own_bytes(), len(gc.get_objects())
    for i in range(n_sessions):
        ids = heads[i % len(heads)] + array("q", _fresh(rng, NODE_TOKENS))
        stack.request(ids, f"task-{i:06d}:coder")
    with_sessions, objects = _own_bytes(), len(gc.get_objects())
    host = stack.cache.host_pool_group
    host_tokens = host.anchor_entry.host_pool.size - host.available_size()
    serving = _serve(stack, heads, rng, n_sessions, n_served)
    full_ms = _full_collection_ms()
    gc.freeze()
    frozen_ms = _full_collection_ms()
    return {
        "core": type(stack.cache.tree_core).__name__,
        "nodes_bytes": with_nodes - at_start,
        "sessions_bytes": with_sessions - with_nodes,
        "objects": objects,
        "objects_of_nodes": objects_of_nodes,
        "host_tokens": host_tokens,
        "gc": {
            "building": building.figures(),
            "serving": serving,
            "serving_frozen": _serve(stack, heads, rng, n_sessions, n_served),
            "full_ms": full_ms,
            "full_frozen_ms": frozen_ms,
        },
    }


def _serve(
    stack: Stack, heads: list[array], rng: random.Random, n_sessions: int, n_served: int
) -> dict[str, Any]:
    with Pauses() as pauses:
        for _ in range(n_served):
            ids = rng.choice(heads) + array("q", _fresh(rng, 10 * NODE_TOKENS))
            stack.request(ids, f"task-{rng.randrange(n_sessions):06d}:coder")
    return pauses.figures()


def _fresh(rng: random.Random, n: int) -> range:
    start = rng.randrange(1 << 50)
    return range(start, start + n)


def compare(arms: dict[str, Any], n_nodes: int, n_sessions: int) -> dict[str, Any]:
    stock, sam = arms["stock"], arms["sam"]
    nodes = sam["nodes_bytes"] - stock["nodes_bytes"]
    sessions = sam["sessions_bytes"] - stock["sessions_bytes"]
    total_mb = round((nodes + sessions) / 1e6, 1)
    return {
        "bytes_per_node": round(nodes / n_nodes),
        "bytes_per_session": round(sessions / n_sessions),
        "overhead_mb": total_mb,
        "within_bound": total_mb < BOUND_MB,
    }


def report(result: dict[str, Any]) -> str:
    over = result["overhead"]
    lines = [
        f"{result['nodes']:,} nodes with host copies, {result['sessions']:,} sessions",
        f"sam over stock: {over['bytes_per_node']:,} bytes a node, "
        f"{over['bytes_per_session']:,} a session (its own branch included), "
        f"{over['overhead_mb']:,} MB in all (bound {BOUND_MB})",
        "",
        f"{'collector':40}" + "".join(f"{name:>12}" for name in result["arms"]),
    ]
    rows = (
        ("tokens on host", lambda a: f"{a['host_tokens']:,}"),
        ("objects of the collector", lambda a: f"{a['objects']:,}"),
        ("full collection, ms", lambda a: a["gc"]["full_ms"]),
        ("  after gc.freeze(), ms", lambda a: a["gc"]["full_frozen_ms"]),
        ("longest pause while building, ms", lambda a: a["gc"]["building"]["longest_ms"]),
        ("longest pause while serving, ms", lambda a: a["gc"]["serving"]["longest_ms"]),
        ("  after gc.freeze(), ms", lambda a: a["gc"]["serving_frozen"]["longest_ms"]),
    )
    for title, figure in rows:
        lines.append(f"{title:40}" + "".join(f"{figure(a):>12}" for a in result["arms"].values()))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sam.bench memory", description=__doc__)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--serve", type=int, default=5_000, help="requests under pressure")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arm", choices=ARMS, help="measure one arm in this process")
    return parser


def main(argv: list[str] | None = None) -> int:
    """0, or 1 if the overhead is not within its bound."""
    args = _parser().parse_args(argv)
    if args.arm:
        print(json.dumps(measure(args.arm, args.nodes, args.sessions, args.serve)))
        return 0
    arms = {}
    for arm in ARMS:
        print(f"{arm}: a fresh process builds {args.nodes:,} nodes", file=sys.stderr)
        command = [sys.executable, "-m", "sam.bench", "memory", "--arm", arm]
        command += ["--nodes", str(args.nodes), "--sessions", str(args.sessions)]
        command += ["--serve", str(args.serve)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        arms[arm] = json.loads(run.stdout.splitlines()[-1])
    result = {"nodes": args.nodes, "sessions": args.sessions, "arms": arms}
    result["overhead"] = compare(arms, args.nodes, args.sessions)
    print(json.dumps(result) if args.json else report(result))
    return 0 if result["overhead"]["within_bound"] else 1


if __name__ == "__main__":
    sys.exit(main())
