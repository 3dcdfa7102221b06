"""Everything the overlay sets inside SGLang and torch so that HiCache runs on the CPU platform.

Owns: every attribute set for that purpose, in `install()`, and nowhere else. Must never act
unless the sam CPU platform is the active one, and must never skip a missing upstream symbol:
each is checked and named, with the SGLang version these shims were written for.
"""

import functools
import inspect
import logging
from types import ModuleType
from typing import Any

import torch

from sam.platform import transfers
from sam.platform.cpu import ATTENTION_BACKEND

logger = logging.getLogger(__name__)

SGLANG_VERSION = "0.5.23"
HOST_RESERVE_BYTES = 1 << 30
_DIRECT_OPS = {  # host pool method: operators it calls with io backend `direct`
    "load_to_device_per_layer": ("transfer_kv_direct", "transfer_kv_per_layer_direct_pf_lf"),
    "backup_from_device_all_layer": (
        "transfer_kv_direct",
        "transfer_kv_all_layer_direct_lf_pf",
    ),
}
_installed = False


class ShimTargetMissing(RuntimeError):
    """SGLang has no longer what a shim attaches to."""

    def __init__(self, what: str):
        super().__init__(
            f"sam CPU platform: {what} not found; the shims in sam.platform are written for "
            f"sglang=={SGLANG_VERSION}. Install that version, or uninstall sam to run without."
        )


def is_active() -> bool:
    """Whether SGLang runs on the sam CPU platform in this process."""
    from sglang.srt.platforms import current_platform

    from sam.platform.device import SamCpuPlatform

    return isinstance(current_platform, SamCpuPlatform)


def install() -> bool:
    """Install all shims once per process; True if they are in place afterwards.

    No-op (False) when another platform is active. Raises `ShimTargetMissing`.
    """
    global _installed
    if not is_active():
        return False
    if not _installed:
        _install_streams()
        _install_host_pools()
        _install_transfers()
        _install_allocator()
        _install_attention()
        _installed = True
        logger.info("sam CPU platform: HiCache and attention shims installed")
    return True


def _require(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        label = owner.__name__ if hasattr(owner, "__name__") else repr(owner)
        raise ShimTargetMissing(f"{label}.{name}") from None


def _install_streams() -> None:
    """`synchronize` on `torch.cpu.Stream`: every CPU operation is done when it returns."""
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None


def alloc_unpinned(
    dims: tuple,
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """Host pool buffer `[*dims]` from its storage allocator, never pinned or registered.

    Signature of the entries in `pool_host.common.ALLOC_MEMORY_FUNCS`.
    """
    return allocator.allocate(dims, dtype=dtype, device=device)


def _install_host_pools() -> None:
    """Unpinned host pools. Pinned ones break L3: the read buffer fails, and reads end as misses."""
    from sglang.srt.mem_cache.pool_host import base, common

    _require(common, "ALLOC_MEMORY_FUNCS")["cpu"] = alloc_unpinned
    _require(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES")
    # Upstream keeps 10 GiB of host memory free, more than many CPU runners have.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = HOST_RESERVE_BYTES
    init = _require(base, "HostKVCache").__init__
    if "pin_memory" not in inspect.signature(init).parameters:
        raise ShimTargetMissing("argument pin_memory of HostKVCache.__init__")

    @functools.wraps(init)
    def unpinned_init(self, *args, **kwargs):
        bound = inspect.signature(init).bind(self, *args, **kwargs)
        bound.arguments["pin_memory"] = False
        init(*bound.args, **bound.kwargs)

    base.HostKVCache.__init__ = unpinned_init


def _install_transfers() -> None:
    """The `direct` transfer operators of the MHA and MLA host pools.

    Off CUDA these modules do not have the names at all; that the pools still call them is read
    from their code.
    """
    from sglang.srt.mem_cache.pool_host import mha, mla

    for module, pool in ((mha, "MHATokenToKVPoolHost"), (mla, "MLATokenToKVPoolHost")):
        for method_name, names in _DIRECT_OPS.items():
            method = _require(_require(module, pool), method_name)
            for name in names:
                if name not in method.__code__.co_names:
                    raise ShimTargetMissing(f"the use of {name} in {pool}.{method_name}")
                setattr(module, name, getattr(transfers, name))
        _forbid_kernel_ops(module)


def _forbid_kernel_ops(module: ModuleType) -> None:
    """Say how to start the server where upstream would fail with a NameError mid-request."""
    for name in (
        "transfer_kv_per_layer",
        "transfer_kv_all_layer",
        "transfer_kv_per_layer_mla",
        "transfer_kv_all_layer_mla",
    ):
        if not hasattr(module, name):
            setattr(module, name, functools.partial(_no_kernel_op, name))


def _no_kernel_op(name: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"{name} needs a CUDA device: start the server with --hicache-io-backend direct"
    )


def _install_allocator() -> None:
    """Paged allocation picks Triton by the attention backend's name: give it the torch version."""
    from sglang.srt.mem_cache import allocation

    _require(allocation, "get_last_loc_triton")
    allocation.get_last_loc_triton = _require(allocation, "get_last_loc_torch")


def _install_attention() -> None:
    """Make `--attention-backend sam_cpu` known; it is this platform's default."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    if ATTENTION_BACKEND not in _require(choices, "ATTENTION_BACKEND_CHOICES"):
        _require(choices, "add_attention_backend_choices")([ATTENTION_BACKEND])
    register = _require(attention_registry, "register_attention_backend")

    @register(ATTENTION_BACKEND)
    def create_sam_cpu_backend(runner):
        from sam.platform.attention import SamCpuAttnBackend

        return SamCpuAttnBackend(runner)
