"""Fits the times of a profile to measured times, by least squares on the relative error.

The error is relative because 5 ms matter for a step of 10 ms, but not for a prefill of 5 s. Coefficients are at least
0, because a negative coefficient would give negative times outside the measured range.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore_serving.planning.profile import (
    DecodeTimes,
    PrefillTimes,
    Residual,
    TransferResidual,
    TransferTimes,
)

Floats = npt.NDArray[np.float64]


class TimeSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured time of `requests` requests at once. `tokens`: the length of each prompt, or of each request's
    context."""

    requests: int
    tokens: float
    seconds: float


class TransferSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured time of a call that moved `nbytes`."""

    nbytes: int
    seconds: float


class TooFew(ValueError):
    """There are too few different samples to fit."""


def fit_prefill(samples: Sequence[TimeSample]) -> PrefillTimes:
    """Fit a + b sum(L) + c sum(L^2). The samples must have at least two lengths, and several prompts at once. Raises
    `TooFew`."""
    rows = [(1.0, each.requests * each.tokens, each.requests * each.tokens**2) for each in samples]
    (a, b, c), fitted = _least_squares(rows, [each.seconds for each in samples])
    residuals = _residuals(samples, fitted)
    return PrefillTimes(a, b, c, *_errors(residuals), residuals)


def fit_decode(samples: Sequence[TimeSample]) -> DecodeTimes:
    """Fit a + b sum(context) + c requests. The samples must have at least two lengths, and several requests at once.
    Raises `TooFew`."""
    rows = [(1.0, each.requests * each.tokens, float(each.requests)) for each in samples]
    (a, b, c), fitted = _least_squares(rows, [each.seconds for each in samples])
    residuals = _residuals(samples, fitted)
    return DecodeTimes(a, b, c, 1, *_errors(residuals), residuals)


def fit_transfer(samples: Sequence[TransferSample]) -> TransferTimes:
    """Fit a + b bytes with b > 0, so that there is a rate. The samples must have at least two sizes. Raises
    `TooFew`."""
    rows = [(1.0, float(each.nbytes)) for each in samples]
    (latency_s, per_byte_s), fitted = _least_squares(rows, [each.seconds for each in samples], needed=1)
    residuals = [
        TransferResidual(each.nbytes, each.seconds, seconds, seconds / each.seconds - 1)
        for each, seconds in zip(samples, fitted.tolist(), strict=True)
    ]
    return TransferTimes(latency_s, per_byte_s, *_errors(residuals), residuals)


def _residuals(samples: Sequence[TimeSample], fitted: Floats) -> list[Residual]:
    return [
        Residual(each.requests, each.tokens, each.seconds, seconds, seconds / each.seconds - 1)
        for each, seconds in zip(samples, fitted.tolist(), strict=True)
    ]


def _errors(residuals: Sequence[Residual | TransferResidual]) -> tuple[float, float]:
    """Return the mean and the largest of the absolute errors."""
    errors = [abs(each.error) for each in residuals]
    return sum(errors) / len(errors), max(errors)


def _least_squares(
    rows: Sequence[Sequence[float]], measured: Sequence[float], needed: int | None = None
) -> tuple[list[float], Floats]:
    """Return the coefficients, which are at least 0, and the fitted times. `needed`: the index of a coefficient that
    must be above 0.

    There are only a few coefficients, so every choice of nonzero coefficients can be tried. Of these fits, the best one
    without a negative coefficient is the optimum. Lawson and Hanson's algorithm finds the same optimum by a search.
    """
    loads, count = np.array(rows), len(rows[0])
    if np.linalg.matrix_rank(loads / np.abs(loads).max(axis=0)) < count:
        raise TooFew(
            f"{len(set(map(tuple, rows)))} different loads do not determine {count} coefficients: expected two or "
            "more lengths and, for an engine, several requests at once"
        )
    scaled = loads / np.array(measured)[:, None]
    best, least = np.zeros(count), np.inf
    for number in range(1, count + 1):
        for chosen in itertools.combinations(range(count), number):
            found, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones(len(rows)), rcond=None)
            left = float(((scaled[:, chosen] @ found - 1) ** 2).sum())
            lacks = needed is not None and (needed not in chosen or found[chosen.index(needed)] <= 0)
            if (found >= 0).all() and not lacks and left < least - 1e-12:
                best, least = np.zeros(count), left
                best[list(chosen)] = found
    fitted: Floats = loads @ best
    return best.tolist(), fitted
