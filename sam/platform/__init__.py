"""CPU platform of the overlay: SGLang, with HiCache, on machines without an accelerator.

Owns: the platform plugin (`cpu`), the HiCache and allocator shims (`shims`), the CPU attention
backend (`attention`). Must never change anything when an accelerator is present, and must never
import SGLang at package import: `activate()` runs while SGLang resolves its platform.
"""
