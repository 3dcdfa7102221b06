"""What tokens cost in seconds: the simulator's only notion of hardware.

Owns the rates and the file they come in. Must never measure anything: rates are given, by
`python -m sam.bench costs` or by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from sam.sim.trace import TraceError, Turn


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in tokens per second. The defaults are those of a GPU server in round numbers.

    `request_s`: of a request that computes one token, all in all; only `sam.bench.predict` counts
    it, since it is not the engine's time alone.
    """

    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 50.0
    load_back_tokens_per_s: float = 200_000.0
    pool_tokens_per_s: float = 50_000.0
    request_s: float = 0.0

    def prefill_s(self, recomputed_tokens: int, loaded_tokens: int, pooled_tokens: int) -> float:
        """Time that one request occupies the engine before its first token."""
        return (
            recomputed_tokens / self.prefill_tokens_per_s
            + loaded_tokens / self.load_back_tokens_per_s
            + pooled_tokens / self.pool_tokens_per_s
        )

    def decode_s(self, turn: Turn) -> float:
        return turn.output_tokens / self.decode_tokens_per_s


class CostsFile(msgspec.Struct, frozen=True, kw_only=True):
    """Rates and where they come from."""

    costs: Costs
    machine: str = ""
    model: str = ""
    software: str = ""
    date: str = ""
    method: str = ""


def load(path: str) -> CostsFile:
    """Rates from a file, or `CPU`: those that come with sam for the 25 M model.

    Raises TraceError, which names the file and what is wrong with it.
    """
    if path == CPU:
        return SHIPPED["small"]
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=CostsFile)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}: no costs: {error}") from error
    rates = msgspec.structs.asdict(found.costs)
    for name, rate in rates.items():
        if not rate > 0 and (name != "request_s" or rate < 0):
            raise TraceError(f"{path}: {name} must be more than 0")
    return found


CPU = "cpu"
_HERE = "2 cores, 24 GiB, x86_64 Linux; load average "
_METHOD = "medians of {} prompts of 2048 tokens, one at a time, each against a device hit"
SHIPPED: Mapping[str, CostsFile] = {
    "small": CostsFile(
        costs=Costs(
            prefill_tokens_per_s=1_134.6,
            decode_tokens_per_s=55.2,
            load_back_tokens_per_s=49_169.8,
            pool_tokens_per_s=43_551.0,
        ),
        machine=_HERE + "9.6",
        model="small",
        software="SGLang 0.5.23",
        date="2026-12-01",
        method=_METHOD.format(3),
    ),
    "tiny": CostsFile(
        costs=Costs(
            prefill_tokens_per_s=37_017.8,
            decode_tokens_per_s=429.9,
            load_back_tokens_per_s=1_378_951.7,
            pool_tokens_per_s=30_775.4,
            request_s=0.0297,
        ),
        machine=_HERE + "8.4",
        model="tiny",
        software="SGLang 0.5.23",
        date="2026-12-01",
        method=_METHOD.format(5) + "; lower bounds, no time was to be seen: host",
    ),
}
"""What `python -m sam.bench costs --model NAME` said on a busy machine of ours, by NAME. That for
`small` is from before `request_s` was measured."""
