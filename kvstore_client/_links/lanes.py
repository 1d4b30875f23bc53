"""Lanes: the connections of one client to one shard, when it has more than one.

The first lane is the shard's `Link` itself, read by the caller that leads (see `leading`). Every other lane is another
`Link` to the same shard, read by a thread: `LaneReader` k reads lane k of every shard. A large read is cut into as many
pieces as there are lanes, so that several cores receive it, or several flows share a network. Every other request is
sent whole, on the lane that waits for the fewest answers. So if one call sets blocks of a chain, they arrive in order.

A lane that is not connected is not used, so it delays no call. It is connected in the background, like a broken link.
If shared memory is used with a shard on this host, the shard has only one lane.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvstore_client._links.leading import CLIENT_READ_BYTES, READ_WAIT_S
from kvstore_client._links.link import Link
from kvstore_client._links.polling import LOOK_ANYWAY_S, Poller
from kvstore_client._links.view import Numbers

MAX_LANES: Final = 16
MIN_LANE_BYTES: Final = 4 << 20  # a read is cut into pieces of at least this size

log = logging.getLogger("kvstore_client")


def usable(link: Link) -> list[Link]:
    """Return the lanes of a shard that can take a request: all that are connected, or the first if none is."""
    return [lane for lane in link.lanes if lane.sock is not None] or [link]


def least_busy(link: Link) -> Link:
    """Return the lane of the shard that is likely to answer a request soonest."""
    if len(link.lanes) == 1:
        return link
    return min(usable(link), key=_owed)


def _owed(lane: Link) -> int:
    return len(lane.pending)


def spread(groups: Sequence[tuple[Link, Numbers]], block_bytes: int) -> list[tuple[Link, Numbers]]:
    """Cut the request to each shard into pieces, one for each lane of the shard."""
    pieces: list[tuple[Link, Numbers]] = []
    for link, positions in groups:
        lanes = usable(link) if len(link.lanes) > 1 else [link]
        count = min(len(lanes), len(positions) * block_bytes // MIN_LANE_BYTES)
        if count < 2:
            pieces.append((least_busy(link), positions))
        else:
            lanes.sort(key=_owed)
            pieces += zip(lanes[:count], np.array_split(positions, count), strict=True)
    return pieces


def without(lane: Link) -> int:
    """Remove a lane from its shard. Return how many lanes are left."""
    others = [other for other in lane.first.lanes if other is not lane]
    for other in others:
        other.lanes = others
    return len(others)


class LaneReaders:
    """The lane readers of one client. Thread-safe. Valid in one process only."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._lock = threading.Lock()
        self._closed = False
        self._readers: dict[int, LaneReader] = {}  # by the number of the lane

    def watch(self, link: Link) -> None:
        """Read a lane's new connection."""
        number = link.lanes.index(link)
        with self._lock:
            if self._closed:
                return
            if number not in self._readers:
                self._readers[number] = LaneReader(number, self._arrived)
            self._readers[number].watch(link)

    def close(self) -> None:
        """End all threads."""
        with self._lock:
            self._closed = True
        for reader in self._readers.values():
            reader.close()

    def forget(self) -> None:
        """Close the descriptors. This is for a child process, where the threads do not exist."""
        for reader in self._readers.values():
            reader.forget()


class LaneReader:
    """Reads the links that it is given, on a thread that lives until `close`. Thread-safe. Valid in one process only.

    `arrived()` is called when bytes have been read.
    """

    def __init__(self, number: int, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._closed = False
        self._poller = Poller()
        self._thread = threading.Thread(target=self._run, name=f"kvstore-lane-{number}", daemon=True)
        self._thread.start()

    def watch(self, link: Link) -> None:
        """Read the link's new connection."""
        self._poller.watch(link)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._read()
        except Exception:  # after a defect, calls on these lanes end at their deadline
            log.exception("the thread that reads connections ended")

    def _read(self) -> None:
        links = self._poller.links
        busy = any(link.pending for link in links)
        readable = self._poller.poll(LOOK_ANYWAY_S if busy else None)
        if readable is None:
            readable = links
        if len(readable) == 1:
            readable[0].receive(CLIENT_READ_BYTES, self._poller.wake_fd, READ_WAIT_S)
        else:
            for link in readable:
                link.receive(CLIENT_READ_BYTES)
        self._arrived()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._poller.wake()
        self._thread.join()
        self._poller.close()

    def forget(self) -> None:
        """Close the descriptors. This is for a child process, where the thread does not exist."""
        self._poller.close()
