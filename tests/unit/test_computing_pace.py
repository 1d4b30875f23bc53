"""The time to compute a prompt, estimated from an engine's steps. The engines here are simulated, with known costs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvstore_client.engine import computing_pace as module
from kvstore_client.engine.computing_pace import (
    COSTS,
    MAX_MEASURED_STEPS,
    RECENT_S,
    ComputingPace,
    Scheduled,
    StepTimes,
)
from tests.support.properties import examples
from tests.support.standing_clock import StandingClock


@dataclass
class Engine:
    """A simulated engine, which computes prompts in steps of at most `budget` tokens. c1, c2: as in `ComputingPace`.
    step_s: the fixed cost of each step. noise: the largest relative error of its times."""

    c1: float
    c2: float = 0.0
    step_s: float = 0.0
    budget: int = 2048
    noise: float = 0.0
    slower: float = 1.0

    def __post_init__(self) -> None:
        self._random = random.Random(7)

    def seconds(self, first: int, end: int) -> float:
        return self.slower * (self.c1 * (end - first) + self.c2 * (end * end - first * first) / 2)

    def compute(self, pace: ComputingPace, prompts: Iterable[int]) -> None:
        """Compute one prompt after another."""
        for tokens in prompts:
            for first in range(0, tokens, self.budget):
                end = min(tokens, first + self.budget)
                took = self.seconds(first, end) + self.step_s
                pace.add([(first, end)], took * self._random.uniform(1 - self.noise, 1 + self.noise))

    def error(self, pace: ComputingPace, tokens: int) -> float:
        """Return the estimated time as a multiple of the true time."""
        estimated = pace.seconds(0, tokens)
        assert estimated is not None
        return estimated / self.seconds(0, tokens)


QUADRATIC = Engine(c1=1e-4, c2=1e-8, noise=0.1)  # at 10 000 tokens, attention is half of the work

engines = st.builds(
    Engine,
    c1=st.floats(1e-6, 1e-2),
    c2=st.floats(0, 1e-6),
    step_s=st.floats(0, 0.1),
    budget=st.sampled_from([512, 2048, 8192]),
    noise=st.floats(0, 0.5),
)
prompts = st.lists(st.integers(1, 60_000), min_size=1, max_size=8)
priors = st.sampled_from([0.0, 1 / 384, 1 / 24576])


def test_nothing_is_known_before_a_step_was_measured() -> None:
    pace = ComputingPace()
    assert pace.seconds(0, 100) is None
    pace.add([], 1.0)
    pace.add([(0, 10)], 0.0)
    assert pace.seconds(0, 100) is None


def test_a_linear_engine_is_found_to_be_linear() -> None:
    engine, pace = Engine(c1=1e-4), ComputingPace()
    engine.compute(pace, [300, 5000, 20_000])
    for tokens in (100, 5000, 100_000):
        assert engine.error(pace, tokens) == pytest.approx(1, rel=1e-6)


def test_longer_prompts_than_measured_include_the_attention_cost() -> None:
    pace = ComputingPace()
    QUADRATIC.compute(pace, [2000, 20_000, 500, 8000])
    linear = QUADRATIC.seconds(0, 2000) / 2000 * 100_000
    assert QUADRATIC.seconds(0, 100_000) > 5 * linear, "what is missed by the pace of short prompts"
    assert QUADRATIC.error(pace, 100_000) == pytest.approx(1, rel=0.25)


def test_the_shape_is_not_forgotten_while_prompts_are_short() -> None:
    pace = ComputingPace()
    QUADRATIC.compute(pace, [50_000])
    QUADRATIC.compute(pace, [2000] * 500)
    assert QUADRATIC.error(pace, 100_000) == pytest.approx(1, rel=0.25)


def test_the_fixed_cost_of_steps_does_not_hide_the_shape() -> None:
    engine, pace = Engine(c1=1e-4, c2=1e-8, step_s=0.05), ComputingPace()
    engine.compute(pace, [30, 100, 400, 30_000, 30, 200])
    engine.compute(pace, [30_000])
    assert engine.error(pace, 100_000) == pytest.approx(1, rel=0.35)


def test_an_engine_that_slows_down_or_speeds_up_is_followed() -> None:
    engine, pace = Engine(c1=1e-4, c2=1e-8, noise=0.1), ComputingPace()
    engine.compute(pace, [20_000, 2000])
    for slower in (10.0, 1.0):
        engine.slower = slower
        engine.compute(pace, [2000] * (64 + int(2 * RECENT_S / engine.seconds(0, 2000))))
        assert engine.error(pace, 2000) == pytest.approx(1, rel=0.15)
        assert 0.5 < engine.error(pace, 100_000) < 2


def test_a_very_slow_step_is_ignored() -> None:
    """An engine's first step is often very slow, so one step like that must not change the estimate."""
    pace = ComputingPace()
    pace.add([(0, 2000)], 60.0)
    QUADRATIC.compute(pace, [20_000])
    pace.add([(0, 2000)], 60.0)
    for tokens in (2000, 20_000, 100_000):
        assert QUADRATIC.error(pace, tokens) == pytest.approx(1, rel=0.25)


