"""From tokens to the keys of their pages in a pool, and what must agree for that.

Owns the hash scheme as SGLang's radix tree applies it. Must never compute keys of another
scheme than the tree's own.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sam.core.manifests import BranchTokens, PoolFingerprint

HASH_SCHEME = "sglang-0.5.23-sha256-chain"


def token_bytes(*parts: Any) -> bytes:
    """int32 ids of all parts in a row; a part is an `array` of any int type, or a list."""
    return np.concatenate([np.asarray(part).astype(np.int32) for part in parts]).tobytes()


def token_ids(tokens: BranchTokens) -> array[int]:
    """The ids as the radix tree takes them."""
    return array("q", np.frombuffer(tokens.token_ids, np.int32).astype(np.int64).tobytes())


def page_keys(tokens: BranchTokens, page_size: int, *, is_bigram: bool = False) -> list[str]:
    """Key of each whole page, root first: 64 hex digits."""
    key = RadixKey(
        token_ids(tokens),
        extra_key=tokens.extra_key,
        cache_salt=tokens.cache_salt,
        is_bigram=is_bigram,
    ).page_aligned(page_size)
    return list(get_storage_hash_str(key, None, page_size=page_size)) if len(key) else []


def fingerprint_of(controller: Any) -> PoolFingerprint:
    """What the pages of an attached pool consist of here."""
    config, host = controller.storage_config, controller.storage_host_pool
    shards = f"tp{config.tp_size}pp{config.pp_size}cp{config.attn_cp_size}dcp{config.dcp_size}"
    return PoolFingerprint(
        hash_scheme=HASH_SCHEME,
        page_size=controller.page_size,
        model=config.model_name or "",
        layout=f"{host.dtype}/{host.layout}/{host.size_per_token}/{shards}",
    )


def writes_manifests(controller: Any) -> bool:
    """One rank of a server writes what is the same on all."""
    config = controller.storage_config
    return config.tp_rank == config.pp_rank == config.attn_cp_rank == 0
