"""When the proxy takes an engine's silence for a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstore_serving.proxy import silence
from kvstore_serving.proxy.silence import ENOUGH_ANSWERS, MIN_SILENCE_S, TIMES, Silence, weight


class Time:
    now = 100.0


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(silence.time, "monotonic", lambda: found.now)
    return found


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[Time], None]:
    def run(time: Time) -> None:
        asyncio.run(test(time))

    run.__name__ = test.__name__
    return run


def learn(found: Silence, time: Time, seconds: float, count: int = ENOUGH_ANSWERS) -> None:
    for _ in range(count):
        waiting = found.begin(1.0)
        time.now += seconds
        found.came(waiting)
        found.ended(waiting)


@in_loop
async def test_no_request_is_late_before_the_usual_time_is_known(time: Time) -> None:
    found = Silence()
    found.begin(1.0)
    time.now += 10_000
    assert not found.late()
    learn(found, time, 0.1)
    time.now += MIN_SILENCE_S + 0.1
    assert found.late()


@in_loop
async def test_an_engine_without_answers_is_measured_by_the_others(time: Time) -> None:
    usual = silence.nothing_usual()
    others, found = [Silence(usual) for _ in range(2)], Silence(usual)
    for each in others:
        learn(each, time, 1.0, ENOUGH_ANSWERS // 2)
    found.begin(1.0)
    time.now += TIMES + 0.1
    assert found.late()


@in_loop
async def test_a_request_is_late_after_several_usual_times(time: Time) -> None:
    found = Silence()
    learn(found, time, 1.0)
    found.begin(weight(1024))
    time.now += TIMES * 3 - 0.1
    assert not found.late()
    time.now += 0.2
    assert found.late()


@in_loop
async def test_quick_requests_get_a_minimum_time(time: Time) -> None:
    found = Silence()
    learn(found, time, 0.001)
    found.begin(1.0)
    time.now += MIN_SILENCE_S - 0.01
    assert not found.late()
    time.now += 0.02
    assert found.late()


@in_loop
async def test_an_engine_that_sends_anything_is_not_silent(time: Time) -> None:
    found = Silence()
    learn(found, time, 0.1)
    other, _ = found.begin(1.0), found.begin(1.0)
    for _ in range(10):
        time.now += 1.0
        found.came(other)
        assert not found.late()
    time.now += TIMES + 0.1
    assert found.late(), "the other one has stopped, too"


@in_loop
async def test_a_stream_may_wait_for_other_prompts(time: Time) -> None:
    """A stream pauses while its engine computes a long prompt, which is no failure."""
    found = Silence()
    learn(found, time, 1.0)
    stream = found.begin(1.0)
    found.came(stream)
    long = found.begin(weight(512 * 9))
    time.now += 5 * 10.5
    assert found.late(), "the prompt itself"
    found.ended(long)
    assert found.late()
    time.now -= 50
    assert not found.late()


@in_loop
async def test_each_waiting_request_is_given_up_once(time: Time) -> None:
    found = Silence()
    learn(found, time, 0.1)
    waiting = [found.begin(1.0) for _ in range(3)]
    found.give_up()
    found.give_up()
    assert all(each.given_up.done() for each in waiting)


@in_loop
async def test_two_unanswered_requests_count_as_much_as_a_waiting_one(time: Time) -> None:
    found = Silence()
    for _ in range(2):
        time.now += 0.5
        waiting = found.begin(1.0)
        time.now += 0.5
        found.ended(waiting)
    assert not found.late()
    time.now += MIN_SILENCE_S
    assert found.late()
    found.answers()
    assert not found.late()


@in_loop
async def test_refusals_and_requests_of_unknown_weight_prove_nothing(time: Time) -> None:
    """An engine's server may refuse requests and tokenize texts although its worker has frozen, so these answers prove
    nothing."""
    found = Silence()
    for _ in range(3):
        refused, passed = found.begin(1.0), found.begin(float("inf"))
        found.refused(refused)
        found.ended(refused)
        found.ended(passed)
    time.now += MIN_SILENCE_S + 1
    assert not found.late() and found.limit_s(1.0) == float("inf")
