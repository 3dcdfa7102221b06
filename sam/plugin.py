"""Entry point of group `sglang.srt.plugins`: the only caller of upstream's `register_*`.

Must never raise for a server that does not use sam: SGLang logs plugin errors and goes on,
so everything that has to stop a start is checked where `--radix-cache-backend sam` is built.
"""

from __future__ import annotations

import sys
from typing import Any

BACKEND = "sam"


def register() -> None:
    """Make `--radix-cache-backend sam` and `--sam-*` known, and install the CPU shims where
    they apply."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
        register_tree_core_backend,
    )

    from sam.platform import shims
    from sam.srt import upstream
    from sam.srt.entrypoints.cli_args import install_options

    register_radix_cache_backend(BACKEND, create_cache)
    register_tree_core_backend("sam_python", create_tree_core)
    register_tree_core_backend("sam_rust", create_rust_tree_core)
    if upstream.resolve(upstream.PATCH_MARKERS["kv-hint-ingress"]) is not None:
        from sglang.srt.managers.kv_hint_ingress import register_kv_hint_ingress

        register_kv_hint_ingress(create_ingress)
    shims.install()
    install_options()


def create_cache(ctx: Any) -> Any:
    """Factory of `--radix-cache-backend sam`. Raises UpstreamError or ValueError."""
    from sam.srt import upstream

    upstream.verify()
    _refuse_unsupported(ctx)
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.runtime_context import get_observability

    from sam.config import load_config
    from sam.srt.mem_cache.cache import SessionRadixCache

    cache_class = SessionRadixCache
    if get_observability().enable_trace:
        from sam.srt.observability.tracing import TracedRadixCache as cache_class
    ctx.params.tree_core_backend = f"sam_{load_config().tree_core}"
    return create_unified_radix_cache(ctx, cache_class=cache_class)


def create_tree_core(params: Any, components: dict[Any, Any]) -> Any:
    from sam.srt.mem_cache.tree_core import SessionTreeCore

    return SessionTreeCore(params, components)


def create_rust_tree_core(params: Any, components: dict[Any, Any]) -> Any:
    from sam.srt.mem_cache.core_choice import create_core

    return create_core(params, components)


def create_ingress(tokenizer_manager: Any) -> Any | None:
    """The hint ingress of a server that runs with sam, else None."""
    if tokenizer_manager.server_args.radix_cache_backend != BACKEND:
        return None
    from sam.srt.entrypoints.ingress import AgentHintIngress

    ingress_class = AgentHintIngress
    if tokenizer_manager.enable_trace:
        from sam.srt.observability.tracing import TracedIngress as ingress_class
    ingress = ingress_class(tokenizer_manager)
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http_server is not None:
        from sam.srt.entrypoints.page import install_page
        from sam.srt.entrypoints.routes import install_routes
        from sam.srt.entrypoints.tool_wait import install_tool_wait

        install_routes(http_server.app, ingress)
        install_page(http_server.app, ingress)
        install_tool_wait()
    return ingress


def _refuse_unsupported(ctx: Any) -> None:
    from sglang.srt.runtime_context import get_memory, get_schedule, get_serving

    from sam.config import load_config
    from sam.srt.managers.admission_order import refusal

    reason = None
    if ctx.is_hybrid_swa or ctx.is_hybrid_ssm:
        kind = "sliding-window" if ctx.is_hybrid_swa else "Mamba/linear-attention"
        reason = (
            f"hybrid {kind} models are not supported yet: their cache has more than one "
            "component per token"
        )
    elif ctx.disable_radix_cache:
        reason = "--disable-radix-cache leaves nothing to manage"
    elif get_serving().tokenizer_worker_num > 1:
        reason = (
            "--tokenizer-worker-num above 1 starts workers that load no plugins: hints would "
            "be lost there"
        )
    elif get_memory().enable_session_radix_cache:
        reason = "--enable-session-radix-cache is replaced by sam's own sessions"
    elif ctx.params.eviction_policy.lower() != "lru":
        reason = (
            f"--radix-eviction-policy {ctx.params.eviction_policy} has no effect: sam orders "
            "by next use (--sam-retention-policy)"
        )
    elif (
        get_memory().enable_hierarchical_cache
        and get_memory().hicache_host_memory_mode == "buffer_only"
    ):
        reason = "--hicache-host-memory-mode buffer_only has no host tier to offload to"
    else:
        reason = refusal(load_config(), get_schedule())
    if reason is not None:
        raise ValueError(
            f"--radix-cache-backend sam: {reason}. Drop that option, or start without "
            "--radix-cache-backend sam."
        )
