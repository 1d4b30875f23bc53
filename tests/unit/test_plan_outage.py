"""What the failure of an engine costs, in simulated time. In the profile, prefills take 1 ms per token and steps take
10 ms."""

from __future__ import annotations

import pytest

from kvstore_serving.load.report import Slo
from kvstore_serving.planning.goodput import Goal
from kvstore_serving.planning.outage import MAX_OUTAGE_REQUESTS, OutageCost, OutageTooLong, cost_of
from kvstore_serving.planning.placement import EnginePlacement, Engines, Shape
from kvstore_serving.planning.workload import Lengths, Synthetic
from tests.unit.test_plan_simulator import fleet

ALIKE = Synthetic(Lengths(100), Lengths(10), arrival_cv=0.0)  # a prefill takes 0.1 s, an answer 0.1 s


def cost(prefills: int, rate_rps: float, outage_s: float, ttft_s: float = 0.3) -> OutageCost:
    """Return the cost of a prefill engine's failure."""
    placement = EnginePlacement(Engines(Shape(1, 1), prefills), Engines(Shape(1, 1), 4))
    goal = Goal(Slo(ttft_s, 1.0), 90)
    return cost_of(fleet(placement), ALIKE, goal, rate_rps, 0, "prefill", outage_s)


def test_while_the_only_engine_is_away_all_requests_miss() -> None:
    """The load is half of the engine's capacity, so after 20 s without the engine its queue is empty after another 20
    s."""
    found = cost(1, 5.0, 20.0)
    assert found.recovered_s == pytest.approx(40.0, abs=2.0)
    assert found.missed == pytest.approx(5.0 * 40.0, rel=0.05), "each that comes until then"
    assert (found.phase, found.engines, found.outage_s, found.rate_rps) == ("prefill", 1, 20.0, 5.0)


def test_a_spare_engine_limits_the_cost_to_requests_in_progress() -> None:
    found = cost(3, 15.0, 20.0)
    assert found.missed <= 3 and found.recovered_s is not None and found.recovered_s < 1.0


def test_fully_loaded_engines_do_not_recover() -> None:
    """Two engines can serve 20 requests per second, and 19.9 arrive, so the queue of the outage hardly shrinks."""
    found = cost(2, 19.9, 20.0)
    assert found.recovered_s is None
    assert found.missed > 0.9 * 19.9 * found.run_s


def test_slos_longer_than_an_outage_are_met() -> None:
    found = cost(1, 2.0, 1.0, ttft_s=60.0)
    assert (found.missed, found.recovered_s) == (0, 0.0)


def test_an_outage_longer_than_every_run_is_refused() -> None:
    with pytest.raises(OutageTooLong, match="expected 4e\\+03 s or less"):
        cost(1, MAX_OUTAGE_REQUESTS / 20_000, 5000.0)
