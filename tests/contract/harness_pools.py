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
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.runtime_context import get_context

from sam.platform import shims
from sam.plugin import create_rust_tree_core, create_tree_core
from sam.srt.mem_cache.shadow_core import ShadowTreeCore
from sam.srt.mem_cache.shadow_tree import ShadowNode, is_device_leaf


class TracedCore(ShadowTreeCore):
    """Keeps the tokens of its nodes, for which the Rust core has no call."""

    def _start_over(self):
        super()._start_over()
        self.texts = {}

    def begin_insert(self, params):
        self._text = list(params.key.token_ids)[: len(params.key)]
        return super().begin_insert(params)

    def _saw_insert_step(self, step):
        super()._saw_insert_step(step)
        if step.result is not None:
            node = self.shadow.nodes[step.result.last_device_node]
            self.texts[node.id] = self._text[: node.end]

    def _split(self, action, end, on_path):
        upper = super()._split(action, end, on_path)
        self.texts[upper.id] = self.texts.get(action.new_child_node_id, [])[: upper.end]
        return upper


BACKENDS = {
    "sam_python": create_tree_core,
    "sam_rust": create_rust_tree_core,
    "sam_rust_traced": lambda params, components: TracedCore(params),
}


def prepare():
    """Once per process: shims and the tree core backends, as the plugin does."""
    if not shims.install():
        raise RuntimeError("the sam CPU platform is not active")
    for name, factory in BACKENDS.items():
        if get_tree_core_factory(name) is None:
            register_tree_core_backend(name, factory)


def server_settings(*, page_size, hicache, host_ratio, write_policy, layout="layer_first"):
    """An uninstalled override of the published server configuration."""
    return get_context().override_server_args(
        page_size=page_size,
        enable_hierarchical_cache=hicache,
        hicache_ratio=host_ratio,
        hicache_size=0,
        hicache_io_backend="direct",
        hicache_mem_layout=layout,
        hicache_write_policy=write_policy,
        disaggregation_decode_retraction_backup="cpu_tensor",
        attention_backend="torch_native",
    )


def make_kv_pool(tokens, page_size, dtype=torch.float32):
    return MHATokenToKVPool(
        size=tokens,
        page_size=page_size,
        dtype=dtype,
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
    """All nodes but the root; None on the stock Rust core, which does not list them."""
    if isinstance(core, ShadowTreeCore):
        return core.live_nodes()
    if not isinstance(core, UnifiedTreeCore):
        return None
    return [n for n in core._node_arena.values() if n is not core.root_node]


def device_leaves(core):
    """What may leave the device next, in no order."""
    if isinstance(core, ShadowTreeCore):
        return [node for node in core.live_nodes() if is_device_leaf(node)]
    return list(core.evictable_device_leaves)


def recency(node):
    """Grows with the last use."""
    return node.lat if isinstance(node, ShadowNode) else node.last_access_time


def path_ids(core, node):
    """Token ids from the root to the end of the node."""
    if isinstance(core, TracedCore):
        return core.texts[node.id]
    parts = []
    while node.parent is not None:
        parts.append(list(node.key.token_ids)[: len(node.key)])
        node = node.parent
    return [token for part in reversed(parts) for token in part]


def host_tokens(node):
    if isinstance(node, ShadowNode):
        return node.n_tokens if node.backuped else 0
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
    controller, nodes = rig.cache.cache_controller, all_nodes(core)
    if controller is not None and nodes is not None:
        host = controller.mem_pool_host
        used = sum(host_tokens(node) for node in nodes)
        assert host.available_size() + used == host.anchor_entry.host_pool.size, (
            f"host: {host.available_size()} + {used}"
        )
