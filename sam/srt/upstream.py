"""The only importer of private SGLang names, and the proof that this SGLang is the right one.

Owns the pinned version, the patch markers and the list of upstream members that the overlay
overrides or calls. Must never work around a missing one: a wrong version, a missing patch
or a vanished member is an error with the remedy in its text. Only public module paths may
be imported elsewhere below `sam.srt`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

PINNED_VERSION = "0.5.23"

PATCH_MARKERS: dict[str, str] = {
    "kv-hint-ingress": "sglang.srt.managers.kv_hints:register_kv_hint_ingress",
    "openai-kv-hints": "sglang.srt.entrypoints.openai.protocol:ChatCompletionRequest.agent_hint",
    "kv-hints-control-message": "sglang.srt.managers.io_struct:KvHintsReqInput",
    "request-queued-hook": (
        "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.on_request_queued"
    ),
}
"""Symbol that each patch of `patches/series` adds, as `module:name[.attribute]`."""

USED_MEMBERS: tuple[str, ...] = (
    "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore._split_node",
    "sglang.srt.mem_cache.unified_cache.unified_tree_core:"
    "UnifiedTreeCore._remove_leaf_from_parent",
    "sglang.srt.mem_cache.unified_cache.unified_tree_core:"
    "UnifiedTreeCore._delete_unbacked_device_leaf",
    "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore._evict_host_leaf",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.checkpoint_into_tree",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache._reset_full",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache._apply_eviction_result",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache._execute_and_commit_kv_backup",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache._demote",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache._component_available_size",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.load_back",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.claim_kv_row",
    "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.on_release",
    "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.finish",
    "sglang.srt.mem_cache.registry:create_unified_radix_cache",
    "sglang.srt.mem_cache.registry:register_radix_cache_backend",
    "sglang.srt.mem_cache.unified_cache.tree_core_registry:register_tree_core_backend",
)
"""Upstream members that the overlay overrides or calls; checked at start."""


class UpstreamError(RuntimeError):
    """This SGLang cannot carry sam; the text says what to do."""


class PatchMissing(UpstreamError):
    """A patch of the series is not applied."""

    def __init__(self, patches: list[str]) -> None:
        self.patches = patches
        super().__init__(
            f"SGLang lacks the patches {', '.join(patches)}. "
            "Run scripts/apply_patches.sh in the environment that runs the server."
        )


def resolve(symbol: str) -> object | None:
    """The object behind `module:name[.attribute]`, or None. A pydantic or dataclass
    field counts as an attribute."""
    module_name, _, path = symbol.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError:
        return None
    for name in path.split("."):
        fields = getattr(found, "model_fields", None) or {}
        if name in fields:
            found = fields[name]
        elif hasattr(found, name):
            found = getattr(found, name)
        else:
            return None
    return found


def installed_version() -> str | None:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def missing_patches() -> list[str]:
    return [name for name, symbol in PATCH_MARKERS.items() if resolve(symbol) is None]


def verify() -> None:
    """Raise UpstreamError unless version, patches and used members are all there."""
    found = installed_version()
    if found != PINNED_VERSION:
        raise UpstreamError(
            f"sam {PINNED_VERSION}.postN needs sglang=={PINNED_VERSION}, found {found}. "
            f"Run: pip install --no-deps sglang=={PINNED_VERSION}, then "
            "scripts/apply_patches.sh."
        )
    missing = missing_patches()
    if missing:
        raise PatchMissing(missing)
    gone = [member for member in USED_MEMBERS if resolve(member) is None]
    if gone:
        raise UpstreamError(f"sglang=={found} lacks {', '.join(gone)}: is it modified?")


_LAZY = {
    "BASE_COMPONENT_TYPE": "sglang.srt.mem_cache.unified_cache.components",
    "BackupKV": "sglang.srt.mem_cache.unified_cache.cache_action",
    "BaseEvictionResult": "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface",
    "CacheInitParams": "sglang.srt.mem_cache.cache_init_params",
    "CacheRequestOutcome": "sglang.srt.mem_cache.base_prefix_cache",
    "EvictParams": "sglang.srt.mem_cache.base_prefix_cache",
    "EvictionStrategy": "sglang.srt.mem_cache.evict_policy",
    "FINISH_ABORT": "sglang.srt.managers.schedule_batch",
    "KvHintIngress": "sglang.srt.managers.kv_hints",
    "KvHintResult": "sglang.srt.managers.kv_hints",
    "KvHintsReqOutput": "sglang.srt.managers.io_struct",
    "TreeCacheBuildContext": "sglang.srt.mem_cache.registry",
    "UnifiedRadixCache": "sglang.srt.mem_cache.unified_radix_cache",
    "UnifiedTreeCore": "sglang.srt.mem_cache.unified_cache.unified_tree_core",
    "create_unified_radix_cache": "sglang.srt.mem_cache.registry",
    "decode_kv_hints_envelope": "sglang.srt.managers.kv_hints",
    "get_parallel": "sglang.srt.runtime_context",
}


def __getattr__(name: str) -> object:
    """Import on first use: the server process needs none of the scheduler's modules."""
    if name not in _LAZY:
        raise AttributeError(name)
    return getattr(importlib.import_module(_LAZY[name]), name)
