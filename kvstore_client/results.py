"""The results of the client's calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.wire import ShardInfo


class SetResult(NamedTuple):
    """How many blocks of a `set` had which outcome.

    `created`: new. `existed`: there already (or being written by another client) and left alone. `forced`: replaced.
    `duplicated`: repeated in the batch. `error`: not stored, because there was no room or the server was out of reach;
    or, if the set is not deferred, not stored on all replicas; or with fewer copies than the client's `min_copies`.
    `copies`: the least number of copies that any block of the call is known to have, 0 if one was not stored.
    `evicted`: how many blocks made room for these, as far as the shards have answered. `refused`: how many of the
    blocks in `error` a shard refused because there was no room, or room only at the cost of the blocks before them in
    their chain.
    """

    total: int
    created: int
    existed: int
    forced: int
    duplicated: int
    error: int
    copies: int = 0
    evicted: int = 0
    refused: int = 0


class Lookup(NamedTuple):
    """How much of a chain there is: `present` leading keys without a gap, and `promised` leading keys of which each is
    present or was promised by some client; `promised` is at least `present`."""

    present: int
    promised: int


@dataclass(frozen=True)
class GetResult:
    """`blocks[i]` is the block of key i as a read-only memoryview of `block_bytes` bytes, or None on a miss.

    ``np.frombuffer(block, dtype=np.float16)`` makes an array of it without a copy; ``bytes(block)`` copies it.
    `duplicate`: how many keys repeat an earlier key of the batch; they share its block, and `hit` and `miss` count them
    like any other key.
    """

    total: int
    hit: int
    miss: int
    duplicate: int
    blocks: Sequence[memoryview | None]


@dataclass(frozen=True)
class StoreInfo:
    """The state of all shards that answered. Block counts are of this client's namespace, in memory."""

    block_bytes: int
    total_blocks: int  # blocks that the whole memory could hold
    full_blocks: int  # blocks that are stored
    free_blocks: int  # blocks that still fit without evicting a block of this or another namespace
    shards: Sequence[ShardInfo]


@dataclass(frozen=True)
class ShardStatus:
    """One shard as this client sees it."""

    name: str
    node: str  # the node's id in a cluster, else HOST:PORT
    zone: str  # empty: none
    state: str  # as registered: "joining", "serving" or "draining"; "listed" without a directory
    endpoint: str
    weight: float  # bytes of block memory, in proportion to which the shard owns keys
    takes_sets: bool  # whether blocks are set on it: not while it drains
    info: ShardInfo | None  # None: the shard does not answer
    error: str  # why it does not answer; empty if it does
    path: str = "tcp"  # how blocks come from it: "shared memory" or "tcp"


@dataclass(frozen=True)
class Location:
    """A shard that may have a block."""

    role: str  # "owner", "replica", or "old owner": it owned the block before a node joined or began to drain
    node: str
    zone: str  # empty: none
    state: str
    shard: str
    endpoint: str
    present: bool | None  # None: the shard was not asked, or did not answer


@dataclass
class ClientStats:
    """Counters of one client since it was made. Updated without a lock: exact enough to monitor, not to bill."""

    hits: int = 0
    misses: int = 0
    blocks_set: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    checksum_errors: int = 0  # blocks that did not match their checksum, or their MAC
    failures: int = 0  # connections that broke or could not be made
    reconnects: int = 0
    unanswered: int = 0  # blocks asked for or set about which no shard answered in time
    found_elsewhere: int = 0  # blocks found at another shard than the one asked first
    failovers: int = 0  # blocks looked for elsewhere because a shard failed
    repaired: int = 0  # blocks set on owners that lacked them
    repairs_dropped: int = 0  # blocks not repaired because too many were waiting
    path: str = "tcp"  # how blocks come: "shared memory" of a shard on this host, a transport's name, "tls" or "tcp"
