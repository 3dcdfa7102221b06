"""The recommended order with the regret guard, as the live server runs it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sam.core.ghost import GhostPair
from sam.sim.policy import Policy, Setup

ABOUT = "next-use under the regret guard: LRU while next-use is behind by one capacity"


class GuardedPolicy(Policy):
    """Two ghosts of the device tier decide for all tiers."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "next-use", tracked=True)
        self.pair = GhostPair(setup.tiers_pages[0])
        self.tracker.attach(self.pair)
        self.n_lru_requests = 0
        self._paths: dict[Hashable, Sequence[tuple[int, int]]] = {}

    def ask(self, session: Hashable, path: Sequence[tuple[int, int]], time_s: float) -> list[int]:
        self._paths[session] = path
        return super().ask(session, path, time_s)

    def answer(
        self, session: Hashable, time_s: float, label: str, hint_s: float | None, ends: bool
    ) -> None:
        """The ghosts see a request when it is over, as on the server."""
        super().answer(session, time_s, label, hint_s, ends)
        use_lru = self.pair.access(self._paths.pop(session), time_s, session)
        self.n_lru_requests += use_lru
        for order in self.orders:
            order.use_lru = use_lru

    def notes(self) -> dict[str, float]:
        return {
            "guard_switches": self.pair.guard.n_switches,
            "guard_lru_requests": self.n_lru_requests,
        }


def create(setup: Setup) -> Policy:
    return GuardedPolicy(setup)
