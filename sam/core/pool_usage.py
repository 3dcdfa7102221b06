"""How much of a pool is whose: pages by state of their session, and by tenant.

Owns the count over a `PageLedger`. Must never run where a request waits for it: it looks at
every session. What nobody in the ledger has (requests without a session, what ended sessions
left, what other servers wrote) is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import msgspec

from sam.core.page_ledger import PageLedger

SHARED = "shared"
SESSIONS_PER_PAUSE = 256


class PoolUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of the sessions in the ledger, each counted once.

    `by_state`: those that go when their session ends, by its state now; under `SHARED` those
    that stay then. `by_tenant`: both, of its own sessions; tenants that share count both.
    """

    by_state: dict[str, int] = {}
    by_tenant: dict[str, int] = {}

    @property
    def n_pages(self) -> int:
        return sum(self.by_state.values())


def measure_usage(
    ledger: PageLedger,
    state_of: Callable[[Hashable], str],
    tenant_of: Callable[[Hashable], str],
    pause: Callable[[], None],
) -> PoolUsage:
    """O(sessions and the groups that they share); calls `pause` every now and then."""
    by_state: dict[str, int] = {SHARED: 0}
    by_tenant: dict[str, int] = {}
    seen: set[bytes] = set()
    seen_by_tenant: dict[str, set[bytes]] = {}
    for n_sessions, owner in enumerate(ledger.owners()):
        if n_sessions % SESSIONS_PER_PAUSE == SESSIONS_PER_PAUSE - 1:
            pause()
        state, tenant = state_of(owner), tenant_of(owner)
        n_private, leading = ledger.parts(owner)
        by_state[state] = by_state.get(state, 0) + n_private
        by_state[SHARED] += _new_pages(leading, seen)
        n_new = _new_pages(leading, seen_by_tenant.setdefault(tenant, set()))
        by_tenant[tenant] = by_tenant.get(tenant, 0) + n_private + n_new
    return PoolUsage(by_state=by_state, by_tenant=by_tenant)


def _new_pages(leading: dict[bytes, int], seen: set[bytes]) -> int:
    """Pages behind marks that were not seen before."""
    n_pages = sum(n for mark, n in leading.items() if mark not in seen)
    seen.update(leading)
    return n_pages
