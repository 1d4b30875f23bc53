"""Fits the times of a profile to measured ones, by least squares on the relative error.

Relative, because a step of 10 ms that is wrong by 5 ms is wrong, and a prefill of 5 s is not. Coefficients are not
negative: a negative one would give negative times outside of what was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from kvstore_serving.planning.profile import DecodeTimes, PrefillTimes


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured time. `tokens`: of each prompt, or the context of each request, of `requests` at once."""

    requests: int
    tokens: float
    seconds: float


class TooFew(ValueError):
    """There are not enough different samples to fit."""


def fit_prefill(samples: Sequence[Sample]) -> PrefillTimes:
    """-> a + b sum(L) + c sum(L^2). Needs two lengths, and batches. Raises `TooFew`."""
    rows = [(1.0, each.requests * each.tokens, each.requests * each.tokens**2) for each in samples]
    return PrefillTimes(*_least_squares(rows, samples))


def fit_decode(samples: Sequence[Sample]) -> DecodeTimes:
    """-> a + b sum(context) + c requests. Needs two lengths, and batches. Raises `TooFew`."""
    rows = [(1.0, each.requests * each.tokens, float(each.requests)) for each in samples]
    a, b, c, error = _least_squares(rows, samples)
    return DecodeTimes(a, b, c, error=error)


def _least_squares(rows: Sequence[tuple[float, float, float]], samples: Sequence[Sample]) -> list[float]:
    """-> the coefficients, at least 0, and the mean absolute relative error.

    With three coefficients, every choice of those that are not 0 can be tried: the best one without a negative is the
    optimum under that condition (Lawson and Hanson's, without their search)."""
    loads = np.array(rows)
    if np.linalg.matrix_rank(loads / np.abs(loads).max(axis=0)) < 3:
        raise TooFew(
            f"{len(set(rows))} different loads do not tell three coefficients apart: expected two lengths or more, and "
            "several requests at once"
        )
    seconds = np.array([each.seconds for each in samples])
    scaled = np.array(rows) / seconds[:, None]
    best, least = np.zeros(3), np.inf
    for number in range(1, 4):
        for chosen in itertools.combinations(range(3), number):
            found, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones(len(rows)), rcond=None)
            left = float(((scaled[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and left < least - 1e-12:
                best, least = np.zeros(3), left
                best[list(chosen)] = found
    error = float(np.abs(scaled @ best - 1).mean())
    return [*best.tolist(), error]
