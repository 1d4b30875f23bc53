"""What a split costs and saves, by what was measured: how fast engines compute prompts, and how fast prompts arrive.

An engine needs a + b·n seconds to the first token of a prompt, where n are its uncached tokens and those of the prompts
before it (`Pace`: least squares over what was served, older answers counting less). It is measured at prefill engines,
and at decode engines by the prompts that they compute alone. What a hand-over adds, from the first token at P to the
first of D, is measured alike, by the tokens that were handed over.

Alone, D needs its a + b·n, and the answers that it writes meanwhile stand still for b·n each. Split, P needs its own
a + b·n, and D goes on when the hand-over is done. A prompt is split if the sum of all these waits is smaller so
(`Ways`). Where too little was measured, or too long ago, it is split from `UNMEASURED` tokens.

Pure, but for the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, NamedTuple

UNMEASURED: Final = 512  # tokens
LEAST: Final = 64  # tokens: no fewer are worth a second engine, whatever is measured
ENOUGH: Final = 4.5  # samples, of which older ones count less
MAX_AGE_S: Final = 300.0  # of the last sample: a way that is not taken any more may have become better
_KEPT: Final = 0.95  # of a sample's weight, when another one comes
_SMALL: Final = 512  # tokens
_SPREAD: Final = 0.1  # of the mean, below which samples say nothing of the slope
_OUTLIER: Final = 5.0  # times what was expected: it counts as that


class Line(NamedTuple):
    """seconds = first + each · tokens"""

    first: float
    each: float

    def seconds(self, tokens: float) -> float:
        return self.first + self.each * max(0.0, tokens)


class Pace:
    """How long something takes, by its tokens. One thread. `clock`: as `time.monotonic`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = -math.inf
        self._samples = self._w = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Something took so long."""
        known = self.line
        if known is not None:
            seconds = min(seconds, _OUTLIER * known.seconds(tokens) + 0.05)
        weight = 1 / (tokens + _SMALL) ** 2  # what long prompts take varies by more seconds
        sums = (weight, weight * tokens, weight * seconds, weight * tokens * tokens, weight * tokens * seconds)
        before = (self._w, self._x, self._y, self._xx, self._xy)
        self._w, self._x, self._y, self._xx, self._xy = (
            _KEPT * old + new for old, new in zip(before, sums, strict=True)
        )
        self._samples = _KEPT * self._samples + 1
        self._at = self._clock()

    @property
    def line(self) -> Line | None:
        """None: too little was measured, or too long ago."""
        if self._samples < ENOUGH or self._clock() - self._at > MAX_AGE_S:
            return None
        x, y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - x * x
        if variance > (_SPREAD * x) ** 2:
            each = (self._xy / self._w - x * y) / variance
            if each <= 0:
                return Line(y, 0.0)
            if each * x <= y:
                return Line(y - each * x, each)
        return Line(0.0, y / x) if x else Line(y, 0.0)


class Side(NamedTuple):
    """An engine before a prompt comes. ahead: uncached tokens that it computes first."""

    pace: Line | None
    ahead: float


class Ways(NamedTuple):
    """A prompt's two ways. prefill, decode: the engines. hand_over: None: not known. answers: how many D writes now."""

    prefill: Side
    decode: Side
    hand_over: Line | None
    answers: int

    def splits(self, tokens: int, at_prefill: int) -> bool:
        """Whether to split a prompt of which D lacks so many tokens, and P `at_prefill`."""
        lines = self._lines()
        if lines is None or tokens < LEAST:
            return tokens >= UNMEASURED
        p, d, link = lines
        alone = d.seconds(self.decode.ahead + tokens) + self.answers * d.each * tokens
        return p.seconds(self.prefill.ahead + at_prefill) + link.seconds(tokens) < alone

    @property
    def least(self) -> float:
        """-> no prompt is split of which both lack fewer tokens; infinite: none is."""
        lines = self._lines()
        if lines is None:
            return UNMEASURED
        p, d, link = lines
        more = p.seconds(self.prefill.ahead) + link.first - d.seconds(self.decode.ahead)  # whatever its size
        less = d.each * (1 + self.answers) - p.each - link.each  # for each token
        if less > 0:
            return max(LEAST, more / less)
        return LEAST if more < LEAST * less else math.inf  # short prompts only, while D has much to compute

    def _lines(self) -> tuple[Line, Line, Line] | None:
        """An engine that was not measured is taken to be like the other: they serve the same model."""
        p, d = self.prefill.pace or self.decode.pace, self.decode.pace or self.prefill.pace
        return None if p is None or d is None or self.hand_over is None else (p, d, self.hand_over)
