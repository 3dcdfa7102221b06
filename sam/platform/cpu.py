"""Entry point of the CPU platform: is it wanted here?

Owns: the decision whether this platform is active. Must never compete with real hardware:
`activate()` answers None as soon as anything faster than the CPU can be seen, or when the user
asked for SGLang's own CPU engine. Must never import SGLang: SGLang resolves its platform while
it is being imported, and would find this module half made.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger(__name__)

ENTRY_POINT = "sam_cpu"
ATTENTION_BACKEND = "sam_cpu"
_QUALNAME = "sam.platform.device:SamCpuPlatform"


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
    # For the server's processes, which inherit it. OpenMP threads that spin at their barriers
    # make a decode step ten times slower as soon as another process wants one of the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return _QUALNAME
