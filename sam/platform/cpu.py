"""Out-of-tree SGLang platform for machines without an accelerator.

Owns: the decision whether this platform is active, and its device facts. Must never compete with
real hardware: `activate()` answers None as soon as anything faster than the CPU can be seen, or
when the user asked for SGLang's own CPU engine.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

logger = logging.getLogger(__name__)

ENTRY_POINT = "sam_cpu"
ATTENTION_BACKEND = "sam_cpu"
_QUALNAME = f"{__name__}:SamCpuPlatform"


@contextmanager
def _cuda_probe_without_init() -> Iterator[None]:
    """Let `torch.cuda.is_available` ask NVML, so that a later fork can still use CUDA."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def find_accelerator() -> str | None:
    """Name of the accelerator this process can use, or None.

    Looks at CUDA/ROCm, every other device type with a torch module of its own (xpu, mps, and
    plugged-in ones: npu, musa, hpu), then at `torch.accelerator` for types not known here.
    """
    with _cuda_probe_without_init():
        if torch.cuda.is_available():
            return "rocm" if torch.version.hip else "cuda"
        for name in ("npu", "xpu", "mps", "musa", "hpu"):
            module = getattr(torch, name, None)
            if module is not None and module.is_available():
                return name
        if torch.accelerator.is_available():
            return torch.accelerator.current_accelerator().type
    return None


def activate() -> str | None:
    """Entry point of group `sglang.srt.platforms`.

    Returns the platform class as `module:class`, or None to leave the choice to SGLang: with an
    accelerator present, or with `SGLANG_USE_CPU_ENGINE=1` (SGLang's own CPU engine).
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    accelerator = find_accelerator()
    if accelerator is not None:
        logger.debug("sam CPU platform not used: %s is available", accelerator)
        return None
    return _QUALNAME


class SamCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU as an out-of-tree platform: every op takes its `forward_native` path.

    No Triton, no graph capture, no pinned memory. Source: `sglang.srt.platforms.interface`.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Eager: the few compiled helpers are not worth a C++ build per start."""
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def apply_server_args_defaults(self, server_args) -> None:
        """Replace the HiCache `kernel` transfers, which need CUDA, by `direct` ones."""
        if server_args.hicache_io_backend == "kernel":
            if server_args.enable_hierarchical_cache:
                logger.info("sam CPU platform: HiCache uses --hicache-io-backend direct")
            server_args.hicache_io_backend = "direct"

    def init_backend(self) -> None:
        """Install the shims in every worker; unlike a plugin's, an error here stops the start."""
        from sam.platform import shims

        shims.install()
