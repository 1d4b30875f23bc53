"""Calls that run in steps, many of them on one thread: each call ends exactly once, wherever it waits, and no wake-up
is lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore_client._calls.exchange import Awaited, Steps, drive
from kvstore_client._links.leading import Leading
from kvstore_client._links.link_pool import LinkPool
from kvstore_client.engine import multiplexer as module
from kvstore_client.engine.multiplexer import Multiplexer, Task
from tests.support.harness import wait_until

FAR = 60.0


def a_pool() -> LinkPool:
    """Return the part of a client's pool that a multiplexer uses: the real code for waiting, without links."""
    leading = Leading(lambda: [], lambda: None)
    pool = SimpleNamespace(wait=leading.wait, wake=leading.wake, closed=False, leading=leading)
    return cast("LinkPool", pool)


def close(pool: LinkPool) -> None:
    pool.closed = True
    cast("Any", pool).leading.close()


@pytest.fixture
def pools() -> Iterator[list[LinkPool]]:
    made = [a_pool(), a_pool()]
    yield made
    for pool in made:
        close(pool)


class Ended:
    """The outcomes of some calls."""

    def __init__(self) -> None:
        self.results: dict[int, list[Any]] = {}

    def of(self, number: int) -> Callable[[Any], None]:
        return lambda result: self.results.setdefault(number, []).append(result)


def waits_for(pool: LinkPool, event: threading.Event, closed: list[int], deadline_s: float = FAR) -> Steps[str]:
    try:
        holds = yield Awaited(pool, event.is_set, time.monotonic() + deadline_s)
        return "held" if holds else "too late"
    finally:
        closed.append(1)


def test_a_single_call_runs_on_the_calling_thread(pools: list[LinkPool]) -> None:
    event, closed = threading.Event(), list[int]()
    assert drive(waits_for(pools[0], event, closed, 0.01)) == "too late"
    event.set()
    assert drive(waits_for(pools[0], event, closed)) == "held" and len(closed) == 2

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    pool = cast("LinkPool", SimpleNamespace(wait=interrupted))
    with pytest.raises(KeyboardInterrupt):
        drive(waits_for(pool, event, closed))
    assert len(closed) == 3, "it gave up what it had asked for"


def test_every_call_ends_once_with_its_result(pools: list[LinkPool]) -> None:
    """The calls wait for events that other threads set at any time, alternately for two clients."""
    choose, ended, count = random.Random(1), Ended(), 200
    multiplexer = Multiplexer(lambda: float("inf"))
    events = [[threading.Event() for _ in range(3)] for _ in range(count)]

    def call(number: int) -> Steps[int]:
        for at, event in enumerate(events[number]):
            assert (yield Awaited(pools[(number + at) % 2], event.is_set, time.monotonic() + FAR))
        return number

    for number in range(count):
        multiplexer.start(call(number), ended.of(number))
    todo = [(each, pools[(number + at) % 2]) for number in range(count) for at, each in enumerate(events[number])]
    choose.shuffle(todo)

    def set_some(some: list[tuple[threading.Event, LinkPool]]) -> None:
        for event, pool in some:
            event.set()
            pool.wake()

    threads = [threading.Thread(target=set_some, args=[todo[at::3]]) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(ended.results) == count)
    assert all(ended.results[number] == [number] for number in range(count))
    multiplexer.close()


def test_waiting_calls_can_be_stopped_and_closed_anywhere(pools: list[LinkPool]) -> None:
    ended, never, closed = Ended(), threading.Event(), list[int]()
    multiplexer = Multiplexer(lambda: float("inf"))
    tasks = [multiplexer.start(waits_for(pools[n % 2], never, closed), ended.of(n)) for n in range(10)]
    wait_until(lambda: all(task.awaited is not None for task in tasks))
    for task in tasks[:4]:
        task.stopped = True
    multiplexer.wake()
    wait_until(lambda: len(ended.results) == 4)
    assert len(closed) == 4
    multiplexer.close()
    assert ended.results == {number: [None] for number in range(10)} and len(closed) == 10
    multiplexer.start(waits_for(pools[0], never, closed), ended.of(10))  # too late
    assert ended.results[10] == [None]
    multiplexer.close()


def test_a_closed_client_ends_the_waits_of_its_calls(pools: list[LinkPool]) -> None:
    ended, never, closed = Ended(), threading.Event(), list[int]()
    multiplexer = Multiplexer(lambda: float("inf"))
    task = multiplexer.start(waits_for(pools[0], never, closed), ended.of(0))
    wait_until(lambda: task.awaited is not None)
    close(pools[0])
    wait_until(lambda: ended.results == {0: ["too late"]})
    multiplexer.close()


def test_new_calls_are_seen_at_once_and_defects_end_no_thread(
    pools: list[LinkPool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The multiplexer's thread may be idle, wait for a client, or be between the two."""
    monkeypatch.setattr(module, "AFTER_DEFECT_S", 0.0)
    ended, never, seen = Ended(), threading.Event(), threading.Event()
    multiplexer: Multiplexer

    def plan() -> float:
        seen.set()
        if len(ended.results) == 1:
            ended.results[-1] = []
            raise ZeroDivisionError("a defect")
        return float("inf")

    multiplexer = Multiplexer(plan)

    def looks() -> float:
        seen.clear()
        began = time.monotonic()
        multiplexer.wake()
        assert seen.wait(5.0)
        return time.monotonic() - began

    idle_s = sorted(looks() for _ in range(50))[25]
    task: Task = multiplexer.start(waits_for(pools[0], never, []), ended.of(0))
    wait_until(lambda: task.awaited is not None)
    busy_s = sorted(looks() for _ in range(50))[25]
    assert max(idle_s, busy_s) < 0.04, "nobody waited for the next look"
    multiplexer.start(fails(pools[0]), ended.of(1))
    wait_until(lambda: ended.results.get(1) == [None])
    assert "a defect" in caplog.text and looks() < 5.0
    multiplexer.close()
    assert ended.results[0] == [None]


def fails(pool: LinkPool) -> Steps[None]:
    yield Awaited(pool, lambda: True, 0.0)
    raise ZeroDivisionError("a defect")


def looks_until(holds: Callable[[], bool], looks: list[bool]) -> Steps[int]:
    """A call that waits for a condition that no link signals."""
    while not looks or not looks[-1]:
        looks.append((yield Awaited(None, holds, time.monotonic() + 0.002)))
    return len(looks)


def test_conditions_without_a_link_are_checked_by_their_deadline(pools: list[LinkPool]) -> None:
    """The call runs alone, next to calls that wait for links, and among other calls of its kind."""
    it_is_there = threading.Event()
    looks: list[bool] = []

    def comes_after_a_look() -> None:
        wait_until(lambda: looks)
        it_is_there.set()

    threading.Thread(target=comes_after_a_look).start()
    assert drive(looks_until(it_is_there.is_set, looks)) == len(looks) > 1 and not any(looks[:-1])
    for beside in (False, True):
        it_is_there.clear()
        looks = []
        ended, never = Ended(), threading.Event()
        multiplexer = Multiplexer(lambda: FAR + time.monotonic())
        if beside:
            multiplexer.start(waits_for(pools[0], never, []), ended.of(0))
        multiplexer.start(looks_until(it_is_there.is_set, looks), ended.of(1))
        wait_until(lambda: looks)  # noqa: B023 - it looks in vain
        assert not ended.results
        it_is_there.set()
        wait_until(lambda ended=ended: 1 in ended.results)  # type: ignore[misc]
        multiplexer.close()
