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
    "evict-frees-once": (
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache._flush_walk_frees"
    ),
}
"""Symbol that each patch of `patches/series` adds, as `module:name[.attribute]`."""

USED_MEMBERS: dict[str, tuple[str, ...]] = {
    "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore": (
        "_split_node",
        "_remove_leaf_from_parent",
        "_delete_unbacked_device_leaf",
        "_evict_host_leaf",
    ),
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache": (
        "checkpoint_into_tree",
        "check_hicache_events",
        "ready_to_load_host_cache",
        "claim_kv_row",
        "load_back",
        "_reset_full",
        "_apply_eviction_result",
        "_execute_and_commit_kv_backup",
        "_demote",
        "_component_available_size",
    ),
    "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache": ("on_release", "finish"),
}
"""Upstream members that the overlay overrides or calls, by `module:Class`; checked at start
and by `scripts/check_drift.py`."""


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


def missing_members() -> list[str]:
    members = [f"{owner}.{name}" for owner, names in USED_MEMBERS.items() for name in names]
    return [member for member in members if resolve(member) is None]


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
