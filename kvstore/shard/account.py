"""The account of a shard's memory beside blocks and their index: what its clients make it hold.

Whatever the shard keeps for a client is drawn from one limit and given back when it is let go. What does not fit waits
(a connection that has replies queued is not read while the account is full) or is refused with an error that says so.
So no number of connections and no mix of requests takes more memory than the limit.

Used by the loop's thread only.
"""

from __future__ import annotations

from typing import Final

from kvstore.wire import ErrorCode, WireError

MAX_HELD_BYTES: Final = 96 << 20
SMALL_BYTES: Final = 8 << 10  # always given: small requests, which may end the use of memory, must get through

# What holds memory, and what one of them takes beside its bytes. Measured as resident memory and rounded up: 20.6 kB a
# connection, 1.75 kB a GET that waits, 0.76 kB a SET that waits, 4.6 bytes for each of its blocks.
CONNECTIONS: Final = "connections"
FRAMES: Final = "frames"  # frames that are being collected
WRITES: Final = "writes"  # keys of SETs whose payload has not arrived yet
STREAMS: Final = "streams"  # GETs in progress
REPLIES: Final = "replies"  # replies that clients have not taken
CHAINS: Final = "chains"  # the keys that a client asked for last
LISTS: Final = "lists"  # the order of a namespace's blocks
REMOVALS: Final = "removals"  # keys that the disk tier's index has yet to forget
HOLDERS: Final = (CONNECTIONS, FRAMES, WRITES, STREAMS, REPLIES, CHAINS, LISTS, REMOVALS)

CONNECTION_BYTES: Final = 28 << 10
WRITE_BYTES: Final = 2 << 10
WRITE_BLOCK_BYTES: Final = 8  # slot and flags of a block
STREAM_BYTES: Final = 2560
REPLY_BYTES: Final = 64
REMOVAL_BYTES: Final = 128  # a key: here, in the keeper's queue and in its transaction


class Account:
    """Bytes held by holder, and all together."""

    def __init__(self, limit_bytes: int = MAX_HELD_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.held = dict.fromkeys(HOLDERS, 0)
        self.held_bytes = 0

    @property
    def full(self) -> bool:
        """Nothing more can be drawn."""
        return self.held_bytes >= self.limit_bytes

    def fits(self, size: int, limit_bytes: int | None = None) -> bool:
        """Whether `size` more bytes are within the limit, or within a lower one."""
        return self.held_bytes + size <= (self.limit_bytes if limit_bytes is None else limit_bytes)

    def check(self, size: int, request_id: int = 0) -> None:
        """Raise `WireError` when `size` more bytes do not fit."""
        if not self.fits(size):
            raise WireError(
                ErrorCode.LIMIT,
                f"the server holds {self.held_bytes} bytes for requests and replies of its clients, and {size} more "
                f"would exceed its limit of {self.limit_bytes}; try again later",
                request_id,
            )

    def draw(self, holder: str, size: int, request_id: int = 0) -> None:
        """Take `size` bytes for a holder. Raises `WireError` when they do not fit."""
        self.check(size, request_id)
        self.take(holder, size)

    def take(self, holder: str, size: int) -> None:
        """Take `size` bytes without a check: they are few, or were checked."""
        self.held[holder] += size
        self.held_bytes += size

    def give_back(self, holder: str, size: int) -> None:
        """Return bytes that were taken."""
        self.held[holder] -= size
        self.held_bytes -= size
