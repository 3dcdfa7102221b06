"""The pool's books in Prometheus: bytes by session state, of the largest owners, and totals.

Owns metric names and the bound on labels. Must never use a session id or a tenant as a label:
owners are shown by their place, so that the number of series does not grow with them.
`prometheus_client` is imported on first use: SGLang sets its multi-process directory first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

N_OWNERS = 4
REST = "rest"


class PoolMetrics:
    """Of one rank; set by the pool's worker thread only."""

    def __init__(self, states: tuple[str, ...]) -> None:
        from prometheus_client import Counter, Gauge

        newest = {"multiprocess_mode": "mostrecent"}
        self._bytes = Gauge(
            "sglang:sam_pool_bytes",
            "Bytes in the L3 pool of sessions that this server knows, by session state; "
            "'shared': what stays when they end.",
            labelnames=["state"],
            **newest,
        )
        self._owners = Gauge(
            "sglang:sam_pool_owner_bytes",
            "Bytes in the L3 pool of the owners with the most, by place.",
            labelnames=["place"],
            **newest,
        )
        self._peak = Gauge(
            "sglang:sam_pool_peak_bytes", "Most bytes of sessions in the L3 pool so far.", **newest
        )
        self._counters = {
            "bytes_removed": Counter(
                "sglang:sam_pool_reclaimed_bytes_total",
                "Bytes that ended sessions gave back to the L3 pool.",
            ),
            "bytes_taken": Counter(
                "sglang:sam_pool_taken_bytes_total",
                "Bytes that the L3 pool took or had already.",
            ),
            "bytes_refused": Counter(
                "sglang:sam_pool_refused_bytes_total",
                "Bytes of writes that the L3 pool did not take.",
            ),
            "pages_damaged": Counter(
                "sglang:sam_pool_damaged_pages_total",
                "Pages of the wrong length that were removed from the L3 pool.",
            ),
        }
        self._counted = dict.fromkeys(self._counters, 0)
        self._show_bytes(dict.fromkeys(states, 0), {})

    def show(self, report: Mapping[str, Any]) -> None:
        """Take over a `PoolAccount.report`."""
        self._show_bytes(report["bytes_by_state"], report["bytes_by_tenant"])
        self._peak.set(report["bytes_peak"])
        for name, counter in self._counters.items():
            counter.inc(max(0, report[name] - self._counted[name]))
            self._counted[name] = max(report[name], self._counted[name])

    def _show_bytes(self, by_state: Mapping[str, int], by_tenant: Mapping[str, int]) -> None:
        for state, n_bytes in by_state.items():
            self._bytes.labels(state=state).set(n_bytes)
        sizes = list(by_tenant.values())
        for place in range(N_OWNERS):
            n_bytes = sizes[place] if place < len(sizes) else 0
            self._owners.labels(place=str(place + 1)).set(n_bytes)
        self._owners.labels(place=REST).set(sum(sizes[N_OWNERS:]))
