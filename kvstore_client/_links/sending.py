"""Sends requests to all shards at once, to each shard as fast as it takes them.

The requests to one shard are sent in order, piece by piece. A piece of a message is handed to the kernel before the
next piece is made. So the bytes that were read to make a piece (for its checksums) are still in the CPU's cache when
the kernel copies them. No shard waits for another, because the next socket is tried whenever one is full.
"""

from __future__ import annotations

import functools
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvstore._cext import BlockFrames, send_views
from kvstore.wire import zmtp
from kvstore_client._links.call import Call, Piece
from kvstore_client._links.leading import READ_WAIT_S
from kvstore_client._links.link import Link
from kvstore_client.errors import ConnectionLost, KVStoreError, Timeout

_LOCK_WAIT_S: Final = 0.001
_LOOK_AFTER_S: Final = 0.1


class Sending:
    """The calls of one exchange to one shard while they are being sent. For use by the calling thread only. This object
    owns the link's `sending` from the first to the last byte of a message."""

    def __init__(self, link: Link, calls: Sequence[Call]) -> None:
        self.link = link
        self._left = deque(calls)  # calls that have not begun to be sent
        self.done = not calls
        self._current: Call | None = None
        self._connection = 0  # the number of the connection that carries the current message
        self._pieces: Iterator[Piece] = iter(())
        self._views: list[memoryview | bytes] = []
        self._frames: BlockFrames | None = None
        self.wait_s = 0.0  # how long to wait for room in the socket before trying others
        self._blocked = False  # whether the socket was full at the last attempt
        self.waits_for: Callable[[], bool] | None = None  # the condition for making the next piece

    @property
    def began(self) -> bool:
        """Whether only a part of a message has been sent."""
        return self._current is not None

    def advance(self, lock_wait_s: float) -> bool:
        """Send as much as the socket takes. Return False if the socket is full or another thread is sending on it."""
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
        """Begin the next message. Return False if no message is left or another thread is sending."""
        link = self.link
        if not link.sending.take(self, lock_wait_s):
            return False
        link.notices.flush()
        call = self._left.popleft()
        connection = link.owe(call.answer)
        if not connection:
            call.answer.fail(ConnectionLost(f"{link}: not connected"))
            self._end_call()
            return not self.done and self._next_call(lock_wait_s)
        self._connection = connection
        self._current = call
        self._pieces = iter(call.message())
        self._views, self._frames = [], None
        return True

    def _send_message(self) -> bool:
        """Send pieces of the message. Return True when it is complete, or False when the socket is full. Raises
        `OSError`."""
        while True:
            if not self._views and self._frames is None:
                if self.waits_for is not None and not self.waits_for():
                    return False
                self.waits_for = None
                piece = next(self._pieces, None)
                if callable(piece):
                    self.waits_for = piece
                    continue
                if piece is None:
                    assert self._current is not None
                    self._current.answer.sent_at = time.monotonic()
                    self._current = None
                    self._end_call()
                    return True
                if isinstance(piece, BlockFrames):
                    self._frames = piece
                else:
                    self._views = piece
            sock = self.link.sock
            if sock is None or self.link.connections != self._connection:  # a new connection must not get the rest
                raise OSError("the connection was lost")
            if not self._send_some(sock):
                self._blocked = True
                return False

    def _send_some(self, sock: socket.socket) -> bool:
        """Send bytes or blocks. Return False if the socket is full. Raises `OSError`."""
        frames = self._frames
        if frames is not None:
            before = frames.sent
            full = not frames.send(sock, self.wait_s)
            moved = frames.sent > before
            if not full:
                self._frames = None
        else:
            try:
                self._views = zmtp.advance(self._views, send_views(sock, self._views))
            except BlockingIOError:
                return False
            full, moved = False, True
        if self._blocked and moved:  # the full socket takes bytes again, so the shard is alive
            self._blocked = False
            self.link.liveness.last_moved = time.monotonic()
        return not full

    def abandon(self, error: KVStoreError) -> None:
        """Stop sending and fail the calls that are left. If only a part of a message was sent, drop its connection."""
        if self._current is not None:
            self._lose(error)
        self._give_up()
        while self._left:
            self._left.popleft().answer.fail(error)
        self.done = True

    def _lose(self, error: KVStoreError) -> None:
        call, self._current = self._current, None
        if self._connection == self.link.connections:
            self.link.drop(error)
        if call is not None:
            call.answer.fail(error)
        self._end_call()

    def _end_call(self) -> None:
        self.done = not self._left
        self._give_up()

    def _give_up(self) -> None:
        sending = self.link.sending
        if sending.owner is self:
            sending.owner = None
            sending.wake()
            self.link.notices.send()


def send_all(
    sendings: Sequence[Sending],
    deadline: float,
    look_after: Callable[[], None],
    read: Callable[[Callable[[], bool], float], bool],
) -> list[Sending]:
    """Send everything. Calls that are not sent by the deadline fail with `Timeout`. Return the sendings that stopped in
    the middle of a message, because their shards did not take it. The others may only have waited for another thread.

    While no socket takes bytes, `look_after()` is called from time to time. It drops the links of shards that are
    silent for too long. `read(ready, deadline)` reads replies until `ready()` is true, because a reply may show that a
    shard has read more.
    """
    active = list(sendings)
    try:
        active = [sending for sending in sendings if not sending.advance(0.0)]  # usually this sends everything
        while active:
            wait_s = max(0.0, min(deadline - time.monotonic(), _LOOK_AFTER_S)) if len(active) == 1 else _LOCK_WAIT_S
            for sending in active:
                sending.wait_s = min(wait_s, READ_WAIT_S) if len(active) == 1 else 0.0
            blocked = [sending for sending in active if not sending.advance(wait_s)]
            active = [sending for sending in active if not sending.done]
            if not active:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                stuck = [sending for sending in active if sending.began]
                for sending in active:
                    sending.abandon(Timeout(f"{sending.link}: it did not take the request by its deadline"))
                return stuck
            if len(blocked) == len(active):
                conditions = [sending.waits_for for sending in blocked if sending.waits_for is not None]
                if conditions:  # but the sockets of the others are tried again soon
                    wait_s = _LOOK_AFTER_S if len(conditions) == len(blocked) else _LOCK_WAIT_S
                    read(functools.partial(_one_holds, conditions), min(deadline, time.monotonic() + wait_s))
                else:
                    _await_room(blocked, min(left, _LOOK_AFTER_S))
                look_after()
        return []
    except BaseException:
        for sending in active:
            sending.abandon(ConnectionLost(f"{sending.link}: the call was interrupted"))
        raise


def _one_holds(conditions: Sequence[Callable[[], bool]]) -> bool:
    return any(holds() for holds in conditions)


def _await_room(blocked: Sequence[Sending], left: float) -> None:
    poll = select.poll()
    for sending in blocked:
        sock = sending.link.sock
        if sock is not None:
            try:
                poll.register(sock, select.POLLOUT)
            except ValueError:  # another thread has just closed the socket, which the next `advance` notices
                return
    poll.poll(left * 1000)
