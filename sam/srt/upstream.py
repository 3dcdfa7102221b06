"""The only importer of private SGLang names, and the proof that this SGLang is the right one.

Owns the pinned version, the patch markers and the list of upstream members that the overlay
overrides or calls. Must never work around a missing one: a wrong version, a missing patch
or a vanished member is an error with the remedy in its text. Elsewhere below `sam.srt`
only public names are imported; private members are listed here.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

PINNED_VERSION = "0.5.23"

PATCH_MARKERS: dict[str, str] = {
    "kv-hint-ingress": "sglang.srt.managers.kv_hint_ingress:register_kv_hint_ingress",
    "openai-kv-hints": "sglang.srt.entrypoints.openai.protocol:ChatCompletionRequest.agent_hint",
    "kv-hints-control-message": "sglang.srt.managers.io_struct:KvHintsReqInput",
    "request-queued-hook": (
        "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.on_request_queued"
    ),
}
"""Symbol that each patch of `patches/series` adds, as `module:name[.attribute]`."""

_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
USED_MEMBERS: tuple[str, ...] = (
    f"{_CORE}._split_node",
    f"{_CORE}._remove_leaf_from_parent",
    f"{_CORE}._delete_unbacked_device_leaf",
    f"{_CORE}._evict_host_leaf",
    f"{_CACHE}.checkpoint_into_tree",
    f"{_CACHE}.check_hicache_events",
    f"{_CACHE}.ready_to_load_host_cache",
    f"{_CACHE}.claim_kv_row",
    f"{_CACHE}.load_back",
    f"{_CACHE}._reset_full",
    f"{_CACHE}._apply_eviction_result",
    f"{_CACHE}._execute_and_commit_kv_backup",
    f"{_CACHE}._demote",
    f"{_CACHE}._component_available_size",
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
