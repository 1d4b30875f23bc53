"""A sweep: one run at each of several rates. It gives attainment against rate, and the highest measured rate at which
enough requests attain their SLOs.

A run starts when the requests of the run before it have ended, so that the queue of one run does not burden the next.
Every run has its own seed. Otherwise its prompts would be in the caches that the first run filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvstore_serving.load.report import LoadReport

TARGET: Final = 0.9


class RateSweep(msgspec.Struct, frozen=True):
    """The result of a sweep. `sweep`: one report for each rate, in the order of rising rates. The other fields are
    measured rates; see `rates_around`."""

    sweep: list[LoadReport]
    goodput_at_90_rps: float | None
    below_90_rps: float | None


def rates_around(points: Sequence[tuple[float, float]], target: float = TARGET) -> tuple[float | None, float | None]:
    """Return the highest rate up to which attainment stays at `target` or above, and the next rate. Both are measured:
    the true limit is between them. `points`: pairs of rate and attainment, in the order of rising rates.

    The first is None if the lowest rate does not reach the target, and the second is None if all rates reach it.
    """
    reached: float | None = None
    for rate, attained in points:
        if attained < target:
            return reached, rate
        reached = rate
    return reached, None


def make_sweep(reports: Sequence[LoadReport]) -> RateSweep:
    """Return the result of a sweep, ordered by rate. An interrupted run is listed, but it lacks its slowest requests,
    so it is not used to find the highest rate."""
    ordered = sorted(reports, key=lambda report: report.rate_rps or 0.0)
    points = [(each.rate_rps or 0.0, each.attainment.joint or 0.0) for each in ordered if not each.interrupted]
    return RateSweep(ordered, *rates_around(points))
