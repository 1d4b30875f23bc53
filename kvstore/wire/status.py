"""What INFO carries: the state of a shard, its disk tier and its namespaces. Plain data; any thread."""

from __future__ import annotations

import msgspec


class NamespaceInfo(msgspec.Struct, frozen=True):
    id: str
    namespace: str
    block_bytes: int
    blocks: int
    writing: int
    segments: int
    slots: int
    memory_bytes: int
    pinned: int
    hits: int
    misses: int
    created: int
    evicted: int
    disk_blocks: int = 0
    disk_bytes: int = 0
    disk_evicted: int = 0
    replicas: int = 1  # the most copies a client said it keeps


class DiskInfo(msgspec.Struct, frozen=True):
    """One shard's disk tier. Counters count since the shard started."""

    directory: str
    state: str  # "recovering", "on" or "off"
    reason: str  # why it is off
    limit_bytes: int
    used_bytes: int
    segment_bytes: int
    segments_free: int
    blocks: int
    evicted: int
    dirty_blocks: int  # in memory, to be written
    dirty_bytes: int
    behind: bool  # clients that set are read no further until the disk has caught up
    written_blocks: int
    written_bytes: int
    skipped_blocks: int  # not written: the disk had no room for them
    fetched_blocks: int  # read into memory for a client, or after the start
    fetched_bytes: int
    corrupt_blocks: int  # damaged on disk, and dropped
    recovered_blocks: int  # found at the start
    lost_blocks: int  # not found again: the index was damaged there, or the segment is gone or another's
    recovery_s: float
    warming: bool  # the hottest blocks are on their way to memory
    scrub_passes: int
    scrubbing: bool
    scrubbed_blocks: int
    scrubbed_bytes: int
    scrub_corrupt_blocks: int


class ShardInfo(msgspec.Struct, frozen=True):
    """One shard's state. Counters count since the shard started."""

    node: str
    shard: int
    pid: int
    version: str
    uptime_s: float
    memory_limit_bytes: int
    memory_used_bytes: int
    rss_bytes: int
    segment_bytes: int
    segments_free: int
    connections: int
    streams: int
    draining: bool
    sets: int
    gets: int
    lookups: int
    bytes_in: int
    bytes_out: int
    errors: int
    namespaces: list[NamespaceInfo]
    policy: str = "lru"
    index_bytes: int = 0
    disk: DiskInfo | None = None
    name: str = ""  # as in WELCOME: what placement hashes
    room_bytes: int = 0  # what its memory takes before a block is evicted, in whole segments
    hits: int = 0  # these four: blocks of all namespaces, those that are gone as well
    misses: int = 0
    created: int = 0
    evicted: int = 0
