"""What all connections of one shard share: the time of this turn, counters, and the bound on buffers.

The loop makes it and sets the time; connections and answers count in it. Used by the loop's thread only.
"""

from __future__ import annotations

from typing import Final

from kvstore.wire import ErrorCode, WireError

MAX_BUFFERED_BYTES: Final = 64 << 20
SMALL_BUFFER_BYTES: Final = 8 << 10  # a frame this small is always taken, a reply this small is not counted


class ShardState:
    """Plain fields, for they are read and changed for every message."""

    def __init__(self, now: float) -> None:
        self.started = now
        self.now = now  # monotonic seconds, read once a turn of the loop
        self.draining = False  # no new SET is taken
        self.connections = self.streams = 0  # there are now
        self.bytes_in = self.bytes_out = self.errors = 0
        self.sets = self.gets = self.lookups = 0
        self.buffered_bytes = 0  # frames being collected, keys of GETs in progress, remembered keys, large replies

    def check_buffer_room(self, size: int, request_id: int = 0) -> None:
        """Raise `WireError` when `size` more bytes for all clients together would be more than a shard buffers."""
        if self.buffered_bytes + size > MAX_BUFFERED_BYTES:
            raise WireError(
                ErrorCode.LIMIT,
                f"the server buffers {self.buffered_bytes} bytes of requests and replies, and {size} more would exceed "
                f"its limit of {MAX_BUFFERED_BYTES}; try again later",
                request_id,
            )
