"""The cost of an engine that fails and is replaced: the same load is simulated with and without the failure.

A fleet with one engine fewer has a lower goodput, but that is only its steady state. This module estimates what users
notice until the engine is back: how many requests miss an SLO that they would have attained, and for how long.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import msgspec

from kvstore_serving.planning.goodput import Goal, requests_of
from kvstore_serving.planning.simulator import WARM_UP, Fleet, Outage, simulate
from kvstore_serving.planning.workload import Recipe

BEGINS: Final = 0.3  # the share of the run's time at which the outage begins, after the warm-up
LASTS: Final = 0.2  # the largest share of the run's time; the rest is for the recovery
AGAIN: Final = 0.95  # share of the arrivals' time; if the outage causes misses after it, the fleet has not recovered
MAX_OUTAGE_REQUESTS: Final = 200_000  # requests in a run, which takes about 20 s to simulate


class OutageCost(msgspec.Struct, frozen=True):
    """The cost if one of a phase's `engines` engines is away for `outage_s`, at a load of `rate_rps`.

    missed: the number of requests that miss an SLO because of the outage, including those in progress at the failure
    recovered_s: the time from the failure to the last of these requests; None if the fleet had not recovered when the
    run ended
    run_s: the time from the failure to the end of the run
    """

    phase: str
    engines: int
    outage_s: float
    rate_rps: float
    missed: int
    recovered_s: float | None
    run_s: float


class OutageTooLong(ValueError):
    """More requests arrive during the outage than a run can simulate."""


def requests_for(fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float, outage_s: float) -> int:
    """Return the number of requests for a run that is long enough for the outage. Raises `OutageTooLong`."""
    needed = math.ceil(rate_rps * outage_s / LASTS)
    if needed > MAX_OUTAGE_REQUESTS:
        longest = LASTS * MAX_OUTAGE_REQUESTS / rate_rps
        raise OutageTooLong(
            f"an outage of {outage_s:g} s at {rate_rps:.3g} requests/s is too long to simulate: "
            f"expected {longest:.3g} s or less"
        )
    return max(needed, requests_of(fleet, recipe, goal, rate_rps))


def cost_of(
    fleet: Fleet, recipe: Recipe, goal: Goal, rate_rps: float, seed: int, phase: str, outage_s: float
) -> OutageCost:
    """Simulate the load with and without an outage of the first engine of a phase. Raises `OutageTooLong`."""
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
