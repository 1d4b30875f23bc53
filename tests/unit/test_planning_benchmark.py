"""Values that the planner's benchmarks compute from their measurements."""

from __future__ import annotations

import pytest

from benchmarks.measures import MEASURES, PLANNER
from benchmarks.planning.bench_predicted_apart import AS_IT_RUNS
from benchmarks.planning.sensitivity import sensitivity
from benchmarks.planning.tables import PREDICTED_APART
from benchmarks.render.ledger import age
from benchmarks.results_reader import read_results
from benchmarks.run_all import RESULTS


def test_with_an_unchanged_profile_the_prediction_equals_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    result = read_results(RESULTS)[PREDICTED_APART]
    rows = sensitivity(result)
    assert all(row["predicted"][0.9] >= row["predicted"][1.1] for row in rows)
    monkeypatch.setitem(MEASURES, PREDICTED_APART, PLANNER)  # the prediction depends only on the planner
    if "stale" in age(result):
        pytest.skip("the planner has changed since it was measured")
    kept = [case.parameters["predicted"] for case in result.measured_group(AS_IT_RUNS)]
    assert [row["predicted"][1.0] for row in rows] == kept
