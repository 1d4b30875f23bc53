"""Which loads pay: the engine computes blocks that would arrive later than it can compute them."""

from __future__ import annotations

import math

import pytest

from kvstore_client.engine import admission as module
from kvstore_client.engine.admission import FIRST_LOAD_S, HOPE_S, LOOKUP_SHARE, MIN_LOOKUP_S, Admission, RecentRate
from tests.support.standing_clock import StandingClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    return StandingClock(monkeypatch, module)


def known(arriving: float) -> Admission:
    """Return an admission that has measured that this many blocks arrive per second."""
    admission = Admission(timeout_s=5)
    admission.arriving.add(arriving, 1.0)
    admission.begin(0, 0.0)
    admission.end(0)
    return admission


def test_blocks_that_arrive_sooner_are_loaded_and_the_rest_are_computed(clock: StandingClock) -> None:
    assert known(arriving=101).judge(50, 0.5) == 50
    assert known(arriving=99).judge(50, 0.5) == 0
    assert known(arriving=0).judge(1, 4.0) == 0
    assert known(arriving=101).judge(50, math.inf) == 50, "how long computing takes is not known"


def test_a_load_waits_for_those_before_it(clock: StandingClock) -> None:
    admission = known(arriving=200)
    assert admission.begin(50, 0.5) == pytest.approx(0.5)  # as long as computing them
    assert admission.judge(50, 0.5) == 50  # 100 / 200 s
    assert admission.judge(50, 0.49) == 0
    assert admission.begin(50, 0.5) == pytest.approx(0.5)  # from the load's beginning …
    assert admission.latest_s(0.5) == pytest.approx(0.5)  # … and at most this long from now
    assert admission.latest_s(math.inf) == math.inf
    assert Admission(timeout_s=5, always=True).latest_s(0.5) == math.inf
    admission.end(50)
    admission.end(50)
    assert admission.judge(50, 0.49) == 50


def test_while_nothing_is_known_one_load_is_tried(clock: StandingClock) -> None:
    admission = Admission(timeout_s=5)
    assert admission.judge(50, math.inf) == 50
    assert admission.begin(50, math.inf) == 5
    assert admission.judge(50, math.inf) is None
    clock.now += FIRST_LOAD_S
    assert admission.judge(50, math.inf) == 0
    admission.arriving.add(10, 0.001)
    assert admission.judge(50, math.inf) == 0  # these were the blocks of the first load
    admission.end(50)
    assert admission.judge(50, math.inf) == 50


def test_no_load_takes_longer_than_the_timeout_or_less_than_chance(clock: StandingClock) -> None:
    assert known(arriving=1e6).begin(1000, 1000.0) == 5
    assert known(arriving=1e6).begin(1, 1e-9) == MIN_LOOKUP_S
    slow = known(arriving=1)
    slow.begin(10**6, 10.0)
    assert slow.begin(1, 10.0) == 5


def test_a_store_that_was_slow_is_tried_again(clock: StandingClock) -> None:
    admission = known(arriving=10)
    assert admission.judge(50, 0.5) == 0
    clock.now += 3 * HOPE_S
    assert admission.judge(50, 0.5) == 0
    clock.now += HOPE_S
    assert admission.judge(50, 0.5) == 7, "a few blocks tell as much"
    admission.begin(7, 0.07)
    assert admission.judge(50, 0.5) == 0, "one trial at a time"
    admission.arrived(1000, 1.0)
    admission.end(7)
    assert admission.judge(50, 0.5) == 50


def test_a_store_that_delivered_nothing_is_tried_again_too(clock: StandingClock) -> None:
    admission = known(arriving=0)
    admission.arriving = RecentRate()
    admission.arrived(0, 1.0)
    assert admission.judge(50, 0.5) == 0
    clock.now += 8 * HOPE_S
    assert admission.judge(50, 0.5) == 7
    admission.arrived(0, 0.0)  # nothing had been sent
    assert admission.judge(50, 0.5) == 7


def test_a_lookup_waits_only_as_long_as_a_load_can_pay(clock: StandingClock) -> None:
    admission = Admission(timeout_s=5)
    assert admission.patience_s(50, math.inf) == pytest.approx(LOOKUP_SHARE * 5)
    assert admission.patience_s(50, 2.0) == pytest.approx(LOOKUP_SHARE * 2.0)
    assert admission.patience_s(50, 1e-9) == MIN_LOOKUP_S
    admission.begin(50, 2.0)
    assert admission.patience_s(50, 2.0) > 0, "the first load will tell soon"
    admission.arrived(1, 1.0)
    admission.end(50)
    assert admission.patience_s(50, 2.0) == 0
    clock.now += 20 * HOPE_S
    assert admission.patience_s(50, 2.0) > 0, "the store is tried again"
    assert Admission(timeout_s=5, always=True).patience_s(50, 1e-9) == math.inf


@pytest.mark.parametrize("stored_per_s", [0.0, 0.5, 7.6, 40.0, 90.0, 110.0, 1000.0])
@pytest.mark.parametrize("one_takes_s", [0.1, 0.5, 2.0])
def test_requests_one_after_another_are_no_slower_than_computing(
    clock: StandingClock, stored_per_s: float, one_takes_s: float
) -> None:
    """Only the first load, which measures the store, and occasional trials of a part of a load may take longer. The
    test sets the clock, so the sums depend on decisions and not on measured times."""
    admission, blocks = Admission(timeout_s=5), round(100 * one_takes_s)
    parked_s, loads, first_s = 0.0, 0, 0.0
    began = clock.now
    for _ in range(200):
        load = admission.judge(blocks, one_takes_s)
        assert load is not None
        left = blocks
        if load:
            loads += 1
            within_s = admission.begin(load, one_takes_s * load / blocks)
            needed_s = load / stored_per_s if stored_per_s else math.inf
            took_s = min(within_s, needed_s)
            clock.now += took_s
            parked_s += took_s
            came = load if needed_s <= within_s else math.floor(stored_per_s * took_s)
            admission.arrived(came, took_s)
            admission.end(load)
            left -= came
            first_s = first_s or took_s
        clock.now += one_takes_s * left / blocks
    passed_s, computed_s = clock.now - began, 200 * one_takes_s
    assert passed_s <= 1.05 * computed_s + first_s + MIN_LOOKUP_S
    if stored_per_s >= 110:
        assert loads == 200 and parked_s == pytest.approx(200 * blocks / stored_per_s)


def test_always_means_always(clock: StandingClock) -> None:
    admission = Admission(timeout_s=5, always=True)
    admission.arriving.add(1, 100.0)
    assert admission.judge(10**6, 1e-9) == 10**6
    assert admission.begin(10**6, 1e-9) == 5


def test_the_newest_seconds_count_most() -> None:
    pace = RecentRate()
    assert pace.per_s is None
    pace.add(1000, 1.0)
    assert pace.per_s == 1000
    for _ in range(30):
        pace.add(10, 1.0)
    assert pace.per_s == pytest.approx(10, rel=0.7)
    pace.add(5, 0.0)  # without time, this shows nothing about the pace
    assert pace.per_s == pytest.approx(10, rel=0.7)
