"""Real pools, allocators and HiCache settings for in-process cache tests, on CPU.

Owns: construction only, the way `ModelRunner` and `kv_cache_builder` do it. Must never
stand in for a pool.
"""

import torch
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    get_tree_core_factory,
    register_tree_core_backend,
)
from sglang.srt.runtime_context import get_context

from sam.platform import shims
from sam.plugin import create_tree_core
from sam.srt.mem_cache.cache import TREE_CORE_BACKEND


def prepare():
    """Once per process: shims and the tree core backend, as the plugin does."""
    if not shims.install():
        raise RuntimeError("the sam CPU platform is not active")
    if get_tree_core_factory(TREE_CORE_BACKEND) is None:
        register_tree_core_backend(TREE_CORE_BACKEND, create_tree_core)


def server_settings(*, page_size, hicache, host_ratio, write_policy):
    """An uninstalled override of the published server configuration."""
    return get_context().override_server_args(
        page_size=page_size,
        enable_hierarchical_cache=hicache,
        hicache_ratio=host_ratio,
        hicache_size=0,
        hicache_io_backend="direct",
        hicache_mem_layout="layer_first",
        hicache_write_policy=write_policy,
        disaggregation_decode_retraction_backup="cpu_tensor",
        attention_backend="torch_native",
    )


def make_kv_pool(tokens, page_size):
    return MHATokenToKVPool(
        size=tokens,
        page_size=page_size,
        dtype=torch.float32,
        head_num=1,
        head_dim=4,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


def make_allocator(kv, tokens, page_size):
    common = dict(dtype=torch.float32, device="cpu", kvcache=kv, need_sort=False)
    if page_size == 1:
        return TokenToKVPoolAllocator(tokens, **common)
    return PagedTokenToKVPoolAllocator(tokens, page_size, **common)


def fingerprints(ids):
    """One number per position that depends on the whole prefix, exact in float32."""
    out, h = [], 1
    for token in ids:
        h = (h * 31 + token + 1) % 999_983
        out.append(float(h))
    return torch.tensor(out, dtype=torch.float32)


def all_nodes(core):
    return [n for n in core._node_arena.values() if n is not core.root_node]


def path_ids(node):
    """Token ids from the root to the end of the node."""
    parts = []
    while node.parent is not None:
        parts.append(list(node.key.token_ids)[: len(node.key)])
        node = node.parent
    return [token for part in reversed(parts) for token in part]


def host_tokens(node):
    value = node.component_data[BASE_COMPONENT_TYPE].host_value
    return 0 if value is None else len(value)


def check_balance(rig):
    """Every device and host token is accounted for, once."""
    core, free = rig.cache.tree_core, rig.allocator.available_size()
    in_tree = core.full_evictable_size() + core.full_protected_size()
    assert free + in_tree + rig.held() == rig.tokens, (
        f"{free=} {in_tree=} held={rig.held()} total={rig.tokens}"
    )
    values = core.all_values_flatten()
    assert len(values) == in_tree
    free_pages = rig.allocator.get_all_free_pages()
    assert len(torch.unique(values)) == len(values), "a slot is in the tree twice"
    assert len(torch.unique(free_pages)) == len(free_pages), "a page was freed twice"
    controller = rig.cache.cache_controller
    if controller is not None:
        host = controller.mem_pool_host
        used = sum(host_tokens(node) for node in all_nodes(core))
        assert host.available_size() + used == host.anchor_entry.host_pool.size, (
            f"host: {host.available_size()} + {used}"
        )
