"""Estimates how long an engine takes to compute parts of prompts, from the steps that it plans.

The cost of a token grows with the number of tokens that it attends to. Tokens a to b of a prompt take
c1 * (b - a) + c2 * (b² - a²) / 2 seconds.

The engine's speed changes from second to second with its other work, so only the newest steps determine it. The *shape*
says how much more a token costs at a high position. It is a property of the model and its device. Measurements of the
shape are kept for all positions, so that many short prompts do not displace those of long ones. The factor c2 is never
negative, so the estimate for a long prompt is never lower, per token, than for shorter prompts that were measured.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

# The engine's speed is measured over its newest steps. These are the steps of the last RECENT_S seconds of work, but at
# least LEAST_STEPS and at most MAX_MEASURED_STEPS.
RECENT_S: Final = 10.0
LEAST_STEPS: Final = 5
MAX_MEASURED_STEPS: Final = 64
# A step that took this many times as long as the median is left out, because the machine did other work meanwhile.
OUTLIER: Final = 4.0
# How many of the newest measurements of a token's cost are kept for each range of positions, from one power of two to
# the next.
COSTS: Final = 5
# The shape is measured only if the farthest position is at least APART times the nearest one. The expected rise of the
# cost between them must also be at least VISIBLE.
APART: Final = 2.0
VISIBLE: Final = 0.2


class Scheduled(NamedTuple):
    """The tokens of a request that a step computes: `tokens` of them, from position `first` on. `prompt` says whether
    they belong to the prompt."""

    first: int
    tokens: int
    prompt: bool


class _Step(NamedTuple):
    tokens: int
    attended: float  # the sum, over these tokens, of the number of tokens before each
    seconds: float


class ComputingPace:
    """Estimates the pace of one engine. Not thread-safe."""

    def __init__(self, attention: float = 0.0) -> None:
        """`attention`: how much each earlier token adds to the cost of a token, as a fraction of the first token's
        cost. It is used until the shape is measured."""
        self._attention = attention
        self._recent: deque[_Step] = deque()
        self._recent_s = 0.0
        self._costs: dict[int, deque[tuple[float, float]]] = {}  # by bit length of position: (position, s per token)
        self._most_tokens = 0  # in one step
        self._fitted: tuple[float, float] | None = None  # c1, c2

    def add(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Record that the engine computed these parts of prompts in one step of `seconds`. Each part is given as its
        first token and its end."""
        tokens = sum(end - first for first, end in parts)
        if tokens <= 0 or seconds <= 0:
            return
        self._fitted = None
        step = _Step(tokens, sum((end * end - first * first) / 2 for first, end in parts), seconds)
        self._recent.append(step)
        self._recent_s += seconds
        while len(self._recent) > LEAST_STEPS and (len(self._recent) > MAX_MEASURED_STEPS or self._recent_s > RECENT_S):
            self._recent_s -= self._recent.popleft().seconds
        if tokens > 2 * self._most_tokens:
            self._costs.clear()  # the fixed cost of every step, which weighs most in short ones, would hide the shape
        self._most_tokens = max(self._most_tokens, tokens)
        if 2 * tokens >= self._most_tokens:
            position = step.attended / tokens
            costs = self._costs.setdefault(int(position).bit_length(), deque(maxlen=COSTS))
            costs.append((position, seconds / tokens))

    def seconds(self, first: int, end: int) -> float | None:
        """Return how many seconds the engine takes to compute tokens `first` to `end` of a prompt. Return None if
        nothing was measured."""
        if self._fitted is None:
            if not self._recent:
                return None
            self._fitted = self._fit()
        c1, c2 = self._fitted
        return c1 * (end - first) + c2 * (end * end - first * first) / 2

    def _fit(self) -> tuple[float, float]:
        c1, c2 = self._shape()
        ratios = [step.seconds / (c1 * step.tokens + c2 * step.attended) for step in self._recent]
        # Short steps cost more per token, so a step is left out only if it also took long in total.
        most, most_s = (OUTLIER * statistics.median(each) for each in (ratios, [step.seconds for step in self._recent]))
        steps = [
            step for step, ratio in zip(self._recent, ratios, strict=True) if ratio <= most or step.seconds <= most_s
        ]
        level = sum(step.seconds for step in steps) / sum(c1 * step.tokens + c2 * step.attended for step in steps)
        return level * c1, level * c2

    def _shape(self) -> tuple[float, float]:
        """Return c1 and c2, up to a common factor."""
        points = [
            (statistics.fmean(position for position, _ in costs), statistics.median(cost for _, cost in costs))
            for costs in self._costs.values()
        ]
        nearest, farthest = min(points)[0], max(points)[0]
        if farthest < APART * nearest or (self._attention and self._attention * (farthest - nearest) < VISIBLE):
            return 1.0, self._attention
        # Fit a straight line to the costs, with relative errors, so that all of them count equally.
        weights = [1 / cost**2 for _, cost in points]
        mean_position = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / sum(weights)
        mean_cost = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / sum(weights)
        rise = sum(w * (x - mean_position) * (y - mean_cost) for w, (x, y) in zip(weights, points, strict=True))
        c2 = rise / sum(w * (x - mean_position) ** 2 for w, (x, _) in zip(weights, points, strict=True))
        c1 = mean_cost - c2 * mean_position
        if c2 <= 0:
            return 1.0, 0.0
        return (c1, c2) if c1 > 0 else (0.0, 1.0)


class StepTimes:
    """Passes an engine's steps to a `ComputingPace`, with the time between their plans. Not thread-safe."""

    def __init__(self, computing: ComputingPace, steps_ahead: int) -> None:
        """`computing`: where the steps are recorded. `steps_ahead`: the number of steps that the engine plans before it
        waits for one."""
        self._computing = computing
        self._steps_ahead = steps_ahead
        self._steps: deque[Mapping[str, Scheduled]] = deque()  # the newest last
        self._planned_at = 0.0

    def plan(self, scheduled: Mapping[str, Scheduled]) -> None:
        """Note that the engine plans a step with these requests now."""
        now = time.monotonic()
        passed, self._planned_at = now - self._planned_at, now
        self._steps.append(scheduled)
        if len(self._steps) < self._steps_ahead + 2:
            return
        step = self._steps.popleft()
        parts = [(each.first, each.first + each.tokens) for each in step.values() if each.prompt]
        tokens = sum(end - first for first, end in parts)
        # A step that mostly decodes says little about prompts, because each request in it computes only one token. If a
        # step and the latest one have no request in common, the engine may have been idle in between.
        if 2 * tokens > sum(each.tokens for each in step.values()) and step.keys() & scheduled.keys():
            self._computing.add(parts, passed)
