"""What tokens cost in seconds: the simulator's only notion of hardware.

Owns the rates. Must never measure anything: rates are given.
"""

from __future__ import annotations

import msgspec

from sam.sim.trace import Turn


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in tokens per second."""

    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 50.0
    load_back_tokens_per_s: float = 200_000.0
    pool_tokens_per_s: float = 50_000.0

    def prefill_s(self, recomputed_tokens: int, loaded_tokens: int, pooled_tokens: int) -> float:
        """Time that one request occupies the engine before its first token."""
        return (
            recomputed_tokens / self.prefill_tokens_per_s
            + loaded_tokens / self.load_back_tokens_per_s
            + pooled_tokens / self.pool_tokens_per_s
        )

    def decode_s(self, turn: Turn) -> float:
        return turn.output_tokens / self.decode_tokens_per_s
