"""Sizes of a workload and where its shape comes from.

Owns: the scale between a trace and the CPU model, printed with every report. Must never change
a shape beyond the two factors and the cap that it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WorkloadSpec:
    """`lengths`: model tokens per token of the trace. `gaps`: seconds per second of the trace,
    after a cut at `max_gap_s` (of the trace). `turns`: most turns of one agent. `waves`: how
    often a leader of the swarm calls members."""

    seed: int = 0
    users: int = 10
    turns: int = 10
    lengths: float = 0.02
    gaps: float = 0.05
    max_gap_s: float = 300.0
    waves: int = 2
    traces: Path | None = None
    trace: str | None = None
    tool_calls: bool = False

    def tokens(self, of_trace: float) -> int:
        return round(of_trace * self.lengths)

    def seconds(self, of_trace: float) -> float:
        return round(min(max(of_trace, 0.0), self.max_gap_s) * self.gaps, 3)

    def about(self) -> str:
        return (
            f"lengths x {self.lengths:g}, gaps x {self.gaps:g} "
            f"(of at most {self.max_gap_s:g} s), seed {self.seed}"
        )
