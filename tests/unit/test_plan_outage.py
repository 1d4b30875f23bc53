"""What the failure of an engine costs, in simulated time. The profile: prefills of 1 ms a token, steps of 10 ms."""

from __future__ import annotations

import pytest

from kvstore_serving.load.report import Slo
from kvstore_serving.planning.goodput import Goal
from kvstore_serving.planning.outage import MOST_REQUESTS, OutageCost, OutageTooLong, cost_of
from kvstore_serving.planning.placement import Engines, Placement, Shape
from kvstore_serving.planning.workload import Lengths, Synthetic
from tests.unit.test_plan_simulator import fleet

ALIKE = Synthetic(Lengths(100), Lengths(10), arrival_cv=0.0)  # a prefill takes 0.1 s, an answer 0.1 s


def cost(prefills: int, rate_rps: float, outage_s: float, ttft_s: float = 0.3) -> OutageCost:
    """Of a prefill engine."""
    placement = Placement(Engines(Shape(1, 1), prefills), Engines(Shape(1, 1), 4))
    goal = Goal(Slo(ttft_s, 1.0), 90)
    return cost_of(fleet(placement), ALIKE, goal, rate_rps, 0, "prefill", outage_s)


def test_while_the_only_engine_is_away_all_requests_miss() -> None:
    """At half of its capacity the queue of 20 s is worked off in another 20 s."""
    found = cost(1, 5.0, 20.0)
    assert found.recovered_s == pytest.approx(40.0, abs=2.0)
    assert found.missed == pytest.approx(5.0 * 40.0, rel=0.05), "each that comes until then"
    assert (found.phase, found.engines, found.outage_s, found.rate_rps) == ("prefill", 1, 20.0, 5.0)


def test_an_engine_to_spare_costs_what_is_under_way_at_most() -> None:
    found = cost(3, 15.0, 20.0)
    assert found.missed <= 3 and found.recovered_s is not None and found.recovered_s < 1.0


def test_engines_that_are_full_do_not_recover() -> None:
    """Two engines serve 20 requests/s, and 19.9 come."""
    found = cost(2, 19.9, 20.0)
    assert found.recovered_s is None
    assert found.missed > 0.9 * 19.9 * found.run_s


def test_nobody_misses_slos_that_an_outage_holds() -> None:
    found = cost(1, 2.0, 1.0, ttft_s=60.0)
    assert (found.missed, found.recovered_s) == (0, 0.0)


def test_an_outage_that_no_run_holds_is_refused() -> None:
    with pytest.raises(OutageTooLong, match="expected 4e\\+03 s or less"):
        cost(1, MOST_REQUESTS / 20_000, 5000.0)
