"""What it costs when one engine fails and is replaced: simulated beside the same load without the failure.

The goodput with one engine less says what a fleet serves for good. This says what users see until it is back: how many
requests miss an SLO that they would have attained, and for how long.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import msgspec

from kvstore_serving.planning.goodput import Goal, requests_of
from kvstore_serving.planning.simulator import WARM_UP, Fleet, Outage, simulate
from kvstore_serving.planning.workload import Recipe

BEGINS: Final = 0.3  # of the run's time: after the warm-up
LASTS: Final = 0.2  # at most; the rest is there to recover
AGAIN: Final = 0.95  # of the arrivals: who still misses SLOs for the outage behind this has not recovered
MOST_REQUESTS: Final = 200_000  # of a run: some 20 s of simulation


class OutageCost(msgspec.Struct, frozen=True):
    """One of the `engines` of a phase is away for `outage_s`, at a load of `rate_rps`. `missed`: requests that miss an
    SLO because of it, those that are under way when it fails included. `recovered_s`: from the failure to the last
    of them; None: the fleet had not recovered when the run ended, `run_s` after the failure."""

    phase: str
    engines: int
    outage_s: float
    rate_rps: float
    missed: int
    recovered_s: float | None
    run_s: float


class OutageTooLong(ValueError):
    """So many requests come in the meantime that no run holds them."""


def requests_for(fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float, outage_s: float) -> int:
    """-> how many requests a run has in which the outage has room. Raises `OutageTooLong`."""
    needed = math.ceil(rate_rps * outage_s / LASTS)
    if needed > MOST_REQUESTS:
        longest = LASTS * MOST_REQUESTS / rate_rps
        raise OutageTooLong(
            f"an outage of {outage_s:g} s at {rate_rps:.3g} requests/s: expected {longest:.3g} s or less"
        )
    return max(needed, requests_of(fleet, recipe, goal, rate_rps))


def cost_of(
    fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float, seed: int, phase: str, outage_s: float
) -> OutageCost:
    """Play the load with and without the outage of the first engine of a phase. Raises `OutageTooLong`."""
    workload = recipe.make(requests_for(fleet, recipe, goal, rate_rps, outage_s), seed)
    first = int(len(workload) * WARM_UP)
    at = workload.at / rate_rps
    begins = BEGINS * float(at[-1])
    outage = Outage(phase, 0, begins, begins + outage_s)
    attained = []
    for outages in ((), (outage,)):
        ttft, tpot = simulate(replace(fleet, outages=outages), workload, rate_rps, warm_up=first).held(goal.slo)
        attained.append(ttft & tpot)
    calm, failed = attained
    missed = at[first:][calm & ~failed]
    last = float(missed[-1]) if len(missed) else begins
    return OutageCost(
        phase=phase,
        engines=fleet.placement.named[phase].instances,
        outage_s=outage_s,
        rate_rps=rate_rps,
        missed=len(missed),
        recovered_s=max(0.0, last - begins) if last <= AGAIN * at[-1] else None,
        run_s=float(at[-1]) - begins,
    )
