"""The content of an INFO reply: the state of a shard, its disk tier and its namespaces. Plain data; any thread."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_SEGMENT_SLOTS: Final = 1 << 16  # in memory: blocks so small that more would fit leave a part of a segment empty


# Bounds of the histograms of `RequestTimes`, in seconds: 32 µs, 64 µs … 16.8 s.
FIRST_BOUND: Final = 5
REQUEST_BOUNDS_S: Final = tuple((1 << power) / 1e6 for power in range(FIRST_BOUND, 25))


def segment_slots(segment_bytes: int, block_bytes: int) -> int:
    """-> how many blocks a segment of memory holds."""
    return min(segment_bytes // block_bytes, MAX_SEGMENT_SLOTS)


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
    replicas: int = 1  # the largest number of copies that a client keeps
    promised: int = 0  # blocks that clients are about to set
    awaited: int = 0  # blocks that clients wait for, because they are being written or read from disk, or were promised
    transient_blocks: int = 0  # `blocks` counts them, too
    transient_slots: int = 0  # of the segments that have them; `slots` counts them, too
    transient_bytes: int = 0  # these segments; `memory_bytes` counts them, too


class TenantInfo(msgspec.Struct, frozen=True):
    """What one tenant takes of a shard, and its part of the tenant's limits; -1: no limit."""

    tenant: str
    memory_bytes: int
    memory_guaranteed_bytes: int
    memory_limit_bytes: int
    disk_bytes: int
    disk_limit_bytes: int
    connections: int
    refused: dict[str, int]  # requests and connections, by the limit


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
    dirty_blocks: int  # in memory, waiting to be written
    dirty_bytes: int
    behind: bool  # nothing is read from clients that set, until the disk has caught up
    written_blocks: int
    written_bytes: int
    skipped_blocks: int  # not written: the disk had no room for them
    fetched_blocks: int  # read into memory for a client, or by the warm start
    fetched_bytes: int
    corrupt_blocks: int  # damaged on disk, and dropped
    recovered_blocks: int  # found at the start
    lost_blocks: int  # not recovered: a damaged entry, a missing or taken segment, an expired block
    recovery_s: float
    warming: bool  # the warm start is reading the hottest blocks into memory
    scrub_passes: int
    scrubbing: bool
    scrubbed_blocks: int
    scrubbed_bytes: int
    scrub_corrupt_blocks: int


class RequestTimes(msgspec.Struct, frozen=True):
    """How long the requests of one verb took in the shard, that waited for the disk or did not."""

    verb: str  # "set", "get", "contains" …
    tier: str  # "memory", or "disk" if they waited for it
    seconds: float  # of all of them
    counts: list[int]  # requests below each of `REQUEST_BOUNDS_S` and not below the one before; last those above all


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
    name: str = ""  # as in WELCOME; placement hashes it
    room_bytes: int = 0  # how much more fits in memory before a block is evicted, in whole segments
    hits: int = 0  # this and the next three count blocks of all namespaces, also of those that are gone
    misses: int = 0
    created: int = 0
    evicted: int = 0
    slow_turns: dict[str, int] = {}  # turns of the shard's loop over 50 ms, by the stage that took most of their time
    longest_turn_s: float = 0.0  # since the shard's start
    held_bytes: dict[str, int] = {}  # memory beside blocks and index that the shard holds for clients, by holder
    held_limit_bytes: int = 0  # of all holders together
    refused: dict[str, int] = {}  # requests, by the limit that was reached
    unix_socket: str = ""  # where clients on its host find it; empty: they do not
    lent_blocks: int = 0  # that clients on its host read in shared memory now
    lent_bytes: int = 0
    nixl: bool = False  # clients may read its memory with NIXL
    transient_bytes: int = 0  # segments of transient blocks, of all namespaces
    transient_limit_bytes: int = 0  # the most that these may be
    tenant: str = ""  # whose namespaces are listed; empty: all
    tenants: list[TenantInfo] = []
    unauthorized: int = 0  # requests refused, because the connection's principal may not make them
    failed_logins: int = 0
    requests: list[RequestTimes] = []


# Decoders are made when modules are imported, because msgspec crashes the process when two threads are the first to
# decode a type at the same time (seen with 0.22.0).
_shard_info_decoder = msgspec.msgpack.Decoder(ShardInfo)


def decode_shard_info(info: bytes | bytearray | memoryview) -> ShardInfo:
    """-> the state in an INFO_REPLY. Raises `msgspec.DecodeError` or `UnicodeDecodeError` when it is not one."""
    return _shard_info_decoder.decode(info)
