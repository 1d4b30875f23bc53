"""What calls return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.wire import ShardInfo


class SetResult(NamedTuple):
    """What became of the blocks of a `set`.

    `created` are new, `existed` were there (or being written by another client) and were left alone, `forced` were
    replaced, `duplicated` came twice in the batch, `error` were not stored: no room, or the server out of reach; or, if
    the set is not deferred, not on all replicas.
    """

    total: int
    created: int
    existed: int
    forced: int
    duplicated: int
    error: int


@dataclass(frozen=True)
class GetResult:
    """`blocks[i]` is the block of key i as a read-only memoryview of `block_bytes` bytes, or None on a miss.

    ``np.frombuffer(block, dtype=np.float16)`` makes an array of it without a copy, ``bytes(block)`` a copy. `duplicate`
    keys were asked for before in the batch and share their first occurrence's block; `hit` and `miss` count them like
    any other.
    """

    total: int
    hit: int
    miss: int
    duplicate: int
    blocks: Sequence[memoryview | None]


@dataclass(frozen=True)
class StoreInfo:
    """All shards that answered. Block counts are of this client's namespace, in memory."""

    block_bytes: int
    total_blocks: int  # that the whole memory could hold
    full_blocks: int  # that are there
    free_blocks: int  # that still fit without evicting anything, of this namespace or of another
    shards: Sequence[ShardInfo]


@dataclass(frozen=True)
class ShardStatus:
    """One shard as this client sees it."""

    name: str
    node: str  # its id in a cluster, else HOST:PORT
    zone: str  # empty: none
    state: str  # as registered: "joining", "serving" or "draining"; "listed" without a directory
    endpoint: str
    weight: float  # bytes of block memory: its share of the keys
    takes_sets: bool  # whether blocks are set on it: not while it drains
    info: ShardInfo | None  # None: it does not answer
    error: str  # why it does not; empty: it does


@dataclass(frozen=True)
class Location:
    """A shard that may have a block."""

    role: str  # "owner", "replica", or "old owner": where it was before a node joined, or began to drain
    node: str
    zone: str  # empty: none
    state: str
    shard: str
    endpoint: str
    present: bool | None  # None: it was not asked, or did not answer


@dataclass
class ClientStats:
    """Counters of one client since it was made. Updated without a lock: exact enough to watch, not to bill."""

    hits: int = 0
    misses: int = 0
    blocks_set: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    checksum_errors: int = 0
    failures: int = 0  # connections that broke or could not be made
    reconnects: int = 0
    unanswered: int = 0  # blocks asked for, or set, of which no shard told in time what it has, or took
    found_elsewhere: int = 0  # blocks that another shard had than the one asked first
    failovers: int = 0  # blocks looked for elsewhere because a shard failed
    repaired: int = 0  # blocks set where they were missing
    repairs_dropped: int = 0  # too many at a time
