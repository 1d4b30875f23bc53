"""Turns of a shard's loop: cheap ones first, nobody starves, and slow turns are counted by what they did."""

from __future__ import annotations

import time

import pytest

from kvstore.shard import turns
from kvstore.shard.turns import SLOW_TURN_S, STAGES, Cost, Line, Pace, Turns


def test_cheap_ones_go_first_and_in_the_order_in_which_they_came() -> None:
    line: Line[str] = Line()
    for name, pace in (
        ("a", Pace.SLOW),
        ("b", Pace.QUICK),
        ("c", Pace.SLOW),
        ("d", Pace.QUICK),
        ("e", Pace.CHEAP),
        ("b", Pace.SLOW),
        ("f", Pace.PREFERRED),
        ("c", Pace.CHEAP),
    ):
        line.add(name, pace)
    assert len(line) == 6 and list(line.turn()) == ["f", "e", "b", "d", "a", "c"] and not len(line)


def test_who_is_added_during_a_turn_waits_for_the_next() -> None:
    line: Line[str] = Line()
    line.add("a", Pace.QUICK)
    for name in line.turn():
        line.add(name, Pace.QUICK)
        line.add("b", Pace.QUICK)
    assert list(line.turn()) == ["a", "b"]


def test_a_turn_ends_when_its_time_is_over_and_each_line_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LIMITS_S", (0.0,) * len(Pace))
    line: Line[int] = Line()
    for number in range(6):
        line.add(number, Pace.SLOW if number % 2 else Pace.QUICK)
    taken = []
    while len(line):
        for number in line.turn():
            taken.append(number)
            time.sleep(0.0001)
    assert taken == [0, 1, 2, 3, 4, 5]


def test_a_connection_is_slow_until_its_slices_were_cheap_for_a_while() -> None:
    cost = Cost()
    assert cost.pace == Pace.SLOW
    paces = []
    for _ in range(12):
        cost.add(0.00001)
        paces.append(cost.pace)
    assert paces == sorted(paces, reverse=True) and paces[0] == Pace.SLOW and paces[-1] == Pace.CHEAP
    cost.add(0.1)
    assert cost.pace == Pace.QUICK, "one slice that cost much does not make it slow"
    for _ in range(5):
        cost.add(0.002)
        cost.add(0.0001)  # one message of several slices, of which only one costs much
        cost.add(0.0001)
        assert cost.pace == Pace.QUICK
    for _ in range(10):
        cost.add(0.0015)
    assert cost.pace == Pace.SLOW


def test_a_slow_turn_counts_for_the_stage_that_took_most_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(turns.time, "monotonic", lambda: now)
    watch = Turns()
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
