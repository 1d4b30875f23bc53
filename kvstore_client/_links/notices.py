"""Messages that have no reply: CREDIT, CANCEL, RELEASE and what is said of generations.

Any thread posts them and none waits: whoever owns the link's `sending` sends them, between messages and when it gives
it up.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import Final, Protocol

from kvstore._cext import send_views
from kvstore.wire import zmtp
from kvstore_client._links.ownership import Ownership
from kvstore_client.errors import ConnectionLost, KVStoreError, Timeout

GIVE_BACK_S: Final = 0.2  # for the rest of a small message, when the socket takes nothing more


class Link(Protocol):
    """What is used of a link here."""

    sock: socket.socket | None
    sending: Ownership

    def send(self, sock: socket.socket, data: bytes, deadline: float) -> None: ...

    def drop(self, error: KVStoreError) -> None: ...


class Notices:
    """Those of one link. Thread-safe."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._posted: deque[bytes] = deque()  # not sent yet

    def post(self, header: bytes) -> None:
        """Send a message. Never blocks: if another thread is sending, that one sends it when its own message is sent in
        whole; if the socket is full, the next one does."""
        self._posted.append(zmtp.frame(header, False))
        self.send()

    def clear(self) -> None:
        """The connection has ended."""
        self._posted.clear()

    def send(self) -> None:
        """Send what was posted, unless another thread is sending: it calls this when it is done."""
        sending = self._link.sending
        while self._posted:
            me = object()
            try:
                if not sending.take(me, 0.0) or not self.flush():
                    return
            finally:
                if sending.owner is me:
                    sending.owner = None
                    sending.wake()

    def flush(self) -> bool:
        """Send what was posted; for the owner of `sending`, between messages. -> False if the socket takes no more now,
        or the connection is lost."""
        link, posted = self._link, self._posted
        sock = link.sock
        try:
            while posted:
                if sock is None:
                    posted.clear()
                    return False
                data = posted.popleft()
                try:
                    sent = send_views(sock, [data])
                except BlockingIOError:
                    posted.appendleft(data)
                    return False
                if sent < len(data):
                    link.send(sock, data[sent:], time.monotonic() + GIVE_BACK_S)
        except (OSError, ValueError, Timeout) as error:  # ValueError: another thread has just closed the socket
            link.drop(ConnectionLost(f"{link}: {error}"))
            return False
        except BaseException:  # KeyboardInterrupt: perhaps a part of a message was sent
            link.drop(ConnectionLost(f"{link}: a call was interrupted"))
            raise
        return True
