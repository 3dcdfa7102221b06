"""Which tree core carries the sessions: SGLang's Rust core where it serves, else Python's.

Owns the conditions and the message. Must never import the Rust extension where it is not to
be used: some devices have none.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.tree_core_registry import resolve_tree_core_backend

from sam.srt.mem_cache.tree_core import SessionTreeCore

logger = logging.getLogger(__name__)


def create_core(params: Any, components: dict[Any, Any]) -> Any:
    """Factory of the tree core backend `sam_rust`."""
    reason = None
    if set(components) != {BASE_COMPONENT_TYPE}:
        reason = "only full attention is followed"
    elif params.is_eagle:
        reason = "bigram keys are not followed"
    elif resolve_tree_core_backend("rust", params) != "rust":
        reason = "SGLang falls back (see its message above)"
    else:
        try:
            from sam.srt.mem_cache.shadow_core import ShadowTreeCore

            return ShadowTreeCore(params)
        except ImportError as error:
            reason = f"no Rust tree core here ({error})"
    logger.warning("sam: using the Python tree core: %s", reason)
    return SessionTreeCore(params, components)
