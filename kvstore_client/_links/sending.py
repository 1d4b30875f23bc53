"""Requests on their way out, to all shards at once: each shard is sent bytes as fast as it takes them.

Each shard's requests are sent in order, each piece by piece as its message makes them: a piece is handed to the kernel
before the next is made, so work done while making one (its checksums) finds its bytes in the cache when the kernel
copies them. No shard waits for another: where a socket is full, the next one has its turn.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvstore.wire import zmtp
from kvstore_client._links.call import Call
from kvstore_client._links.link import Link
from kvstore_client.errors import ConnectionLost, KVStoreError, Timeout

_IOV: Final = 512
_LOCK_WAIT_S: Final = 0.001
_LOOK_AFTER_S: Final = 0.1


class Sending:
    """The calls of one exchange to one shard, on their way out."""

    def __init__(self, link: Link, calls: Sequence[Call]) -> None:
        self.link = link
        self.done = False
        self._calls = iter(calls)
        self._current: Call | None = None
        self._connection = 0  # which of the link's connections the current message was begun on
        self._pieces: Iterator[list[memoryview | bytes]] = iter(())
        self._views: list[memoryview | bytes] = []
        self._blocked = False  # the socket was full at the last try

    @property
    def began(self) -> bool:
        """Whether part of a message was sent and part was not."""
        return self._current is not None

    def advance(self, lock_wait_s: float) -> bool:
        """Send what the socket takes. False: it is full, or another thread is in the middle of a message on it."""
        while not self.done:
            if self._current is None and not self._next_call(lock_wait_s):
                return self.done
            try:
                if not self._send_message():
                    return False
            except OSError as error:
                self._lose(ConnectionLost(f"{self.link}: {error.strerror or error}"))
            except BaseException as error:
                self.abandon(ConnectionLost(f"{self.link}: a message was not sent whole: {error}"))
                raise
        return True

    def _next_call(self, lock_wait_s: float) -> bool:
        """Begin the next message; False when there is none or it is not its turn."""
        link = self.link
        if not link.send_lock.acquire(timeout=lock_wait_s):
            return False
        call = next(self._calls, None)
        if call is None:
            link.send_lock.release()
            self.done = True
            return False
        connection = link.owe(call.answer)
        if not connection:
            call.answer.fail(ConnectionLost(f"{link}: not connected"))
            link.send_lock.release()
            return self._next_call(lock_wait_s)
        self._connection = connection
        self._current = call
        self._pieces = iter(call.message())
        self._views = []
        return True

    def _send_message(self) -> bool:
        """Send pieces until the message is whole (True) or the socket is full (False). Raises `OSError`."""
        while True:
            if not self._views:
                piece = next(self._pieces, None)
                if piece is None:
                    assert self._current is not None
                    self._current.answer.sent_at = time.monotonic()
                    self._current = None
                    self.link.send_lock.release()
                    return True
                self._views = piece
            sock = self.link.sock
            if sock is None or self.link.connections != self._connection:  # the rest would mean something else there
                raise OSError("the connection was lost")
            try:
                sent = sock.sendmsg(self._views[:_IOV])
            except BlockingIOError:
                self._blocked = True
                return False
            if self._blocked:  # it took what was in its way: a shard that lives
                self._blocked = False
                self.link.last_moved = time.monotonic()
            self._views = zmtp.advance(self._views, sent)

    def abandon(self, error: KVStoreError) -> None:
        """No more is sent; a message that was begun takes the connection with it."""
        if self._current is not None:
            self._lose(error)
        for call in self._calls:
            call.answer.fail(error)
        self.done = True

    def _lose(self, error: KVStoreError) -> None:
        call, self._current = self._current, None
        if self._connection == self.link.connections:
            self.link.drop(error)
        if call is not None:
            call.answer.fail(error)
            self.link.send_lock.release()


def send_all(sendings: Sequence[Sending], deadline: float, look_after: Callable[[], None]) -> list[Sending]:
    """Send everything; what is not sent by the deadline is abandoned with `Timeout`. -> those that were broken off in
    the middle of a message. Who only waited for his turn learned nothing about the shard. `look_after()`, called now
    and then while nothing can be sent, drops the links of shards that are silent for too long."""
    active = list(sendings)
    try:
        while True:
            wait_s = max(0.0, min(deadline - time.monotonic(), _LOOK_AFTER_S)) if len(active) == 1 else _LOCK_WAIT_S
            blocked = [sending for sending in active if not sending.advance(wait_s)]
            active = [sending for sending in active if not sending.done]
            if not active:
                return []
            left = deadline - time.monotonic()
            if left <= 0:
                stuck = [sending for sending in active if sending.began]
                for sending in active:
                    sending.abandon(Timeout(f"{sending.link}: it did not take the request by its deadline"))
                return stuck
            if len(blocked) == len(active):
                _await_room(blocked, min(left, _LOOK_AFTER_S))
                look_after()
    except BaseException:
        for sending in active:
            sending.abandon(ConnectionLost(f"{sending.link}: the call was broken off"))
        raise


def _await_room(blocked: Sequence[Sending], left: float) -> None:
    poll = select.poll()
    for sending in blocked:
        sock = sending.link.sock
        if sock is not None:
            try:
                poll.register(sock, select.POLLOUT)
            except ValueError:  # closed this instant: the next `advance` finds out
                return
    poll.poll(left * 1000)
