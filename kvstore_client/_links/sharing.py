"""Shares memory of this process with a shard on this host, by the message SHARE."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence

from kvstore import wire
from kvstore.wire import zmtp
from kvstore.wire.dealer import ReplyCollector
from kvstore.wire.shared import send_with_descriptors
from kvstore_client._links.link import Link
from kvstore_client.errors import ConnectionLost, Timeout
from kvstore_client.memory import SharedRegion


def share(link: Link, region: SharedRegion, request_id: int, deadline: float) -> ReplyCollector | None:
    """Share a region of this process's memory with a shard on this host. Return the answer; the caller must wait for
    it. Return None if the connection was lost or was not free by the deadline."""
    me = object()
    try:
        handle = link.connector.sharing.offer(region.memory, lambda: os.dup(region.descriptor))
    except OSError:
        return None
    try:
        if not link.sending.take(me, max(0.0, deadline - time.monotonic())):
            return None
        sock, answer = link.sock, ReplyCollector(request_id)
        if sock is None or not link.local or not link.owe(answer):
            return None
        data = zmtp.frame(wire.encode(wire.Share(request_id, region.number, region.nbytes, handle.data)), False)
        link.send(sock, data[_begin(sock, data, handle.descriptors, deadline) :], deadline)
        answer.sent_at = time.monotonic()
        return answer
    except (OSError, ValueError, Timeout) as error:
        link.drop(ConnectionLost(f"{link}: {error}"))
        return None
    except BaseException:  # KeyboardInterrupt: a part of the message may have been sent
        link.drop(ConnectionLost(f"{link}: a call was interrupted"))
        raise
    finally:
        handle.close()
        if link.sending.owner is me:
            link.sending.owner = None
            link.sending.wake()
            link.notices.send()


def _begin(sock: socket.socket, data: bytes, descriptors: Sequence[int], deadline: float) -> int:
    """Send the descriptors with the first bytes of `data`, and return the number of these bytes. Raises `Timeout`,
    `OSError` and `ValueError`."""
    while True:
        try:
            return send_with_descriptors(sock, [data], descriptors)
        except BlockingIOError:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise Timeout("the shard did not take shared memory by the deadline") from None
