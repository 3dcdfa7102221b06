"""The arms of a comparison: which server, with which hints.

Owns: names, flags and hint modes. Must never give two arms another device, attention, pool or
model: what differs is listed in the arm, and nothing else does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Hints(StrEnum):
    """What a client sends. SESSION is SGLang's own `session_id` and a close at the end."""

    NONE = "none"
    SESSION = "session"
    LINEAGE = "lineage"
    MANAGE = "manage"
    IDLE = "idle"

    @property
    def has_lineage(self) -> bool:
        return self in (Hints.LINEAGE, Hints.MANAGE, Hints.IDLE)

    @property
    def manages(self) -> bool:
        return self in (Hints.MANAGE, Hints.IDLE)


@dataclass(frozen=True)
class Arm:
    """`url`: a server that runs already; else one is started with `flags`."""

    name: str
    about: str
    flags: tuple[str, ...] = ()
    hints: Hints = Hints.NONE
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""

    @property
    def schedule_policy(self) -> str:
        """The order of service: SGLang's name for it, or `SAM_SHORTEST`."""
        if self.url:
            return "as it runs"
        return SAM_SHORTEST if ADMISSION in self.flags else self._flag(POLICY, "fcfs")

    @property
    def write_policy(self) -> str:
        return "as it runs" if self.url else self._flag(WRITE_POLICY, "write_through")

    def _flag(self, name: str, default: str) -> str:
        return self.flags[self.flags.index(name) + 1] if name in self.flags else default


POLICY = "--schedule-policy"
WRITE_POLICY = "--hicache-write-policy"
SHORTEST_FIRST = "shortest-prefill-first"
ADMISSION = "--sam-admission"
SAM_SHORTEST = "sam-shortest"
_SAM = ("--radix-cache-backend", "sam")
_LPM = (POLICY, "lpm")
_SPF = (POLICY, SHORTEST_FIRST)
_ADM = (ADMISSION, "shortest")
_WB = (WRITE_POLICY, "write_back")
_TLRU = ("--radix-eviction-policy", "tlru")
_SESSION = ("--enable-session-radix-cache",)
ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("stock", "SGLang's default: HiCache, LRU, fcfs"),
        Arm("stock-lpm", "stock, longest prefix first", _LPM),
        Arm("stock-session", "stock, --enable-session-radix-cache", _SESSION, Hints.SESSION),
        Arm("stock-tlru", "stock, tail-optimized LRU", _TLRU),
        Arm("sam-lineage", "sam, sessions only, nothing managed", _SAM, Hints.LINEAGE),
        Arm("sam-hints", "sam, hints as openJiuwen sends them", _SAM, Hints.MANAGE),
        Arm("sam-idle", "the same and expected_idle_s", _SAM, Hints.IDLE),
        Arm("sam-hints-lpm", "sam-hints, longest prefix first", (*_SAM, *_LPM), Hints.MANAGE),
        Arm("sam-idle-lpm", "sam-idle, longest prefix first", (*_SAM, *_LPM), Hints.IDLE),
        Arm("sam-plain", "sam, no hints at all", _SAM),
        Arm("stock-spf", "stock, shortest prefill first", _SPF),
        Arm("sam-hints-spf", "sam-hints, shortest prefill first", (*_SAM, *_SPF), Hints.MANAGE),
        Arm("sam-idle-spf", "sam-idle, shortest prefill first", (*_SAM, *_SPF), Hints.IDLE),
        Arm("stock-spf-wb", "stock-spf, host copies when evicted", (*_SPF, *_WB)),
        Arm("sam-hints-spf-wb", "sam-hints with both", (*_SAM, *_SPF, *_WB), Hints.MANAGE),
        Arm("sam-idle-spf-wb", "sam-idle with both", (*_SAM, *_SPF, *_WB), Hints.IDLE),
        Arm("sam-hints-adm-wb", f"sam-hints-wb, {ADMISSION}", (*_SAM, *_ADM, *_WB), Hints.MANAGE),
        Arm("sam-idle-adm-wb", f"sam-idle-wb, {ADMISSION}", (*_SAM, *_ADM, *_WB), Hints.IDLE),
    )
}
DEFAULT_ARMS = tuple(ARMS)[:9]


def tlru_flags(threshold_tokens: int) -> tuple[str, ...]:
    """T-LRU is LRU without a threshold: tokens of a tail that may be recomputed."""
    return ("--radix-eviction-policy-config", json.dumps({"threshold": threshold_tokens}))


def external(text: str) -> Arm:
    """`NAME=URL` or `NAME=URL,HINTS`. Raises ValueError."""
    name, _, rest = text.partition("=")
    url, _, hints = rest.partition(",")
    if not name or name in ARMS or not url.startswith(("http://", "https://")):
        raise ValueError(f"{text!r}: expected NAME=http://HOST:PORT[,HINTS], a new NAME")
    if hints and hints not in list(Hints):
        raise ValueError(f"{text!r}: hints are one of {', '.join(Hints)}")
    return Arm(name, f"external, {url}", hints=Hints(hints or "none"), url=url.rstrip("/"))
