"""The order in which waiting requests are served: `--sam-admission shortest`.

Owns that order: least to compute first, minus a credit for what was computed while a request
waited. Must never read a clock or anything else that differs between ranks, nor drop, add or hold
back a request: it sorts.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

from sam.config import ConfigError, SamConfig


class AdmissionOrder:
    """`aging`: tokens of credit for each token prefilled since a request arrived, at least 0.

    So a request of W tokens to compute is never overtaken by one that arrives when W / `aging`
    tokens have been prefilled since, deferred or not.
    """

    def __init__(self, aging: float) -> None:
        self.aging = aging

    def __call__(self, queue: list[Any], deferred: Set[str], processed_tokens: int) -> None:
        """Sort the matched queue in place; equals keep their order. `deferred`: ids of requests
        whose prefix another one is about to compute; they come last while they have no credit
        left over. What was retracted goes on first, as it was served already."""

        def key(req: Any) -> tuple[bool, bool, float]:
            left = self._tokens_left(req, processed_tokens)
            return not req.output_ids, req.rid in deferred and left > 0, left

        queue.sort(key=key)

    def _tokens_left(self, req: Any, processed_tokens: int) -> float:
        """Tokens to compute, less what the wait so far is worth."""
        waited = max(0, processed_tokens - req.arrival_processed_tokens)
        n_tokens = len(req.origin_input_ids) + len(req.output_ids)
        return n_tokens - req.num_matched_prefix_tokens - self.aging * waited


def create_order(config: SamConfig) -> AdmissionOrder | None:
    """None where the server's own policy orders. Raises ConfigError."""
    if config.admission == "off":
        return None
    if not math.isfinite(config.admission_aging):
        raise ConfigError(f"SAM_ADMISSION_AGING={config.admission_aging}: must be finite")
    return AdmissionOrder(config.admission_aging)


def refusal(config: SamConfig, schedule: Any) -> str | None:
    """Why the server's scheduling settings leave no room for an order of sam's, or None."""
    if config.admission == "off":
        return None
    if schedule.enable_priority_scheduling:
        return (
            f"--enable-priority-scheduling orders by priority, --sam-admission {config.admission} "
            "by what is to compute (--sam-admission off serves by priority)"
        )
    if schedule.schedule_policy != "fcfs":
        return (
            f"--schedule-policy {schedule.schedule_policy} has no effect: "
            f"--sam-admission {config.admission} orders (--sam-admission off to use it)"
        )
    return None
