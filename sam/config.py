"""Configuration of the overlay; the only reader of `SAM_*` environment variables.

Owns names, defaults and bounds. Must never be read on a hot path: objects keep what they
were given at start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import msgspec

from sam.core.sessions import SessionLimits

ENV_PREFIX = "SAM_"


class ConfigError(ValueError):
    """An environment variable has an unusable value; the text names it and what it takes."""


class SamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. Each is read from `SAM_<NAME IN CAPITALS>`."""

    max_sessions: int = 10_000
    max_sessions_per_tenant: int = 5_000
    session_idle_timeout_s: float = 3_600.0
    prefetch_lease_s: float = 30.0
    prefetch_pool_share: float = 0.5
    retain_pool_share: float = 0.25
    max_offload_in_flight_tokens: int = 65_536
    pool_manifest_bytes: int = 1 << 26
    pool_ledger_bytes: int = 1 << 26
    pool_group_pages: int = 16
    pool_max_jobs: int = 256
    pool_keep_alive_bytes: int = 1 << 30
    pool_keep_alive_s: float = 3.0
    max_pending_actions: int = 1_024
    max_in_flight_actions: int = 512
    max_in_flight_actions_per_tenant: int = 0
    max_pending_ranges: int = 64
    hint_rate_per_s: float = 500.0
    hint_burst: int = 0
    strict_hints: bool = False
    allow_control: bool = False
    max_remembered_actions: int = 4_096
    hint_result_ttl_s: float = 300.0
    max_hint_results: int = 4_096
    raise_on_error: bool = False
    tree_core: Literal["rust", "python"] = "rust"
    regret_guard: bool = True
    retention_policy: Literal["next-use", "lru", "session-ref"] = "next-use"
    admission: Literal["off", "shortest"] = "off"
    admission_aging: float = 0.02

    def in_flight_per_tenant(self) -> int:
        """Actions of one tenant on their way to the scheduler; unless set, half of all."""
        return self.max_in_flight_actions_per_tenant or max(1, self.max_in_flight_actions // 2)

    def burst(self) -> float:
        """Hint actions of one owner that may come at once; unless set, two seconds' worth."""
        return self.hint_burst or max(1.0, 2 * self.hint_rate_per_s)

    def session_limits(self) -> SessionLimits:
        return SessionLimits(
            max_sessions=self.max_sessions,
            max_per_tenant=self.max_sessions_per_tenant,
            max_named=self.max_sessions,
            idle_timeout_s=self.session_idle_timeout_s,
        )


HELP = {
    "max_sessions": "session records kept; the oldest ended, then the oldest idle ones go",
    "max_sessions_per_tenant": "session records kept per owner",
    "session_idle_timeout_s": "an idle session ends after this much message time",
    "prefetch_lease_s": "how long a prefetched session counts as resuming",
    "prefetch_pool_share": "largest share of the device pool for one prefetch",
    "retain_pool_share": "largest share of the device pool that one owner may have retained",
    "max_offload_in_flight_tokens": "tokens that one offload copies to the host at a time",
    "pool_manifest_bytes": "token ids kept per server to bring sessions back from the L3 pool",
    "pool_ledger_bytes": "what may be known of which pages in the L3 pool are whose",
    "pool_group_pages": "pages at a session's start that stay in the L3 pool when it ends",
    "pool_keep_alive_bytes": "pages of live sessions that are kept from ageing in the L3 pool",
    "pool_keep_alive_s": "how often they are renewed there; 0: never",
    "pool_max_jobs": "jobs that wait for the L3 pool; more are dropped",
    "max_pending_actions": "actions under way in the scheduler; more are dropped",
    "max_in_flight_actions": "actions the scheduler has not yet looked at; more are dropped",
    "max_in_flight_actions_per_tenant": "of these, of one owner; 0: half of them",
    "max_pending_ranges": "ranges that wait to be mapped to tokens; more are dropped",
    "hint_rate_per_s": "hint actions a second of one owner; more are dropped; 0: no bound",
    "hint_burst": "of these, how many may come at once; 0: two seconds' worth",
    "allow_control": "the live page at /sam/ may offload, prefetch and evict sessions",
    "strict_hints": "answer malformed hints with 400 instead of serving without them",
    "max_remembered_actions": "outcomes kept for idempotency by message and action id",
    "hint_result_ttl_s": "how long GET /kv_hints/{message_id} knows a message",
    "max_hint_results": "messages it knows, half of one client; of actions four times as many",
    "raise_on_error": "tests: an internal error stops the server instead of being counted",
    "regret_guard": "fall back to LRU while the next-use order misses more than it would",
    "retention_policy": "order in which cached KV goes: next-use, or SGLang's own two",
    "tree_core": "sessions over SGLang's Rust or Python tree core",
    "admission": "order of service: off (SGLang's), or shortest: least to compute first",
    "admission_aging": "with shortest: tokens of credit for each token prefilled during a wait",
}
"""What each setting means, for `--help`."""


def load_config(env: Mapping[str, str] | None = None) -> SamConfig:
    """The configuration from the environment. Raises ConfigError."""
    env = os.environ if env is None else env
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(SamConfig):
        name = ENV_PREFIX + field.name.upper()
        if name not in env:
            continue
        try:
            value = msgspec.convert(env[name], field.type, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name}={env[name]!r}: {error}") from None
        if isinstance(value, int | float) and not value >= 0:
            raise ConfigError(f"{name}={env[name]!r}: must not be negative")
        values[field.name] = value
    return SamConfig(**values)
