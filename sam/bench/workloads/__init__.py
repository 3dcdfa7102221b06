"""Workloads of `python -m sam.bench replay`: who says what to a server, when, and with which hint.

Owns: the choice of a workload by name. Every workload is a pure function of its spec: equal
specs give equal plans. Must never talk to a server or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from sam.bench.workloads.plan import Plan
from sam.bench.workloads.spec import WorkloadSpec
from sam.bench.workloads.text import Vocabulary

WORKLOADS = {
    "swarm": "10 users at once, leader and sub-agents, compression, pauses, ends; shaped by traces",
    "coding": "16 coding agents at once, shaped by the Claude Code sessions",
    "mixed": "the swarm, half of the users without hints",
    "nohints": "the swarm, nobody sends a hint",
    "adversarial": "wrong hints: false ends, unused prefetches, invented sessions, odd gaps",
    "trace": "your own trace (--trace FILE), any format that sam.sim reads",
}
_MODULES = {"mixed": "swarm", "nohints": "swarm"}


def build(name: str, spec: WorkloadSpec, words: Vocabulary) -> Plan:
    """The plan of a workload. Raises `sam.sim.trace.TraceError` for a file that is no trace."""
    module = import_module(f"{__name__}.{_MODULES.get(name, name)}")
    make: Callable[..., Plan] = getattr(module, f"plan_{name}")
    return make(spec, words)
