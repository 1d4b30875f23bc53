"""The operator's settings of a shard's disk tier."""

from __future__ import annotations

from typing import Final

import msgspec

DISK_WRITES: Final = ("all", "reused", "evicted")
MAX_SCRUB_MBPS: Final = 100_000


def scrub_bytes_per_s(mbps: int, shards: int) -> int:
    """Return one shard's part of the speed of the scrubber, which is given in MB/s for the whole server."""
    return mbps * 1_000_000 // shards


class DiskConfig(msgspec.Struct, frozen=True):
    """The settings of one shard's disk tier. The supervisor passes them to the shard as a part of `ShardConfig`."""

    directory: str
    limit_bytes: int
    segment_bytes: int
    write: str
    scrub_bytes_per_s: int
    warm_start: bool
    key: bytes = b""  # the key of this shard's blocks; empty if they are not encrypted
