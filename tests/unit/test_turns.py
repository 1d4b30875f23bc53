"""The turns of a shard's loop: cheap work goes first, no connection starves, and slow turns are counted by their main
cause."""

from __future__ import annotations

import time

import pytest

from kvstore.shard import turns
from kvstore.shard.turns import SLOW_TURN_S, STAGES, Cost, LoopWatchdog, SliceClass, SliceQueue


def test_cheap_connections_go_first_in_order_of_arrival() -> None:
    line: SliceQueue[str] = SliceQueue()
    for name, pace in (
        ("a", SliceClass.SLOW),
        ("b", SliceClass.QUICK),
        ("c", SliceClass.SLOW),
        ("d", SliceClass.QUICK),
        ("e", SliceClass.CHEAP),
        ("b", SliceClass.SLOW),
        ("f", SliceClass.PREFERRED),
        ("c", SliceClass.CHEAP),
    ):
        line.add(name, pace)
    assert len(line) == 6 and list(line.turn()) == ["f", "e", "b", "d", "a", "c"] and not len(line)


def test_a_connection_added_during_a_turn_waits_for_the_next() -> None:
    line: SliceQueue[str] = SliceQueue()
    line.add("a", SliceClass.QUICK)
    for name in line.turn():
        line.add(name, SliceClass.QUICK)
        line.add("b", SliceClass.QUICK)
    assert list(line.turn()) == ["a", "b"]


def test_a_turn_ends_on_time_and_each_connection_progresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LIMITS_S", (0.0,) * len(SliceClass))
    line: SliceQueue[int] = SliceQueue()
    for number in range(6):
        line.add(number, SliceClass.SLOW if number % 2 else SliceClass.QUICK)
    taken = []
    while len(line):
        for number in line.turn():
            taken.append(number)
            time.sleep(0.0001)
    assert taken == [0, 1, 2, 3, 4, 5]


def test_a_connection_is_slow_until_its_slices_stay_cheap() -> None:
    cost = Cost()
    assert cost.pace == SliceClass.SLOW
    paces = []
    for _ in range(12):
        cost.add(0.00001)
        paces.append(cost.pace)
    assert paces == sorted(paces, reverse=True) and paces[0] == SliceClass.SLOW and paces[-1] == SliceClass.CHEAP
    cost.add(0.1)
    assert cost.pace == SliceClass.QUICK, "one slice that cost much does not make it slow"
    for _ in range(5):
        cost.add(0.002)
        cost.add(0.0001)  # a message in several slices, only one of which takes long
        cost.add(0.0001)
        assert cost.pace == SliceClass.QUICK
    for _ in range(10):
        cost.add(0.0015)
    assert cost.pace == SliceClass.SLOW


def test_a_slow_turn_counts_for_its_most_expensive_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(turns.time, "monotonic", lambda: now)
    watch = LoopWatchdog()
    for longest in (0.001, SLOW_TURN_S, 3 * SLOW_TURN_S, 2 * SLOW_TURN_S):
        watch.begin(now)
        now += 0.0001
        watch.done("events")
        now += longest
        watch.done("disk")
        now += 0.0001
        watch.done("replies")
        watch.end()
    assert watch.slow == {**dict.fromkeys(STAGES, 0), "disk": 3}
    assert watch.longest_s == pytest.approx(3 * SLOW_TURN_S + 0.0002)


def test_the_slow_turns_since_a_request_began_count_for_their_longest_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(turns.time, "monotonic", lambda: now)
    watch = LoopWatchdog()
    began = 0.0
    for stage, took in (("disk", 0.2), ("background", 0.3), ("disk", 0.01), ("replies", 0.1), ("background", 0.1)):
        if stage == "background" and not began:
            began = now
        watch.begin(now)
        now += took
        watch.done(stage)  # type: ignore[arg-type]
        now += 0.001
        watch.done("housekeeping")
        watch.end()
    watch.begin(now)
    now += 0.002
    watch.done("events")
    now += 0.005
    found = watch.slow_since(began, "requests")
    assert found == pytest.approx({"background": 0.402, "replies": 0.101, "requests": 0.007})
    assert watch.slow_since(now, "requests") == pytest.approx({"requests": 0.007})
    watch.done("requests")
    now += 0.001
    assert watch.slow_since(now, "background") == pytest.approx({"requests": 0.008})
