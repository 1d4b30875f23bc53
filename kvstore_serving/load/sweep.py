"""Several rates, one run each: attainment against rate, and the highest rate at which enough requests attain.

Runs follow each other, each after the last one's requests have ended, so that no queue of one run burdens the next.
Every run has a seed of its own, else the prompts of the second would be in the caches that the first one filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvstore_serving.load.report import LoadReport

TARGET: Final = 0.9


class Sweep(msgspec.Struct, frozen=True):
    """`sweep`: one report a rate, by rising rate. `goodput_at_90_rps`: see `rate_at`."""

    sweep: list[LoadReport]
    goodput_at_90_rps: float | None


def rate_at(points: Sequence[tuple[float, float]], target: float = TARGET) -> float | None:
    """-> the rate up to which attainment stays at `target` or above, from (rate, attainment) by rising rate.

    Interpolated between the last rate that attains and the first that does not. None if the lowest rate does not.
    The highest measured rate if all attain: the true value may then be higher.
    """
    before: tuple[float, float] | None = None
    for rate, attained in points:
        if attained < target:
            if before is None:
                return None
            low, high = before
            return low + (rate - low) * (high - target) / (high - attained)
        before = rate, attained
    return None if before is None else before[0]


def make_sweep(reports: Sequence[LoadReport]) -> Sweep:
    """The reports of a sweep, by rate. One that was interrupted is shown, but lacks its slowest requests: it says
    nothing of the rate."""
    ordered = sorted(reports, key=lambda report: report.rate_rps or 0.0)
    points = [(each.rate_rps or 0.0, each.attainment.joint or 0.0) for each in ordered if not each.interrupted]
    return Sweep(ordered, rate_at(points))
