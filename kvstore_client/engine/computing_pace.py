"""How long an engine computes parts of prompts, measured from the steps that it plans.

A token costs more the more tokens it attends to: tokens a to b of a prompt take c1 * (b - a) + c2 * (b² - a²) / 2
seconds. How fast the engine is changes from second to second with what else it does, so that is taken from its newest
steps. The *shape*, how much more a token costs far behind, is a property of the model and its device: it is kept for
all positions, so that many short prompts do not make it forgotten. c2 is never negative, so a long prompt is never
taken to be computed faster, by the token, than what was measured of shorter ones.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

# The newest steps tell how fast the engine is: those of so many seconds of work, at least and at most so many.
RECENT_S: Final = 10.0
LEAST_STEPS: Final = 5
MOST_STEPS: Final = 64
# Steps that took so many times as long as others tell what else the machine did.
OUTLIER: Final = 4.0
# Of each doubling of the position, what a token cost in so many of the newest steps.
COSTS: Final = 5
# A shape is measured between positions so many times apart, between which it is expected to make such a difference.
APART: Final = 2.0
VISIBLE: Final = 0.2


class Scheduled(NamedTuple):
    """What a step computes of a request: `tokens` behind `first`, of its prompt or not."""

    first: int
    tokens: int
    prompt: bool


class _Step(NamedTuple):
    tokens: int
    attended: float  # the sum over these tokens of those before each
    seconds: float


class ComputingPace:
    """The pace of one engine. Not thread-safe."""

    def __init__(self, attention: float = 0.0) -> None:
        """attention: what a token costs more for each token before it, as a part of what the first one costs; believed
        until it is measured."""
        self._attention = attention
        self._recent: deque[_Step] = deque()
        self._recent_s = 0.0
        self._costs: dict[int, deque[tuple[float, float]]] = {}  # doubling -> positions, seconds by the token
        self._most_tokens = 0  # of a step
        self._fitted: tuple[float, float] | None = None  # c1, c2

    def add(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """The engine computed these parts of prompts, from one token to another each, in one step."""
        tokens = sum(end - first for first, end in parts)
        if tokens <= 0 or seconds <= 0:
            return
        self._fitted = None
        step = _Step(tokens, sum((end * end - first * first) / 2 for first, end in parts), seconds)
        self._recent.append(step)
        self._recent_s += seconds
        while len(self._recent) > LEAST_STEPS and (len(self._recent) > MOST_STEPS or self._recent_s > RECENT_S):
            self._recent_s -= self._recent.popleft().seconds
        if tokens > 2 * self._most_tokens:
            self._costs.clear()  # what every step costs, however short, would hide the shape
        self._most_tokens = max(self._most_tokens, tokens)
        if 2 * tokens >= self._most_tokens:
            position = step.attended / tokens
            costs = self._costs.setdefault(int(position).bit_length(), deque(maxlen=COSTS))
            costs.append((position, seconds / tokens))

    def seconds(self, first: int, end: int) -> float | None:
        """How long it computes these tokens of a prompt; None: nothing was measured."""
        if self._fitted is None:
            if not self._recent:
                return None
            self._fitted = self._fit()
        c1, c2 = self._fitted
        return c1 * (end - first) + c2 * (end * end - first * first) / 2

    def _fit(self) -> tuple[float, float]:
        c1, c2 = self._shape()
        ratios = [step.seconds / (c1 * step.tokens + c2 * step.attended) for step in self._recent]
        # Short steps cost more by the token, so only one that took long in itself is left out.
        most, most_s = (OUTLIER * statistics.median(each) for each in (ratios, [step.seconds for step in self._recent]))
        steps = [
            step for step, ratio in zip(self._recent, ratios, strict=True) if ratio <= most or step.seconds <= most_s
        ]
        level = sum(step.seconds for step in steps) / sum(c1 * step.tokens + c2 * step.attended for step in steps)
        return level * c1, level * c2

    def _shape(self) -> tuple[float, float]:
        """c1 and c2, up to a factor."""
        points = [
            (statistics.fmean(position for position, _ in costs), statistics.median(cost for _, cost in costs))
            for costs in self._costs.values()
        ]
        nearest, farthest = min(points)[0], max(points)[0]
        if farthest < APART * nearest or (self._attention and self._attention * (farthest - nearest) < VISIBLE):
            return 1.0, self._attention
        # A straight line through the costs, all of which count equally, in parts of themselves.
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
    """Tells a `ComputingPace` of the steps, from when the engine plans them. Not thread-safe."""

    def __init__(self, computing: ComputingPace, steps_ahead: int) -> None:
        """steps_ahead: how many steps the engine plans before it waits for one."""
        self._computing = computing
        self._steps_ahead = steps_ahead
        self._steps: deque[Mapping[str, Scheduled]] = deque()  # the newest last
        self._planned_at = 0.0

    def plan(self, scheduled: Mapping[str, Scheduled]) -> None:
        """The engine plans a step, with these requests."""
        now = time.monotonic()
        passed, self._planned_at = now - self._planned_at, now
        self._steps.append(scheduled)
        if len(self._steps) < self._steps_ahead + 2:
            return
        step = self._steps.popleft()
        parts = [(each.first, each.first + each.tokens) for each in step.values() if each.prompt]
        tokens = sum(end - first for first, end in parts)
        # Decoding takes a step's time for a token; it says nothing of prompts. And if a step and the next one have no
        # request in common, the engine may have had nothing to do in between.
        if 2 * tokens > sum(each.tokens for each in step.values()) and step.keys() & scheduled.keys():
            self._computing.add(parts, passed)
