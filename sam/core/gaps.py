"""Online estimates of idle times: per label, and per session and label.

Owns the labels and the two decayed means behind `g` (source: the project's policy notes).
Must never read a clock, know a tree, or grow without bound: labels that nobody used for
longest are forgotten, sessions are forgotten by the caller.

All means are of ln(1 + gap), gaps in seconds: idle times are log-distributed, and one
long absence must not outweigh a hundred short ones. Such a mean stands for the median; what
is expected is the mean of the gaps, `mean_over_median` times as much (2: a log-normal with a
spread of 1.15, which is that of tool calls in real traces).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

import msgspec

LABEL_TOOL = "tool"
LABEL_HUMAN = "human"
LABEL_OTHER = "other"
LABEL_PLAIN = "plain"
BASE_LABELS = (LABEL_TOOL, LABEL_HUMAN, LABEL_OTHER, LABEL_PLAIN)

FINISH_TOOL_CALLS = "tool_calls"
FINISH_STOP = "stop"
_MAX_TOOL_NAME_CHARS = 128


class GapParams(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of the estimates and bounds of what is remembered."""

    decay: float = 0.998
    prior_weight: float = 20.0
    tool_prior_s: float = 10.0
    other_prior_s: float = 100.0
    mean_over_median: float = 2.0
    session_step: float = 0.3
    min_gap_s: float = 1.0
    max_gap_s: float = 3_600.0
    max_labels: int = 1_024
    max_labels_per_session: int = 16


DEFAULT_GAP_PARAMS = GapParams()


def label_of(finish_reason: str | None, tool_name: str | None = None) -> str:
    """Label of the idle time that follows an answer.

    The tool's name if one was called and is known, `tool` if not, `human` after a plain
    stop, else `other`. A tool named like one of these labels keeps apart from it.
    """
    if finish_reason == FINISH_TOOL_CALLS:
        if not tool_name:
            return LABEL_TOOL
        name = tool_name[:_MAX_TOOL_NAME_CHARS]
        return f"tool:{name}" if name in BASE_LABELS else name
    return LABEL_HUMAN if finish_reason == FINISH_STOP else LABEL_OTHER


class _DecayedMean:
    """Weighted mean whose old samples, the prior among them, fade by `decay` a sample."""

    __slots__ = ("total", "weight")

    def __init__(self, prior: float, weight: float) -> None:
        self.total = prior * weight
        self.weight = weight

    def add(self, value: float, decay: float) -> None:
        self.total = self.total * decay + value
        self.weight = self.weight * decay + 1.0

    @property
    def mean(self) -> float:
        return self.total / self.weight


class GapEstimator:
    """Learns gaps, answers `g`. Every call is O(1).

    Labels are shared by all sessions and tenants; a label is a tool name or a base label,
    and at most `max_labels` tool names are known at a time, the least recently used
    forgotten first. Base labels are never forgotten.
    """

    def __init__(self, params: GapParams = DEFAULT_GAP_PARAMS) -> None:
        self.params = params
        self._base = {label: self._prior(label) for label in BASE_LABELS}
        self._tools: OrderedDict[str, _DecayedMean] = OrderedDict()
        self._sessions: dict[Hashable, OrderedDict[str, float]] = {}

    def __len__(self) -> int:
        """Sessions remembered."""
        return len(self._sessions)

    @property
    def n_labels(self) -> int:
        return len(self._base) + len(self._tools)

    def observe(self, session: Hashable | None, label: str, gap_s: float) -> None:
        """A user came back after `gap_s` (>= 0, less counts as 0) with `label`.

        `session` None teaches only the label.
        """
        value = math.log1p(max(gap_s, 0.0))
        self._learned(label).add(value, self.params.decay)
        if session is None:
            return
        own = self._sessions.setdefault(session, OrderedDict())
        former = own.get(label)
        step = self.params.session_step
        own[label] = value if former is None else (1.0 - step) * former + step * value
        own.move_to_end(label)
        if len(own) > self.params.max_labels_per_session:
            own.popitem(last=False)

    def gap_s(self, session: Hashable | None, label: str) -> float:
        """g: the expected idle time in seconds, clamped to the bounds."""
        mean = self._known(label).mean
        own = self._sessions.get(session)
        of_session = own.get(label) if own is not None else None
        if of_session is not None:
            mean = 0.5 * mean + 0.5 * of_session
        gap_s = self.params.mean_over_median * math.expm1(min(mean, 700.0))
        return min(max(gap_s, self.params.min_gap_s), self.params.max_gap_s)

    def forget(self, session: Hashable) -> None:
        """Drop what was learned about one session; the labels keep it."""
        self._sessions.pop(session, None)

    def _prior(self, label: str) -> _DecayedMean:
        params = self.params
        is_tool = label == LABEL_TOOL or label not in BASE_LABELS
        prior_s = params.tool_prior_s if is_tool else params.other_prior_s
        return _DecayedMean(math.log1p(prior_s), params.prior_weight)

    def _known(self, label: str) -> _DecayedMean:
        return self._base.get(label) or self._tools.get(label) or self._prior(label)

    def _learned(self, label: str) -> _DecayedMean:
        mean = self._base.get(label)
        if mean is not None:
            return mean
        mean = self._tools.get(label)
        if mean is None:
            mean = self._tools[label] = self._prior(label)
            if len(self._tools) > self.params.max_labels:
                self._tools.popitem(last=False)
        self._tools.move_to_end(label)
        return mean
