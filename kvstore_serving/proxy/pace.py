"""What a split costs and saves, by measurement: how fast engines compute prompts, and how fast prompts arrive at D.

An engine needs a + b·n seconds until the first token of a prompt. Here n is the number of uncached tokens of this
prompt and of the prompts queued before it. `TokenPace` fits this line to the served prompts by least squares, with less
weight on older ones. There is a line for each prefill engine, and one for each decode engine from the prompts that it
computes alone. The time from P's first token to D's first is measured in the same way, as a line over the tokens handed
over.

If D works alone, it needs its a + b·n, and each answer that it is generating stalls for b·n. If the prompt is split, P
needs its own a + b·n, and D continues when the hand-over is done. A prompt is split if this makes the sum of all waits
smaller (`Ways`). If there are too few measurements, or they are too old, prompts of at least `UNMEASURED` tokens are
split.

Pure, except for the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, NamedTuple

UNMEASURED: Final = 512  # tokens
LEAST: Final = 64  # tokens; fewer are never worth a second engine, whatever is measured
ENOUGH_SAMPLES: Final = 4.5  # samples, of which older ones count less
MAX_SAMPLE_AGE_S: Final = 300.0  # after the last sample, because a step that is not measured may become faster
_KEPT_WEIGHT: Final = 0.95  # a new sample multiplies the weights of older samples by this
_SMALL: Final = 512  # tokens
_SPREAD: Final = 0.1  # share of the mean; if the numbers of tokens vary less, samples do not show the slope
_OUTLIER: Final = 5.0  # times the expected value; a larger sample counts as this value


class LinearFit(NamedTuple):
    """A line: seconds = first + each · tokens."""

    first: float
    each: float

    def seconds(self, tokens: float) -> float:
        return self.first + self.each * max(0.0, tokens)


class TokenPace:
    """How long a step takes, depending on its number of tokens. Used by one thread. `clock`: for example
    `time.monotonic`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = -math.inf
        self._samples = self._w = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Add a sample: this many tokens took this many seconds."""
        known = self.line
        if known is not None:
            seconds = min(seconds, _OUTLIER * known.seconds(tokens) + 0.05)
        weight = 1 / (tokens + _SMALL) ** 2  # the longer the prompt, the more its time varies
        sums = (weight, weight * tokens, weight * seconds, weight * tokens * tokens, weight * tokens * seconds)
        before = (self._w, self._x, self._y, self._xx, self._xy)
        self._w, self._x, self._y, self._xx, self._xy = (
            _KEPT_WEIGHT * old + new for old, new in zip(before, sums, strict=True)
        )
        self._samples = _KEPT_WEIGHT * self._samples + 1
        self._at = self._clock()

    @property
    def line(self) -> LinearFit | None:
        """The fitted line, or None if the samples are too few or too old."""
        if self._samples < ENOUGH_SAMPLES or self._clock() - self._at > MAX_SAMPLE_AGE_S:
            return None
        x, y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - x * x
        if variance > (_SPREAD * x) ** 2:
            each = (self._xy / self._w - x * y) / variance
            if each <= 0:
                return LinearFit(y, 0.0)
            if each * x <= y:
                return LinearFit(y - each * x, each)
        return LinearFit(0.0, y / x) if x else LinearFit(y, 0.0)


class EngineLoad(NamedTuple):
    """An engine's load before a prompt arrives. `ahead`: the number of uncached tokens that it computes first."""

    pace: LinearFit | None
    ahead: float


class Ways(NamedTuple):
    """The two ways to serve a prompt. `hand_over`: None if not known. `answers`: the number of answers that D is
    generating now."""

    prefill: EngineLoad
    decode: EngineLoad
    hand_over: LinearFit | None
    answers: int

    def splits(self, tokens: int, at_prefill: int) -> bool:
        """Return whether to split a prompt.

        tokens: the number of tokens that D would have to compute alone
        at_prefill: the number of tokens that P would have to compute
        """
        lines = self._lines()
        if lines is None or tokens < LEAST:
            return tokens >= UNMEASURED
        p, d, link = lines
        alone = d.seconds(self.decode.ahead + tokens) + self.answers * d.each * tokens
        return p.seconds(self.prefill.ahead + at_prefill) + link.seconds(tokens) < alone

    @property
    def least(self) -> float:
        """The fewest tokens for which a prompt is split, if both engines lack the same number. Infinite if no prompt is
        split."""
        lines = self._lines()
        if lines is None:
            return UNMEASURED
        p, d, link = lines
        more = p.seconds(self.prefill.ahead) + link.first - d.seconds(self.decode.ahead)  # for a prompt of any size
        less = d.each * (1 + self.answers) - p.each - link.each  # for each token
        if less > 0:
            return max(LEAST, more / less)
        return LEAST if more < LEAST * less else math.inf  # only short prompts, while D has much to compute

    def _lines(self) -> tuple[LinearFit, LinearFit, LinearFit] | None:
        """Return the three lines, or None if they are not known. An engine without measurements is assumed to be as
        fast as the other, because both serve the same model."""
        p, d = self.prefill.pace or self.decode.pace, self.decode.pace or self.prefill.pace
        return None if p is None or d is None or self.hand_over is None else (p, d, self.hand_over)
