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
    max_pending_actions: int = 1_024
    max_in_flight_actions: int = 512
    max_remembered_actions: int = 4_096
    hint_result_ttl_s: float = 300.0
    max_hint_results: int = 4_096
    raise_on_error: bool = False
    tree_core: Literal["python", "rust"] = "python"

    def session_limits(self) -> SessionLimits:
        return SessionLimits(
            max_sessions=self.max_sessions,
            max_per_tenant=self.max_sessions_per_tenant,
            max_named=self.max_sessions,
            idle_timeout_s=self.session_idle_timeout_s,
        )


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
