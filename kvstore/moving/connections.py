"""The connections of one mover. Stopping the mover interrupts all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from kvstore.moving.progress import MoveProgress
from kvstore.wire import ShardAddress
from kvstore.wire.queries import Dial, ShardQueries, ShardQueryError

CONNECT_S: Final = 3.0  # a shard that takes longer has failed; `interrupt` does not stop an attempt to connect


class Connections:
    """Opens connections to shards, and interrupts the open ones. Thread-safe.

    `cookies`: the cookies of the shards' nodes, by the name of the shard. `dial`: see `ShardQueries`.
    """

    def __init__(self, progress: MoveProgress, cookies: Mapping[str, str], dial: Dial) -> None:
        self._progress = progress
        self._cookies = cookies
        self._dial = dial
        self._lock = threading.Lock()
        self._open: set[ShardQueries] = set()

    def open(self, shard: ShardAddress) -> ShardQueries:
        """Return a new connection, which the caller must pass to `close`. Blocks. Raises `ShardQueryError`, also if the
        mover must end."""
        if self._progress.over:
            raise ShardQueryError("the drain or fill has ended: no new connection is made")
        asking = ShardQueries(
            (shard.host or "127.0.0.1", shard.port),
            min(CONNECT_S, self._progress.call_s),
            cookie=self._cookies.get(shard.name, ""),
            dial=self._dial,
        )
        asking.timeout_s = self._progress.call_s
        with self._lock:
            self._open.add(asking)
        if self._progress.stopped:
            asking.interrupt()
        return asking

    def close(self, asking: ShardQueries) -> None:
        """Close a connection."""
        with self._lock:
            self._open.discard(asking)
        asking.close()

    @contextmanager
    def opened(self, shard: ShardAddress) -> Iterator[ShardQueries]:
        """Provide a connection for a `with` block, and close it at the end of the block. Raises `ShardQueryError`."""
        asking = self.open(shard)
        try:
            yield asking
        finally:
            self.close(asking)

    def interrupt(self) -> None:
        """Make all calls in progress fail soon. Call `MoveProgress.stop` before this."""
        with self._lock:
            for asking in self._open:
                asking.interrupt()
