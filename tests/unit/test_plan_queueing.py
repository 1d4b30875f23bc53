"""The closed forms, compared with the formulas that they come from, with tables, and with a simulated queue."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvstore_serving.planning.queueing import (
    Unstable,
    crossover,
    highest_load,
    inter_op,
    intra_op,
    mean_wait,
    one_device,
    wait_percentile,
    wait_within,
)


def lindley(load: float, arrivals: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the waits at an M/D/1 queue with service time 1, from Lindley's recursion: each wait is the remaining
    earlier work."""
    gaps = np.random.default_rng(seed).exponential(1 / load, arrivals)
    steps = np.concatenate([[0.0], np.cumsum(1.0 - gaps[1:])])
    return steps - np.minimum.accumulate(np.minimum(steps, 0.0))


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
def test_the_means_follow_the_formulas(load: float) -> None:
    service = 0.2
    rate = load / service
    assert one_device(service, rate).ttft_s.mean == pytest.approx(service + rate * service**2 / (2 * (1 - load)))
    two = inter_op(service, rate, 2)
    assert two.ttft_s.mean == pytest.approx(service + rate * service**2 / (4 * (2 - load)))
    assert two.utilisation == pytest.approx(load / 2)
    speedup = 1.7
    shared = intra_op(service, rate, speedup)
    expected = service / speedup + rate * service**2 / (2 * speedup * (speedup - load))
    assert shared.ttft_s.mean == pytest.approx(expected)
    assert shared.utilisation == pytest.approx(load / speedup)


def test_variable_service_times_make_arrivals_wait_longer() -> None:
    assert mean_wait(0.5, 1.0, 1.0) == pytest.approx(1.0), "M/M/1: rho / (1 - rho) services"
    assert mean_wait(0.5, 1.0, 1.0) == pytest.approx(2 * mean_wait(0.5, 1.0))


@pytest.mark.parametrize("load", [0.1, 0.4, 0.7])
def test_the_distribution_equals_crommelins_where_his_sum_is_precise(load: float) -> None:
    for wait in (0.0, 0.3, 0.999, 1.0, 1.7, 4.25, 8.5):
        terms = (
            (-load * (wait - k)) ** k / math.factorial(k) * math.exp(load * (wait - k)) for k in range(int(wait) + 1)
        )
        assert wait_within(load, 1.0, wait) == pytest.approx((1 - load) * sum(terms), abs=1e-9)


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_percentiles_equal_those_of_the_queue(load: float) -> None:
    waits = lindley(load, 400_000, seed=1)
    for percentile in (90, 99):
        found = wait_percentile(load, 1.0, percentile)
        assert found == pytest.approx(float(np.percentile(waits, percentile)), rel=0.05)


def test_the_tail_continues_where_the_sum_ends() -> None:
    load = 0.995
    waits = [wait_within(load, 1.0, wait) for wait in (398.0, 399.4, 400.0, 401.0, 800.0, 1e6)]
    assert waits == sorted(waits) and waits[-1] == 1.0
    assert wait_percentile(load, 1.0, 99.9) == pytest.approx(math.log(1000) / 2 / (1 - load), rel=0.02), "heavy traffic"


def test_a_percentile_of_requests_that_do_not_wait_is_zero() -> None:
    assert wait_percentile(0.05, 1.0, 90) == 0.0
    assert wait_percentile(0.15, 1.0, 90) > 0.0


def test_intra_op_is_faster_below_the_crossover_and_inter_op_above() -> None:
    for speedup, load in ((1.2, 0.43), (1.5, 0.94), (1.8, 1.43), (1.9, 1.63)):
        found = crossover(speedup)
        assert found == pytest.approx(load, rel=0.02)
        for rate, intra_is_faster in ((found * 0.98, True), (found * 1.02, False)):
            intra, inter = intra_op(1.0, rate, speedup), inter_op(1.0, rate, 2)
            assert (intra.ttft_s.mean < inter.ttft_s.mean) is intra_is_faster


def test_means_do_not_bound_the_90th_percentile() -> None:
    for services, load in ((1.5, 0.18), (2, 0.39), (3, 0.59), (5, 0.76)):
        assert highest_load(services, 90) == pytest.approx(load, abs=0.01)


@pytest.mark.parametrize("rate", [5.0, 6.0])
def test_an_unstable_queue_is_an_error(rate: float) -> None:
    with pytest.raises(Unstable, match="expected less than 5 requests/s"):
        one_device(0.2, rate)


@pytest.mark.parametrize("speedup", [1.0, 2.0, 0.5])
def test_without_a_real_speedup_there_is_no_crossover(speedup: float) -> None:
    with pytest.raises(ValueError, match="expected more than 1 and less than 2"):
        crossover(speedup)
