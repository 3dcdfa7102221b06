"""What it costs to take pages out of a storage backend: `batch_remove` beside write and lookup.

Owns: pages in a file pool and in a Mooncake store of its own, and the clock around calls of
SGLang's `file` backend and of Mooncake's client. Must never reach another pool. For Mooncake it
makes the calls that the backend makes for pages of two objects (K and V); without
`scripts/pool.sh install` that part is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from sam.testing.pool import MIB, MooncakePool, mooncake_folder

KEPT = 4
"""Times as many pages stay in the pool as one call removes."""


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what it returned."""
    start = perf_counter()
    returned = call()
    return perf_counter() - start, returned


def file_round(backend: Any, keys: list[str], page: Any) -> dict[str, float]:
    """Seconds of each call for these pages. Raises RuntimeError where one did not do it."""
    write_s, written = timed(lambda: backend.batch_set(keys, [page] * len(keys)))
    look_s, found = timed(lambda: backend.batch_exists(keys))
    remove_s, removed = timed(lambda: backend.batch_remove(keys))
    absent_s, again = timed(lambda: backend.batch_remove(keys))
    if (bool(written), found, removed, again) != (True, len(keys), len(keys), 0):
        raise RuntimeError(f"of {len(keys)} pages: {written}, {found}, {removed}, {again}")
    return {"write": write_s, "look": look_s, "remove": remove_s, "absent": absent_s}


def measure_file(n_pages: int, page_bytes: int, rounds: int) -> list[dict[str, float]]:
    """A pool of files with a size bound, so that removal has to tell the bound's evictor."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    page = torch.zeros(page_bytes, dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=False,
            model_name="bench",
            extra_config={"file_storage_path": folder, "max_size": str(64 << 30)},
        )  # fmt: skip
        backend = HiCacheFile(config)
        backend.batch_set([f"kept-{i}" for i in range(KEPT * n_pages)], [page] * KEPT * n_pages)
        return [
            file_round(backend, [f"r{n}-{i}" for i in range(n_pages)], page) for n in range(rounds)
        ]


def mooncake_round(store: Any, keys: list[str], value: bytes) -> dict[str, float]:
    """As `file_round`; two objects a page, and a lease on each when removal comes."""
    objects = [f"{key}_{half}" for key in keys for half in ("k", "v")]
    write_s, failed = timed(lambda: store.put_batch(objects, [value] * len(objects)))
    look_s, found = timed(lambda: store.batch_is_exist(objects))
    remove_s, removed = timed(lambda: store.batch_remove(objects, True))
    absent_s, again = timed(lambda: store.batch_remove(objects, True))
    if failed or set(found) != {1} or any(removed) or 0 in again:
        raise RuntimeError(f"Mooncake did not do it: {failed}, {found[:2]}, {removed[:2]}")
    return {"write": write_s, "look": look_s, "remove": remove_s, "absent": absent_s}


def measure_mooncake(n_pages: int, page_bytes: int, rounds: int) -> list[dict[str, float]]:
    """A master and a store of memory, on this machine, over TCP."""
    folder = mooncake_folder()
    if folder is None:
        return []
    sys.path.append(str(folder))
    value = bytes(page_bytes // 2)
    n_bytes = max(64 * MIB, 2 * (KEPT + 1) * n_pages * page_bytes)
    with tempfile.TemporaryDirectory() as place:
        pool = MooncakePool(Path(place), n_bytes=n_bytes)
        pool.start()
        try:
            store = pool.client()
            for i in range(KEPT * n_pages):
                store.put_batch([f"kept-{i}_k", f"kept-{i}_v"], [value, value])
            return [
                mooncake_round(store, [f"r{n}-{i}" for i in range(n_pages)], value)
                for n in range(rounds)
            ]
        finally:
            pool.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.bench removes", description=__doc__)
    parser.add_argument("--pages", type=int, default=64, help="of one call")
    parser.add_argument("--kib", type=int, default=256, help="of one page")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    given = (args.pages, args.kib << 10, args.rounds)
    rows = {"file": measure_file(*given), "mooncake": measure_mooncake(*given)}
    figures = {
        name: {call: round(1e6 * median(r[call] for r in seen) / args.pages, 1) for call in seen[0]}
        for name, seen in rows.items()
        if seen
    }
    if args.json:
        print(json.dumps(figures))
        return 0
    print(f"{'us a page':10}" + "".join(f"{call:>10}" for call in figures["file"]))
    for name, row in figures.items():
        print(f"{name:10}" + "".join(f"{us:10,.1f}" for us in row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
