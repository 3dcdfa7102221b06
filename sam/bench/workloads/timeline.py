"""A plan's nominal course: what it would take on a server that is never busy.

Owns: the concurrent working set, which sizes the pools, and the idle times that a client could
foresee. Must never be used as a result: real servers queue.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sam.bench.workloads.plan import Plan, called_tool

NOMINAL_TURN_S = 1.0
_IDLE_LOG_ERROR = 0.5
CALL_TOKENS = 50  # of an answer that is a call
_TEMPLATE_TOKENS = 5  # markup of one message


@dataclass
class Timeline:
    """`times[session, turn]`: (start, end) of the request. `contexts`: (time, session, tokens
    of its own from then on); `working_set_tokens`: the most that all had at once, and
    `mean_working_set_tokens` what they had on average over time."""

    times: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    contexts: list[tuple[float, str, int]] = field(default_factory=list)
    working_set_tokens: int = 0
    mean_working_set_tokens: int = 0
    longest_tokens: int = 0
    prompt_tokens: int = 0
    n_turns: int = 0

    def idle_after(self, session_id: str, turn: int) -> float | None:
        """Seconds from the answer to the session's next request; None after the last one."""
        following = self.times.get((session_id, turn + 1))
        if following is None:
            return None
        return max(following[0] - self.times[session_id, turn][1], 0.0)

    @property
    def mean_prompt_tokens(self) -> int:
        return self.prompt_tokens // max(self.n_turns, 1)


def timeline_of(plan: Plan, count) -> Timeline:
    """`count(text)` gives the tokens of a text."""
    line = Timeline()
    walker = _Walker(plan, line, count)
    for start_s, root in plan.users:
        walker.run(root, 0, len(plan.agents[root].turns), start_s)
    _measure_working_set(line, plan.shared_tokens)
    return line


def _measure_working_set(line: Timeline, shared_tokens: int) -> None:
    own: dict[str, int] = {}
    changes = sorted(line.contexts)
    token_s, total, since_s = 0.0, 0, changes[0][0]
    for at_s, session_id, tokens in changes:
        token_s += total * (at_s - since_s)
        own[session_id] = tokens
        total, since_s = sum(own.values()) + shared_tokens, at_s
        line.working_set_tokens = max(line.working_set_tokens, total)
    span_s = since_s - changes[0][0]
    line.mean_working_set_tokens = round(token_s / span_s) if span_s else total


def expected_idle_s(plan: Plan, line: Timeline, session_id: str, turn: int) -> float | None:
    """What the client says about its next wait: log-normal around the plan, sigma 0.5."""
    idle = line.idle_after(session_id, turn)
    if idle is None:
        return None
    noise = random.Random(f"idle {session_id} {turn}").lognormvariate(0.0, _IDLE_LOG_ERROR)
    wrong = plan.agents[session_id].idle_error
    return round(min(idle * noise * wrong, 86400.0), 3)


class _Walker:
    def __init__(self, plan: Plan, line: Timeline, count) -> None:
        self.plan, self.line, self.count = plan, line, count
        self.windows: dict[str, list[int]] = {}

    def run(self, session_id: str, first: int, last: int, now: float) -> float:
        """Turns `[first, last)` of an agent from `now`; when they are over."""
        agent = self.plan.agents[session_id]
        for index in range(first, last):
            turn = agent.turns[index]
            now += turn.wait_s + (NOMINAL_TURN_S if turn.summary else 0.0)
            self.line.times[session_id, index] = (now, now + NOMINAL_TURN_S)
            self._context(session_id, index, now)
            now += NOMINAL_TURN_S
            ends = [self.run(c.session_id, c.first, c.last, now) for c in turn.calls]
            now = max([now, *ends])
        if last == len(agent.turns) and not agent.sticky:
            self.line.contexts.append((now, session_id, 0))
        if agent.is_root:
            for child in self.plan.children_of(session_id):
                self.line.contexts.append((now, child, 0))
        return now

    def _context(self, session_id: str, index: int, now: float) -> None:
        turn = self.plan.agents[session_id].turns[index]
        window = self.windows.setdefault(session_id, [0])  # the system message, shared
        if turn.keep_messages is not None:
            del window[turn.keep_messages :]
            if turn.summary:
                window.append(self.count(turn.summary) + _TEMPLATE_TOKENS)
        window += [self.count(text) + _TEMPLATE_TOKENS for text in turn.texts]
        own = sum(window)
        calls = CALL_TOKENS if self.plan.tool_calls and called_tool(turn) else 0
        window.append(max(turn.reply_tokens, calls) + _TEMPLATE_TOKENS)
        self.line.contexts.append((now, session_id, sum(window)))
        self.line.prompt_tokens += own + self.plan.shared_tokens
        self.line.n_turns += 1
        longest = sum(window) + self.plan.shared_tokens
        self.line.longest_tokens = max(self.line.longest_tokens, longest)
