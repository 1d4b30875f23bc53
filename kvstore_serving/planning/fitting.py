"""Fits the times of a profile to measured ones, by least squares on the relative error.

Relative, because a step of 10 ms that is wrong by 5 ms is wrong, and a prefill of 5 s is not. Coefficients are not
negative: a negative one would give negative times outside of what was measured.
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


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured time. `tokens`: of each prompt, or the context of each request, of `requests` at once."""

    requests: int
    tokens: float
    seconds: float


class TransferSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured time of a call that moved `nbytes`."""

    nbytes: int
    seconds: float


class TooFew(ValueError):
    """There are not enough different samples to fit."""


def fit_prefill(samples: Sequence[Sample]) -> PrefillTimes:
    """-> a + b sum(L) + c sum(L^2). Needs two lengths, and batches. Raises `TooFew`."""
    rows = [(1.0, each.requests * each.tokens, each.requests * each.tokens**2) for each in samples]
    (a, b, c), fitted = _least_squares(rows, [each.seconds for each in samples])
    residuals = _residuals(samples, fitted)
    return PrefillTimes(a, b, c, *_errors(residuals), residuals)


def fit_decode(samples: Sequence[Sample]) -> DecodeTimes:
    """-> a + b sum(context) + c requests. Needs two lengths, and batches. Raises `TooFew`."""
    rows = [(1.0, each.requests * each.tokens, float(each.requests)) for each in samples]
    (a, b, c), fitted = _least_squares(rows, [each.seconds for each in samples])
    residuals = _residuals(samples, fitted)
    return DecodeTimes(a, b, c, 1, *_errors(residuals), residuals)


def fit_transfer(samples: Sequence[TransferSample]) -> TransferTimes:
    """-> a + b bytes, with a rate: b is more than 0. Needs two sizes. Raises `TooFew`."""
    rows = [(1.0, float(each.nbytes)) for each in samples]
    (latency_s, per_byte_s), fitted = _least_squares(rows, [each.seconds for each in samples], needed=1)
    residuals = [
        TransferResidual(each.nbytes, each.seconds, seconds, seconds / each.seconds - 1)
        for each, seconds in zip(samples, fitted.tolist(), strict=True)
    ]
    return TransferTimes(latency_s, per_byte_s, *_errors(residuals), residuals)


def _residuals(samples: Sequence[Sample], fitted: Floats) -> list[Residual]:
    return [
        Residual(each.requests, each.tokens, each.seconds, seconds, seconds / each.seconds - 1)
        for each, seconds in zip(samples, fitted.tolist(), strict=True)
    ]


def _errors(residuals: Sequence[Residual | TransferResidual]) -> tuple[float, float]:
    """-> the mean and the largest of the absolute errors."""
    errors = [abs(each.error) for each in residuals]
    return sum(errors) / len(errors), max(errors)


def _least_squares(
    rows: Sequence[Sequence[float]], measured: Sequence[float], needed: int | None = None
) -> tuple[list[float], Floats]:
    """-> the coefficients, at least 0, and the fitted times. needed: the number of one that is to be more than 0.

    With so few coefficients, every choice of those that are not 0 can be tried: the best one without a negative is the
    optimum under that condition (Lawson and Hanson's, without their search)."""
    loads, count = np.array(rows), len(rows[0])
    if np.linalg.matrix_rank(loads / np.abs(loads).max(axis=0)) < count:
        raise TooFew(
            f"{len(set(map(tuple, rows)))} different loads do not tell {count} coefficients apart: expected two "
            "lengths or more, and of an engine several requests at once"
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
