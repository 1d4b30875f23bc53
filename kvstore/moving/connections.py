"""The connections of one mover: all of them end when it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.moving.progress import Progress
from kvstore.wire import ShardAddress
from kvstore.wire.asking import AskError, Asking

CONNECT_S: Final = 3.0  # a shard that takes longer is left out; `interrupt` does not end it earlier


class Connections:
    """Opens connections to shards, and interrupts those that are open. Any thread."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._open: set[Asking] = set()

    def open(self, shard: ShardAddress) -> Asking:
        """A connection; to be given to `close`. Raises `AskError`, also when the mover is over."""
        if self._progress.over:
            raise AskError("the moving has ended: no new connection is made")
        asking = Asking((shard.host or "127.0.0.1", shard.port), min(CONNECT_S, self._progress.call_s))
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
        """A connection for the length of a `with`. Raises `AskError`."""
        asking = self.open(shard)
        try:
            yield asking
        finally:
            self.close(asking)

    def interrupt(self) -> None:
        """Calls under way end soon, with an error; `Progress.stop` is called before."""
        with self._lock:
            for asking in self._open:
                asking.interrupt()
