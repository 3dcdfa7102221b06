"""How many actions may wait: in all, and of one client, so that no flood drops another's hints.

Owns the counts. Must never hold more than what was taken and not given back.
"""

from __future__ import annotations

from collections.abc import Hashable


class Admission:
    """A bound on things under way, with a bound per client below it."""

    def __init__(self, *, total: int, per_client: int) -> None:
        self._total = total
        self._per_client = per_client
        self._held: dict[Hashable, tuple[str, int]] = {}
        self._by_client: dict[str, int] = {}
        self.n = 0

    def take(self, name: Hashable, client: str, n: int) -> bool:
        """Hold `n` under `name` for `client`, or say no and hold nothing more."""
        of_client = self._by_client.get(client, 0)
        if self.n + n > self._total or of_client + n > self._per_client:
            return False
        held = self._held.get(name, (client, 0))[1]
        self._held[name] = (client, held + n)
        self._by_client[client] = of_client + n
        self.n += n
        return True

    def give_back(self, name: Hashable) -> None:
        """Release all that is held under `name`; an unknown name is no error."""
        client, n = self._held.pop(name, ("", 0))
        if not n:
            return
        self.n -= n
        self._by_client[client] -= n
        if not self._by_client[client]:
            del self._by_client[client]
