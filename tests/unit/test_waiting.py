"""How a shard waits for events: it polls before it sleeps only while that pays, and yields the core while it polls."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.shard.waiting import LOOKING_S, MOST_PAYS, EventWait


class Poll:
    """An epoll with a clock of its own, whose events come some time after a wait has begun."""

    def __init__(self) -> None:
        self.now = self.waits_since = 0.0
        self.after_s = 0.0
        self.slept = 0

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        came = self.waits_since + self.after_s
        if timeout_s:
            self.slept += 1
            self.now = min(max(came, self.now), self.now + timeout_s)
        else:
            self.now += 1e-6
        return [(3, select.EPOLLIN)] if self.now >= came else []

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def poll(monkeypatch: pytest.MonkeyPatch) -> Poll:
    poll = Poll()
    monkeypatch.setattr("kvstore.shard.waiting.time", poll)
    return poll


def wait(waiting: EventWait, poll: Poll, after_s: float, patience_s: float = 0.1) -> int:
    """Wait once, and return how often the shard slept."""
    poll.waits_since, poll.after_s, poll.slept = poll.now, after_s, 0
    waiting.events(patience_s)
    return poll.slept


def test_it_polls_while_requests_are_frequent_and_sleeps_otherwise(poll: Poll) -> None:
    waiting = EventWait(poll)  # type: ignore[arg-type]
    assert wait(waiting, poll, 50e-6) == 1, "at first it sleeps"
    assert [wait(waiting, poll, 50e-6) for _ in range(20)] == [0] * 20
    assert [wait(waiting, poll, 0.01) for _ in range(MOST_PAYS)] == [1] * MOST_PAYS, "it looked, and then slept"
    before = poll.now
    assert wait(waiting, poll, 0.01) == 1
    assert poll.now - before == pytest.approx(0.01)


def test_no_wait_exceeds_its_limit(poll: Poll) -> None:
    waiting = EventWait(poll)  # type: ignore[arg-type]
    for _ in range(5):
        wait(waiting, poll, 20e-6)
    before = poll.now
    waiting.events(0)
    assert poll.now - before < 1e-5
    poll.waits_since, poll.after_s = poll.now, 1.0
    before = poll.now
    assert waiting.events(0.1) == []
    assert poll.now - before <= 0.1 + LOOKING_S + 1e-5


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_real_socket_events_are_seen_and_rare_ones_cost_no_cpu(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    reader, writer = pair
    poll = select.epoll()
    poll.register(reader, select.EPOLLIN)
    waiting = EventWait(poll)

    def write() -> None:
        for _ in range(40):
            time.sleep(0.01)
            writer.send(b"x")

    thread = threading.Thread(target=write)
    used = time.thread_time()
    thread.start()
    seen = 0
    while seen < 40:
        for _ in waiting.events(1.0):
            seen += len(reader.recv(100))
    thread.join()
    assert time.thread_time() - used < 0.1, "of 0.4 s"
    poll.close()
