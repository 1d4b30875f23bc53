"""Turns of a shard's loop: quick ones first, nobody starves, and slow turns are counted by what they did."""

from __future__ import annotations

import time

import pytest

from kvstore.shard import turns
from kvstore.shard.turns import SLOW_TURN_S, Line, Turns


def test_quick_ones_go_first_and_in_the_order_in_which_they_came() -> None:
    line: Line[str] = Line()
    for name, slow in (("a", True), ("b", False), ("c", True), ("d", False), ("b", True)):
        line.add(name, slow)
    assert len(line) == 4 and list(line.turn()) == ["b", "d", "a", "c"] and not len(line)


def test_preferred_ones_go_before_all_others() -> None:
    line: Line[str] = Line()
    line.add("a")
    line.add("b", slow=True, preferred=True)
    line.add("b")
    assert len(line) == 2 and list(line.turn()) == ["b", "a"] and not len(line)


def test_who_is_added_during_a_turn_waits_for_the_next() -> None:
    line: Line[str] = Line()
    line.add("a")
    for name in line.turn():
        line.add(name)
        line.add("b", slow=True)
    assert list(line.turn()) == ["a", "b"]


def test_a_turn_ends_when_its_time_is_over_and_each_line_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "QUICK_LINE_S", 0.0)
    monkeypatch.setattr(turns, "SLOW_LINE_S", 0.0)
    line: Line[int] = Line()
    for number in range(6):
        line.add(number, slow=number % 2 == 1)
    taken = []
    while len(line):
        for number in line.turn():
            taken.append(number)
            time.sleep(0.0001)
    assert taken == [0, 1, 2, 3, 4, 5]


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
    assert watch.slow == {"disk": 3}
    assert watch.longest_s == pytest.approx(3 * SLOW_TURN_S + 0.0002)
