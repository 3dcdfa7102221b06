"""The pool's books: bytes by session state and tenant, their peak, what was reclaimed or refused.

Owns the last measurement and the numbers that are exported. Must never measure on the scheduler
thread: the pool's worker does, by its own clock, and nothing is decided by the result. What it
cannot see is not in it: see `sam.core.pool_usage`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sam.core.lineage import SessionState
from sam.core.page_ledger import PageLedger
from sam.core.pool_usage import SHARED, PoolUsage, measure_usage
from sam.core.sessions import SessionKey
from sam.srt.mem_cache.storage.transfers import TransferWatch

if TYPE_CHECKING:
    from sam.srt.observability.pool_metrics import PoolMetrics

PERIOD_S = 2.0
MAX_TENANTS = 16
STATES = (
    SessionState.RUNNING,
    SessionState.RESUMING,
    SessionState.IDLE,
    SessionState.OFFLOADED,
    SessionState.ENDED,
)
_YIELD_S = 0.001


class PoolAccount:
    """See the module. `table`: the session table, read here without a lock."""

    def __init__(self, table: Any, transfers: TransferWatch) -> None:
        self._table = table
        self._transfers = transfers
        self.period_s = PERIOD_S
        self.metrics: PoolMetrics | None = None
        self.page_bytes = 0
        self.peak_bytes = 0
        self._usage = PoolUsage()
        self._due_s = 0.0

    def is_due(self) -> bool:
        """Never with a period of 0."""
        return bool(self.period_s) and time.monotonic() >= self._due_s

    def measure(self, ledger: PageLedger, page_bytes: int, n_removed_pages: int) -> None:
        """On the worker thread; gives way to the others every few hundred sessions."""
        self._due_s = time.monotonic() + self.period_s
        self.page_bytes = page_bytes
        self._usage = measure_usage(
            ledger, self._state_of, lambda key: key.tenant, lambda: time.sleep(_YIELD_S)
        )
        self.peak_bytes = max(self.peak_bytes, self._usage.n_pages * page_bytes)
        if self.metrics is not None:
            self.metrics.show(self.report(n_removed_pages))

    def report(self, n_removed_pages: int) -> dict[str, Any]:
        """As of the last measurement; bytes of this rank."""
        usage, transfers, page_bytes = self._usage, self._transfers, self.page_bytes
        by_state = {str(s): usage.by_state.get(s, 0) * page_bytes for s in (*STATES, SHARED)}
        return {
            "bytes": usage.n_pages * page_bytes,
            "bytes_peak": self.peak_bytes,
            "bytes_by_state": by_state,
            "bytes_by_tenant": self._largest(MAX_TENANTS),
            "bytes_removed": n_removed_pages * page_bytes,
            "bytes_taken": transfers.n_taken_pages * page_bytes,
            "bytes_refused": transfers.n_refused_pages * page_bytes,
            "pages_damaged": transfers.n_damaged_pages,
        }

    def _largest(self, n_tenants: int) -> dict[str, int]:
        """The tenants with the most bytes, then the rest together."""
        by_tenant = self._usage.by_tenant
        ranked = sorted(by_tenant, key=lambda name: (-by_tenant[name], name))
        largest = {name: by_tenant[name] * self.page_bytes for name in ranked[:n_tenants]}
        rest = sum(by_tenant[name] for name in ranked[n_tenants:])
        return largest | ({"(others)": rest * self.page_bytes} if rest else {})

    def _state_of(self, key: SessionKey) -> str:
        """A session that the table dropped is over."""
        session = self._table.get(key)
        state = session.state if session is not None else SessionState.ENDED
        return state if state in STATES else SessionState.ENDED
