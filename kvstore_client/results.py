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
    """`blocks[i]` is the read-only block of key i, or None on a miss. `duplicate` keys were asked for before in the
    batch and share their first occurrence's block; `hit` and `miss` count them like any other."""

    total: int
    hit: int
    miss: int
    duplicate: int
    blocks: Sequence[memoryview | None]


@dataclass(frozen=True)
class StoreInfo:
    """All shards that answered. Block counts are this client's namespace's."""

    block_bytes: int
    total_blocks: int
    full_blocks: int
    free_blocks: int
    shards: Sequence[ShardInfo]


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
