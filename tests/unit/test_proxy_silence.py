"""When an engine's silence is too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstore_serving.proxy import silence
from kvstore_serving.proxy.silence import ENOUGH, LEAST_S, TIMES, Silence, weight


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


def learn(found: Silence, time: Time, seconds: float, count: int = ENOUGH) -> None:
    for _ in range(count):
        waiting = found.begin(1.0)
        time.now += seconds
        found.came(waiting)
        found.ended(waiting)


@in_loop
async def test_nothing_is_late_before_it_is_known_what_is_usual(time: Time) -> None:
    found = Silence()
    found.begin(1.0)
    time.now += 10_000
    assert not found.late()
    learn(found, time, 0.1)
    time.now += LEAST_S + 0.1
    assert found.late()


@in_loop
async def test_an_engine_that_has_not_answered_yet_is_measured_by_the_others(time: Time) -> None:
    usual = silence.nothing_usual()
    others, found = [Silence(usual) for _ in range(2)], Silence(usual)
    for each in others:
        learn(each, time, 1.0, ENOUGH // 2)
    found.begin(1.0)
    time.now += TIMES + 0.1
    assert found.late()


@in_loop
async def test_a_request_is_late_after_some_times_the_usual(time: Time) -> None:
    found = Silence()
    learn(found, time, 1.0)
    found.begin(weight(1024))
    time.now += TIMES * 3 - 0.1
    assert not found.late()
    time.now += 0.2
    assert found.late()


@in_loop
async def test_what_is_quick_is_given_a_moment(time: Time) -> None:
    found = Silence()
    learn(found, time, 0.001)
    found.begin(1.0)
    time.now += LEAST_S - 0.01
    assert not found.late()
    time.now += 0.02
    assert found.late()


@in_loop
async def test_an_engine_that_says_anything_is_not_silent(time: Time) -> None:
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
async def test_a_stream_waits_for_the_prompts_of_others(time: Time) -> None:
    """An engine computes a long prompt between two tokens of a stream."""
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
async def test_whoever_waits_is_given_up_once(time: Time) -> None:
    found = Silence()
    learn(found, time, 0.1)
    waiting = [found.begin(1.0) for _ in range(3)]
    found.give_up()
    found.give_up()
    assert all(each.given_up.done() for each in waiting)


@in_loop
async def test_two_that_were_left_without_an_answer_are_as_bad_as_one_that_waits(time: Time) -> None:
    found = Silence()
    for _ in range(2):
        time.now += 0.5
        waiting = found.begin(1.0)
        time.now += 0.5
        found.ended(waiting)
    assert not found.late()
    time.now += LEAST_S
    assert found.late()
    found.answers()
    assert not found.late()


@in_loop
async def test_refusals_and_requests_of_unknown_weight_are_no_evidence(time: Time) -> None:
    """An engine's server refuses, and tokenizes, though its worker has frozen; or the other way round."""
    found = Silence()
    for _ in range(3):
        refused, passed = found.begin(1.0), found.begin(float("inf"))
        found.refused(refused)
        found.ended(refused)
        found.ended(passed)
    time.now += LEAST_S + 1
    assert not found.late() and found.limit_s(1.0) == float("inf")
