"""Which loads pay: what would arrive later than it is computed is computed."""

from __future__ import annotations

import pytest

from kvstore_client.engine import admission as module
from kvstore_client.engine.admission import FIRST_LOAD_S, HOPE_S, LEAST_S, Admission, Pace, StepTimes

BLOCK_TOKENS = 32


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def known(arriving: float, computing: float) -> Admission:
    """One that has measured blocks a second and tokens a second."""
    admission = Admission(block_tokens=BLOCK_TOKENS, timeout_s=5)
    admission.arriving.add(arriving, 1.0)
    admission.computing.add(computing, 1.0)
    admission.begin(0)
    admission.end(0)
    return admission


def test_what_arrives_sooner_is_loaded_and_the_rest_computed(clock: Clock) -> None:
    assert known(arriving=101, computing=100 * BLOCK_TOKENS).judge(50) == 50
    assert known(arriving=99, computing=100 * BLOCK_TOKENS).judge(50) == 0
    assert known(arriving=0, computing=1).judge(1) == 0


def test_a_load_waits_for_those_before_it(clock: Clock) -> None:
    admission = known(arriving=200, computing=100 * BLOCK_TOKENS)
    assert admission.begin(50) == pytest.approx(0.5)  # as long as computing them
    assert admission.judge(50) == 50  # 100 / 200 s, and computing takes 0.5 s
    assert admission.judge(49) == 0
    assert admission.begin(50) == pytest.approx(0.25 + 0.5)
    admission.end(50)
    admission.end(50)
    assert admission.judge(49) == 49


def test_computing_waits_for_the_prompts_before_it(clock: Clock) -> None:
    """Of many requests that come at once, those that are computed wait for each other."""
    admission = known(arriving=200, computing=100 * BLOCK_TOKENS)
    admission.begin(50)
    assert admission.judge(49) == 0
    assert admission.judge(49, tokens_before=50 * BLOCK_TOKENS) == 49
    assert admission.begin(49, tokens_before=50 * BLOCK_TOKENS) == pytest.approx(0.25 + 0.99)


def test_while_nothing_is_known_one_load_is_tried(clock: Clock) -> None:
    admission = Admission(block_tokens=BLOCK_TOKENS, timeout_s=5)
    assert admission.judge(50) == 50
    assert admission.begin(50) == 5
    assert admission.judge(50) is None
    clock.now += FIRST_LOAD_S
    assert admission.judge(50) == 0
    admission.arriving.add(10, 0.001)
    assert admission.judge(50) == 0  # these were the first load's first blocks
    admission.end(50)
    assert admission.judge(50) == 50


def test_no_load_takes_longer_than_the_timeout_or_less_than_chance(clock: Clock) -> None:
    assert known(arriving=1e6, computing=1).begin(1000) == 5
    assert known(arriving=1e6, computing=1e9).begin(1) == LEAST_S
    slow = known(arriving=1, computing=1)
    slow.begin(10**6)
    assert slow.begin(1) == 5 + 5


def test_a_store_that_was_slow_is_tried_again(clock: Clock) -> None:
    admission = known(arriving=10, computing=100 * BLOCK_TOKENS)
    assert admission.judge(50) == 0
    clock.now += 3 * HOPE_S
    assert admission.judge(50) == 0
    clock.now += HOPE_S
    assert admission.judge(50) == 7, "a few blocks tell as much"
    admission.begin(7)
    assert admission.judge(50) == 0, "one trial at a time"
    admission.arrived(1000, 1.0)
    admission.end(7)
    assert admission.judge(50) == 50


def test_a_store_that_gave_nothing_at_all_is_tried_again_too(clock: Clock) -> None:
    admission = known(arriving=0, computing=100 * BLOCK_TOKENS)
    admission.arriving = Pace()
    admission.arrived(0, 1.0)
    assert admission.judge(50) == 0
    clock.now += 8 * HOPE_S
    assert admission.judge(50) == 7
    admission.arrived(0, 0.0)  # nothing was on its way
    assert admission.judge(50) == 7


def test_always_means_always(clock: Clock) -> None:
    admission = Admission(block_tokens=BLOCK_TOKENS, timeout_s=5, always=True)
    admission.arriving.add(1, 100.0)
    admission.computing.add(1e9, 1.0)
    assert admission.judge(10**6) == 10**6
    assert admission.begin(10**6) == 5


def test_the_newest_seconds_count_most() -> None:
    pace = Pace()
    assert pace.per_s is None
    pace.add(1000, 1.0)
    assert pace.per_s == 1000
    for _ in range(30):
        pace.add(10, 1.0)
    assert pace.per_s == pytest.approx(10, rel=0.7)
    pace.add(5, 0.0)  # tells nothing
    assert pace.per_s == pytest.approx(10, rel=0.7)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_engines_pace_is_that_of_its_steps(ahead: int, clock: Clock) -> None:
    """With one step ahead, a step has ended when the one after the next is planned."""
    computing = Pace()
    steps = StepTimes(computing, ahead)
    for number in range(6):
        steps.plan({"long": 512})
        clock.now += 0.0 if ahead and number == 0 else 0.5
    assert computing.per_s == pytest.approx(1024)


def test_decoding_and_pauses_tell_nothing_of_prompts(clock: Clock) -> None:
    computing = Pace()
    steps = StepTimes(computing, 0)
    for _ in range(5):  # decoding, with a short prompt among it
        steps.plan({"one": 1, "two": 1, "three": 1, "four": 3})
        clock.now += 0.05
    assert computing.per_s is None
    computing = Pace()
    steps = StepTimes(computing, 0)
    steps.plan({"prompt": 512})
    clock.now += 100.0  # it was answered, and nobody asked any more
    steps.plan({"another": 512})
    clock.now += 0.5
    steps.plan({"another": 1})
    assert computing.per_s == pytest.approx(1024)
