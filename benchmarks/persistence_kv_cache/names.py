"""The names of the results of `bench_disk_tier`, and its targets."""

from __future__ import annotations

from typing import Final

SHAPES: Final = ("Qwen2.5-7B", "16 KiB")
WRITE_PART: Final = "write"
READ_PART: Final = "read"
HYBRID_PART: Final = "hybrid"
RESTART_PART: Final = "restart"
PARTS: Final = (WRITE_PART, READ_PART, HYBRID_PART, RESTART_PART)

PLAIN_WRITE_DIRECT: Final = "plain pwrite, O_DIRECT"
PLAIN_WRITE_DIRECT_4: Final = "plain pwrite, O_DIRECT, 4 threads"
PLAIN_WRITE_BUFFERED: Final = "plain pwrite, buffered, fsync"
PLAIN_WRITES: Final = (PLAIN_WRITE_DIRECT, PLAIN_WRITE_DIRECT_4, PLAIN_WRITE_BUFFERED)
SERVER_WRITE: Final = "set, until on disk"

PLAIN_READ_DIRECT: Final = "plain pread, O_DIRECT"
PLAIN_READ_DIRECT_4: Final = "plain pread, O_DIRECT, 4 threads"
PLAIN_READ_BUFFERED: Final = "plain pread, buffered"
PLAIN_READ_BUFFERED_4: Final = "plain pread, buffered, 4 threads"
PLAIN_READS: Final = (PLAIN_READ_DIRECT, PLAIN_READ_DIRECT_4, PLAIN_READ_BUFFERED, PLAIN_READ_BUFFERED_4)
SERVER_READS: Final = ("get_into, from disk", "stream_get, from disk")

MEMORY_ONLY: Final = "memory only: "
HYBRID: Final = "with a disk tier: "

NEW_START: Final = "new server, memory only, until ready"
READY: Final = "restart, until ready"
READABLE: Final = "restart, until all are readable"

WRITE_TARGET: Final = 0.8  # a share of the throughput of plain pwrite
READ_TARGET: Final = 0.85  # a share of the throughput of plain pread
HYBRID_TARGET: Final = 0.9  # a share of the throughput of a server without a disk tier
RESTART_TARGET_S: Final = 2.0  # seconds for each 100 000 blocks
INDEX_TARGET_BYTES: Final = 250  # bytes of the index for each block
