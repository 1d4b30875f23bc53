"""How long the connector delays requests, measured with vLLM's real scheduler and a clock that the test moves."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from tests.support.standing_clock import StandingClock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from kvstore_client.vllm.connector import held_back
    from kvstore_client.vllm.connector.held_back import MOST_UNTAKEN, HeldBackTimes
    from tests.engine.scheduled_engine import BLOCK_TOKENS, ScheduledEngine

PROMPT = range(5 * BLOCK_TOKENS + 3)
PACE = 10.0 * BLOCK_TOKENS  # tokens computed per second: a block takes 0.1 s


def computing(first: int, end: int) -> float:
    return (end - first) / PACE


Start = Callable[..., ScheduledEngine]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    """The clock with which the connector measures how long it holds a request back."""
    return StandingClock(monkeypatch, held_back)


def engine_of(start: Start, blocks_in_store: int, **arguments: object) -> ScheduledEngine:
    engine = start(**arguments)
    engine.scheduler.connector.get_kv_connector_stats = lambda: None  # `taken` takes them
    # The steps of these tests would give no estimate of an engine's speed.
    engine.half.loads.computing.seconds = computing  # type: ignore[method-assign]
    for rank in engine.ranks:
        rank.held.update(engine.keys(PROMPT)[:blocks_in_store])
    return engine


def taken(engine: ScheduledEngine) -> list[float]:
    return [round(seconds, 6) for seconds in engine.half.held_back.take()]


def test_a_requests_wait_is_counted_while_the_engine_asks_every_step(start: Start, clock: StandingClock) -> None:
    engine = engine_of(start, 0)
    engine.lookups.answering = False
    engine.add(PROMPT)
    clock.now += 5.0  # the engine has not yet asked for this request
    for _ in range(3):
        engine.step()
        clock.now += 0.25
    assert taken(engine) == []
    engine.lookups.answering = True
    engine.step()
    assert taken(engine) == [0.75]


def test_waiting_for_engine_room_is_not_counted_as_the_stores_delay(start: Start, clock: StandingClock) -> None:
    times = HeldBackTimes()
    times.asked("a", 0, again=True)
    times.step()
    clock.now += 0.5
    times.asked("a", 0, again=True)
    times.step()
    times.step()  # the engine did not ask for the request in this step
    clock.now += 7.0
    times.asked("a", 0, again=True)
    times.step()
    clock.now += 0.25
    times.asked("a", 0, again=False)
    clock.now += 3.0  # the engine has no blocks for the request
    times.step()
    times.asked("a", 0, again=False)
    times.allocated("a", 0, computing)
    found = times.ended("a")
    assert found is not None
    assert (found.asked_s, found.seconds) == (0.75, 0.75)


@pytest.mark.parametrize(("load_s", "held_back_s"), [(0.4, 0.0), (0.9, 0.4)])
def test_only_a_loads_excess_over_computing_counts(
    start: Start, clock: StandingClock, load_s: float, held_back_s: float
) -> None:
    engine = engine_of(start, 5)
    engine.add(PROMPT)
    engine.step()
    clock.now += load_s
    engine.transfer()
    engine.step()
    assert taken(engine) == [held_back_s]


def test_a_failed_load_is_timed_like_a_successful_one(start: Start, clock: StandingClock) -> None:
    engine = engine_of(start, 5)
    request = engine.add(PROMPT)
    engine.step()
    clock.now += 0.75
    [rank] = engine.ranks
    rank.finish_load(deliver=0)
    engine.step()
    engine.step()
    assert taken(engine)[0] == 0.25
    assert request.num_computed_tokens


def test_waiting_for_anothers_load_is_compared_with_computing_its_blocks(start: Start, clock: StandingClock) -> None:
    engine = engine_of(start, 5)
    engine.add(PROMPT)
    engine.add([*PROMPT, *range(1000, 1000 + 7)])
    engine.step()
    clock.now += 0.4
    engine.transfer()
    engine.step()
    engine.step()
    assert taken(engine) == [0.0, 0.0]


def test_prompts_computed_by_others_have_separate_times(start: Start, clock: StandingClock) -> None:
    engine = engine_of(start, 5)
    engine.add(PROMPT, side="do_remote_decode")
    engine.run()
    assert taken(engine) == []


def test_times_that_are_never_taken_are_bounded(clock: StandingClock) -> None:
    times = HeldBackTimes()
    for number in range(MOST_UNTAKEN + 10):
        times.asked(str(number), 0, again=False)
        times.allocated(str(number), 0, computing)
        times.ended(str(number))
    assert len(times.take()) == MOST_UNTAKEN
    assert not times.take() and not len(times)


def test_an_aborted_request_leaves_nothing(start: Start, clock: StandingClock) -> None:
    engine = engine_of(start, 5)
    engine.lookups.answering = False
    request = engine.add(PROMPT)
    engine.step()
    assert len(engine.half.held_back) == 1
    engine.abort(request)
    assert len(engine.half.held_back) == 0
