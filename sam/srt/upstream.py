"""The only importer of private SGLang names, and the proof that this SGLang is the right one.

Owns the pinned version, the patch markers and the list of upstream members that the overlay
overrides or calls. Must never work around a missing one: a wrong version, a missing patch
or a vanished member is an error with the remedy in its text. Elsewhere below `sam.srt`
only public names are imported; private members are listed here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

PINNED_VERSION = "0.5.23"

PATCH_MARKERS: dict[str, str] = {
    "kv-hint-ingress": "sglang.srt.managers.kv_hint_ingress:register_kv_hint_ingress",
    "openai-kv-hints": "sglang.srt.entrypoints.openai.protocol:ChatCompletionRequest.agent_hint",
    "kv-hints-control-message": "sglang.srt.managers.io_struct:KvHintsReqInput",
    "request-queued-hook": (
        "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.on_request_queued"
    ),
    "evict-frees-once": (
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache._flush_walk_frees"
    ),
    "storage-batch-remove": (
        "sglang.srt.mem_cache.hicache_storage:HiCacheStorage.batch_remove"
    ),
    "storage-write-session": (
        "sglang.srt.mem_cache.unified_radix_cache:_OngoingWriteThrough.session_id"
    ),
    "waiting-queue-order": (
        "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.waiting_queue_order"
    ),
}
"""Symbol that each patch of `patches/series` adds, as `module:name[.attribute]`."""

USED_MEMBERS: dict[str, tuple[str, ...]] = {
    "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore": (
        "reset",
        "evict_device_start",
        "evict_device_next_node",
        "evict_device_end",
        "drive_host_eviction",
        "_split_node",
        "_remove_leaf_from_parent",
        "_unregister_node",
        "_update_evictable_leaf_sets",
        "_is_device_leaf",
        "_is_host_leaf",
        "_delete_unbacked_device_leaf",
        "_evict_host_leaf",
        "_reclaim_full_host_duplicates",
        "_node_arena",
        "root_node",
        "is_write_back",
        "evictable_device_leaves",
        "evictable_host_leaves",
    ),
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache": (
        "checkpoint_into_tree",
        "check_hicache_events",
        "ready_to_load_host_cache",
        "claim_kv_row",
        "init_hicache",
        "load_back",
        "has_free_load_back_slot",
        "sanity_check",
        "shutdown",
        "prefetch_from_storage",
        "write_backup_storage",
        "attach_storage_backend",
        "clear_storage_backend",
        "insert",
        "check_prefetch_progress",
        "pop_prefetch_loaded_tokens",
        "release_aborted_request",
        "get_last_hash_value",
        "get_prefix_hash_values",
        "is_backuped",
        "is_root",
        "prefetch_stop_policy",
        "prefetch_threshold",
        "hicache_storage_pass_prefix_keys",
        "ongoing_prefetch",
        "ongoing_backup",
        "enable_storage",
        "_all_reduce",
        "_evict",
        "_match_tree",
        "_reset_full",
        "_apply_eviction_result",
        "_flush_walk_frees",
        "_walk_frees",
        "_execute_and_commit_kv_backup",
        "_demote",
        "_component_available_size",
        "tree_core",
        "cache_controller",
        "ongoing_write_through",
        "ongoing_load_back",
    ),
    "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache": (
        "on_release",
        "finish",
        "waiting_queue_order",
    ),
    "sglang.srt.mem_cache.hicache_storage:HiCacheStorageFailureInjector": ("_backend",),
    "sglang.srt.mem_cache.hicache_storage:HiCacheFile": ("_evictor", "_get_suffixed_key"),
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController": (
        "_page_backup",
        "_page_transfer_kv_batch",
        "backup_skip",
    ),
    "sglang.srt.mem_cache.storage.file.lru_file_evictor:LRUFileEvictor": ("enabled", "touch"),
    "sglang.srt.entrypoints.openai.serving_base:OpenAIServingBase": ("_resolve_lora_path",),
    "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat": (
        "_validate_request",
        "_convert_to_internal_request",
        "_handle_non_streaming_request",
        "_generate_chat_stream",
    ),
    "sglang.srt.entrypoints.openai.protocol:ChatCompletionRequest": (
        "_format_add_generation_prompt",
    ),
    "sglang.srt.server_args:ServerArgs": ("add_cli_args", "from_cli_args"),
}
"""Upstream members that the overlay overrides, hooks, or calls by a private name, by
`module:Class`; what a method sets on `self` counts. Checked at start and by
`scripts/check_drift.py`."""

USED_RUST_MEMBERS: dict[str, tuple[str, ...]] = {
    "sglang.srt.mem_cache.rust_tree_core.adapter:RustUnifiedTreeCore": (
        "reset",
        "match_prefix",
        "begin_insert",
        "resume_insert",
        "end_insert",
        "insert_host",
        "inc_lock_ref",
        "dec_lock_ref",
        "inc_host_lock_ref",
        "dec_host_lock_ref",
        "commit_backup",
        "mark_write_through_pending",
        "finish_write_through",
        "commit_load_back",
        "finish_load_back",
        "evict_device_start",
        "evict_device_next_node",
        "evict_device_leaf",
        "evict_device_end",
        "demote",
        "drop_subtree_no_host",
        "drive_host_eviction",
        "collect_path_info",
        "set_host_memory_buffer_only",
        "is_host_memory_buffer_only",
        "is_backuped",
        "inc_full_pin",
        "dec_full_pin",
        "full_protected_size",
        "full_evictable_size",
        "root_node_handle",
        "match_full_device_prefix",
        "build_storage_backup_spec",
        "snapshot_buffer_backup",
        "is_write_back",
        "page_size",
        "_binding",
        "_bindings",
        "_cache_actions_from_tagged",
        "_match_result_from_binding",
        "_insert_step_from_binding",
    ),
    "sglang.srt.mem_cache.rust_tree_core.extension:RustUnifiedTreeCoreBinding": (
        "inc_lock_ref",
        "dec_lock_ref",
        "evict_device_leaf",
        "collect_path_info",
        "node_backuped",
        "is_full_device_evicted",
        "validate_buffer_backup",
    ),
}
"""The same of the Rust core; checked where SGLang can import it, which is not on every
device."""


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


def real_storage(backend: object) -> object:
    """The storage backend without SGLang's failure injection around it."""
    injector = resolve("sglang.srt.mem_cache.hicache_storage:HiCacheStorageFailureInjector")
    return backend._backend if isinstance(backend, injector) else backend


