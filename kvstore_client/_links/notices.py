"""Messages that have no reply: CREDIT, CANCEL, RELEASE and the messages about generations.

Any thread may post them without waiting. The owner of the link's `sending` sends them, between other messages and when
it gives `sending` up.
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

GIVE_BACK_S: Final = 0.2  # the time for sending the rest of a small message if the socket is full


class NoticedLink(Protocol):
    """The part of a link that this module uses."""

    sock: socket.socket | None
    sending: Ownership

    def send(self, sock: socket.socket, data: bytes, deadline: float) -> None: ...

    def drop(self, error: KVStoreError) -> None: ...


class Notices:
    """The notices of one link. Thread-safe."""

    def __init__(self, link: NoticedLink) -> None:
        self._link = link
        self._posted: deque[bytes] = deque()  # not sent yet

    def post(self, header: bytes) -> None:
        """Send a message. Never blocks. If another thread is sending, that thread sends this message after its own. If
        the socket is full, the next thread that sends also sends this message."""
        self._posted.append(zmtp.frame(header, False))
        self.send()

    def clear(self) -> None:
        """Drop the posted messages, because the connection has ended."""
        self._posted.clear()

    def send(self) -> None:
        """Send the posted messages. If another thread is sending, that thread calls this method when it is done."""
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
        """Send the posted messages. The owner of `sending` calls this between messages. Return False if the socket is
        full or the connection is lost."""
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
        except BaseException:  # KeyboardInterrupt: a part of a message may have been sent
            link.drop(ConnectionLost(f"{link}: a call was interrupted"))
            raise
        return True
