"""How many actions may wait and how many may come: in all, and of one client, so that no flood
drops another's hints.

Owns the counts. Must never hold more than what was taken and not given back, nor read a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

_MAX_CLIENTS = 4_096
"""Of those whose rate is known; who comes after so many others starts afresh."""


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


class HintRate:
    """Actions per second of each client, on average; `burst` of them may come at once.

    A message is taken whole while its client has anything left and may overdraw that, so that
    none is too large for ever. `per_s` 0: no bound.
    """

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def take(self, client: str, n: int, now_s: float) -> bool:
        """Count `n` actions of a client at `now_s`, or say no and count nothing."""
        if not self._per_s or not n:
            return True
        left, at_s = self._left.pop(client, (self._burst, now_s))
        left = min(self._burst, left + self._per_s * max(0.0, now_s - at_s))
        taken = left >= 1
        self._left[client] = (left - n if taken else left, max(at_s, now_s))
        if len(self._left) > _MAX_CLIENTS:
            self._left.popitem(last=False)
        return taken
