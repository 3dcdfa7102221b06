"""Counters and gauges of the overlay, in memory always and in Prometheus where enabled.

Owns metric names. Must never use a session id, tenant or message id as a label.
`prometheus_client` is imported on first use: SGLang sets its multi-process directory first.
"""

from __future__ import annotations

from typing import Any


class IngressMetrics:
    """Hints as they arrive at the server process."""

    def __init__(self, *, enabled: bool) -> None:
        self._counts = {"accepted_actions": 0, "rejected_hints": 0, "unknown_keys": 0}
        self._reasons: dict[str, int] = {}
        self._accepted: Any = None
        if enabled:
            from prometheus_client import Counter

            self._accepted = Counter(
                "sglang:sam_accepted_actions_total", "Hint actions taken at ingress."
            )
            self._rejected = Counter(
                "sglang:sam_rejected_hints_total",
                "Malformed hints; the inference was served without.",
                labelnames=["reason"],
            )
            self._unknown = Counter(
                "sglang:sam_unknown_hint_keys_total", "Unknown keys in hints, ignored."
            )

    def accepted(self, n_actions: int) -> None:
        self._counts["accepted_actions"] += n_actions
        if self._accepted is not None:
            self._accepted.inc(n_actions)

    def rejected(self, reason: str) -> None:
        self._counts["rejected_hints"] += 1
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        if self._accepted is not None:
            self._rejected.labels(reason=reason).inc()

    def unknown_keys(self, n_keys: int) -> None:
        self._counts["unknown_keys"] += n_keys
        if self._accepted is not None:
            self._unknown.inc(n_keys)

    def snapshot(self) -> dict[str, Any]:
        return {**self._counts, "rejected_by_reason": dict(self._reasons)}


class SchedulerMetrics:
    """Sessions and actions of one scheduler; exported by one rank only."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        self._sessions = Gauge(
            "sglang:sam_sessions",
            "Sessions in the table.",
            multiprocess_mode="mostrecent",
        )
        self._pending = Gauge(
            "sglang:sam_pending_actions",
            "Hint actions that wait for a lock, a transfer or a request.",
            multiprocess_mode="mostrecent",
        )
        self._actions = Counter(
            "sglang:sam_actions_total",
            "Outcomes of hint actions.",
            labelnames=["action", "status"],
        )
        self._tokens = Counter(
            "sglang:sam_action_tokens_total",
            "Tokens that hint actions freed, copied or loaded.",
            labelnames=["action", "tier"],
        )

        self._mismatches = Gauge(
            "sglang:sam_tree_core_mismatches",
            "Times the shadow tree had to be rebuilt from SGLang's tree core.",
            multiprocess_mode="mostrecent",
        )
        self._lru = Gauge(
            "sglang:sam_lru_by_regret",
            "1 while the regret guard has the order fall back to LRU.",
            multiprocess_mode="mostrecent",
        )

    def observe(self, result: Any) -> None:
        """Count one `sam.core.actions.ActionResult`."""
        action = result.action_type
        self._actions.labels(action=action, status=result.status.value).inc()
        for tier in ("device", "host", "pool"):
            n_tokens = getattr(result.tokens, tier)
            if n_tokens:
                self._tokens.labels(action=action, tier=tier).inc(n_tokens)

    def gauges(self, n_sessions: int, n_pending: int, n_mismatches: int, use_lru: bool) -> None:
        self._sessions.set(n_sessions)
        self._pending.set(n_pending)
        self._mismatches.set(n_mismatches)
        self._lru.set(use_lru)