def test_prompts_of_one_length_give_the_pace_and_the_model_the_shape() -> None:
    """Until prompts are long enough to measure how the time grows with their length, the estimate uses the model's
    width."""
    plain, told = ComputingPace(), ComputingPace(attention=1e-4)
    for pace in (plain, told):
        QUADRATIC.compute(pace, [2000] * 20)
        assert QUADRATIC.error(pace, 2000) == pytest.approx(1, rel=0.1)
    per_token = QUADRATIC.seconds(0, 2000) / 2000
    assert plain.seconds(0, 100_000) == pytest.approx(per_token * 100_000, rel=0.1), "linear: nothing tells more"
    assert QUADRATIC.error(told, 100_000) == pytest.approx(1, rel=0.1)
    wrong = ComputingPace(attention=1.0)
    QUADRATIC.compute(wrong, [2000, 20_000])
    assert QUADRATIC.error(wrong, 100_000) == pytest.approx(1, rel=0.25), "measured, so no longer believed"


@settings(max_examples=examples(25))
@given(engine=engines, computed=prompts, attention=priors, tokens=st.integers(1, 200_000), more=st.integers(0, 200_000))
def test_a_longer_prompt_never_takes_less_in_total_or_per_token(
    engine: Engine, computed: list[int], attention: float, tokens: int, more: int
) -> None:
    pace = ComputingPace(attention)
    engine.compute(pace, computed)
    short, long = pace.seconds(0, tokens), pace.seconds(0, tokens + more)
    assert short is not None and long is not None and 0 <= short <= long
    assert long / (tokens + more) >= short / tokens * (1 - 1e-9)
    rest = pace.seconds(tokens, tokens + more)
    assert rest is not None and short + rest == pytest.approx(long), "prompts in parts add up"


@settings(max_examples=examples(25))
@given(engine=engines, tokens=st.integers(2, 60_000), times=st.integers(1, 30), longer=st.integers(1, 10))
def test_after_prompts_of_one_length_a_longer_one_is_never_estimated_faster(
    engine: Engine, tokens: int, times: int, longer: int
) -> None:
    pace = ComputingPace()
    engine.noise = 0.0
    # With more steps, the first ones would be forgotten: only the newest steps and those at each doubling are kept.
    engine.compute(pace, [tokens] * min(times, COSTS + MAX_MEASURED_STEPS * engine.budget // tokens))
    measured = engine.seconds(0, tokens) + engine.step_s * -(-tokens // engine.budget)
    estimated = pace.seconds(0, longer * tokens)
    assert estimated is not None and estimated >= longer * measured * 0.8


@settings(max_examples=examples(25))
@given(c1=st.floats(1e-6, 1e-3), c2=st.floats(0, 1e-7), budget=st.sampled_from([512, 2048, 8192]), attention=priors)
def test_the_estimate_converges(c1: float, c2: float, budget: int, attention: float) -> None:
    engine, pace = Engine(c1=c1, c2=c2, budget=budget, noise=0.05), ComputingPace(attention)
    engine.compute(pace, [64 * budget, 100_000, 3 * budget, 32 * budget])
    for tokens in (budget, 20_000, 100_000):
        assert 0.6 < engine.error(pace, tokens) < 1.7


# ---- from when the engine plans its steps ----------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    return StandingClock(monkeypatch, module)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_engines_pace_is_that_of_its_steps(ahead: int, clock: StandingClock) -> None:
    """An engine that plans one step ahead has ended a step when it plans the step after the next one."""
    pace = ComputingPace()
    steps = StepTimes(pace, ahead)
    for number in range(6):
        steps.plan({"long": Scheduled(512 * number, 512, prompt=True)})
        clock.now += 0.0 if ahead and number == 0 else 0.5
    assert pace.seconds(0, 1024) == pytest.approx(1.0)


def test_decoding_and_pauses_do_not_affect_the_estimate(clock: StandingClock) -> None:
    pace = ComputingPace()
    steps = StepTimes(pace, 0)
    decoding = {name: Scheduled(100, 1, prompt=False) for name in ("one", "two", "three")}
    for _ in range(5):  # each step also computes a short prompt
        steps.plan({**decoding, "four": Scheduled(0, 3, prompt=True)})
        clock.now += 0.05
    assert pace.seconds(0, 100) is None
    steps = StepTimes(pace, 0)
    steps.plan({"prompt": Scheduled(0, 512, prompt=True)})
    clock.now += 100.0  # the request was answered, and then the engine was idle
    steps.plan({"another": Scheduled(0, 512, prompt=True)})
    clock.now += 0.5
    steps.plan({"another": Scheduled(512, 1, prompt=False)})
    assert pace.seconds(0, 1024) == pytest.approx(1.0)
