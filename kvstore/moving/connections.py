"""The connections of one mover. Stopping the mover interrupts all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from kvstore.moving.progress import Progress
from kvstore.wire import ShardAddress
from kvstore.wire.asking import AskError, Asking, Dial

CONNECT_S: Final = 3.0  # a shard that takes longer fails; `interrupt` does not end connecting earlier


class Connections:
    """Opens connections to shards, and interrupts the open ones. Any thread.

    cookies: of the shards' nodes, by the name of the shard. dial: of `Asking`.
    """

    def __init__(self, progress: Progress, cookies: Mapping[str, str], dial: Dial) -> None:
        self._progress = progress
        self._cookies = cookies
        self._dial = dial
        self._lock = threading.Lock()
        self._open: set[Asking] = set()

    def open(self, shard: ShardAddress) -> Asking:
        """-> a new connection, to be passed to `close`. Blocks. Raises `AskError`, also when the mover is over."""
        if self._progress.over:
            raise AskError("the moving has ended: no new connection is made")
        asking = Asking(
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

    def close(self, asking: Asking) -> None:
        """Close a connection."""
        with self._lock:
            self._open.discard(asking)
        asking.close()

    @contextmanager
    def opened(self, shard: ShardAddress) -> Iterator[Asking]:
        """A connection for a `with` block, closed at its end. Raises `AskError`."""
        asking = self.open(shard)
        try:
            yield asking
        finally:
            self.close(asking)

    def interrupt(self) -> None:
        """Make all calls in progress fail soon. Call `Progress.stop` before this."""
        with self._lock:
            for asking in self._open:
                asking.interrupt()
