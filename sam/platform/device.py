"""The out-of-tree platform class itself: a CPU as SGLang's device.

Owns: device facts and server defaults of the CPU platform. Must never be imported before SGLang
has resolved its platform (see `cpu`): SGLang loads it, everyone else asks `shims.is_active()`.
"""

import logging

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sam.platform.cpu import ATTENTION_BACKEND

logger = logging.getLogger(__name__)


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
        """Fill in what SGLang would choose badly for its device `cpu`.

        The attention backend, because upstream has set one by device name before it asks the
        platform: `intel_amx` on x86, whose kernels are not in the wheel. (On arm64 it is
        `torch_native`, as if the user had asked for it: name `sam_cpu` there.) And the HiCache
        transfers, whose default needs CUDA.
        """
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.hicache_io_backend == "kernel":
            if server_args.enable_hierarchical_cache:
                logger.info("sam CPU platform: HiCache uses --hicache-io-backend direct")
            server_args.hicache_io_backend = "direct"

    def init_backend(self) -> None:
        """Install the shims in every worker; unlike a plugin's, an error here stops the start."""
        from sam.platform import shims

        shims.install()