def touch_files(backend: object, keys: list[str]) -> None:
    """Make pages of the `file` backend the last that its size bound takes."""
    if not backend._evictor.enabled:
        return
    for key in reversed(keys):
        name = backend._get_suffixed_key(key)
        backend._evictor.touch(name, os.path.join(backend.file_path, f"{name}.bin"))


def file_size(backend: object, key: str) -> int | None:
    """Bytes of a page of the `file` backend, None where there is none."""
    name = backend._get_suffixed_key(key)
    try:
        return os.path.getsize(os.path.join(backend.file_path, f"{name}.bin"))
    except FileNotFoundError:
        return None


@contextmanager
def pool_names_tell_format() -> Iterator[None]:
    """A storage backend that is attached meanwhile names pages by KV dtype and layout, too:
    SGLang's keys hold neither, and pages of the same size would be taken for one another."""
    module = importlib.import_module("sglang.srt.managers.cache_controller")
    inner = module.storage_model_name

    def storage_model_name(model_name: str | None, host_pool: object) -> str:
        dtype = str(host_pool.dtype).removeprefix("torch.")
        parts = (inner(model_name, host_pool), dtype, host_pool.layout)
        return "-".join(part for part in parts if part)

    module.storage_model_name = storage_model_name
    try:
        yield
    finally:
        module.storage_model_name = inner


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


def missing_members() -> list[str]:
    tables = [USED_MEMBERS, *([USED_RUST_MEMBERS] if has_rust_core() else [])]
    return [
        f"{owner}.{name}"
        for table in tables
        for owner, names in table.items()
        for name in names
        if not _has_member(owner, name)
    ]


def has_rust_core() -> bool:
    """Whether SGLang's Rust tree core can be imported here."""
    try:
        importlib.import_module("sglang.srt.mem_cache.rust_tree_core.adapter")
    except Exception:
        return False
    return True


def _has_member(owner: str, name: str) -> bool:
    if resolve(f"{owner}.{name}") is not None:
        return True
    cls = resolve(owner)
    bodies = [member for base in getattr(cls, "__mro__", ()) for member in vars(base).values()]
    return any(name in body.__code__.co_names for body in bodies if hasattr(body, "__code__"))


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
    gone = missing_members()
    if gone:
        raise UpstreamError(f"sglang=={found} lacks {', '.join(gone)}: is it modified?")
