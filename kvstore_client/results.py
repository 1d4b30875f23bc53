"""The results of the client's calls. Those of one shard are messages of the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from kvstore.wire import (
    ConnectedClient,
    DiskInfo,
    NamespaceInfo,
    PurgeReply,
    RequestTimes,
    RunningSetting,
    ShardInfo,
    SlowlogReply,
    SlowRequest,
    TenantInfo,
)
from kvstore_client.errors import KVStoreError

__all__ = [
    "ClientStats",
    "ConnectedClient",
    "DiskInfo",
    "GetResult",
    "Location",
    "Lookup",
    "NamespaceInfo",
    "PurgeReply",
    "RequestTimes",
    "RunningSetting",
    "SetResult",
    "ShardInfo",
    "ShardSettings",
    "ShardStatus",
    "SlowRequest",
    "SlowlogReply",
    "StoreInfo",
    "TenantInfo",
]


class SetResult(NamedTuple):
    """The number of blocks of a `set` for each outcome.

    * `total`: All blocks of the call.
    * `created`: Blocks that were not in the store before.
    * `existed`: Blocks that were already in the store, or that another client is writing. They were not changed.
    * `forced`: Blocks that were replaced.
    * `duplicated`: Blocks whose key repeats an earlier key of the batch.
    * `error`: Blocks that were not stored, because a shard refused them or was out of reach. It includes blocks that a
      set with `deferred=False` did not store on all replicas, and blocks with fewer copies than the client's
      `min_copies`.
    * `copies`: The lowest number of copies that any block of the call is known to have; 0 if one was not stored.
    * `evicted`: Other blocks, of any namespace, that shards evicted from memory to make room. They may be on disk.
      If a shard evicts a block, the node's other shards may evict the blocks after it in its chain. Each of them counts
      these blocks in its next answer to a set of the namespace. Not counted are evictions by a set that failed, by
      reads from disk, and at replicas whose answer a deferred set did not wait for.
    * `refused`: The blocks in `error` that a shard refused. Except for those in `stale`, it had no room, or could have
      made room only by evicting earlier blocks of the same chain. A tenant has no room, either, when its limit is
      reached: compare `memory_bytes` and `memory_limit_bytes` of its `TenantInfo`. Transient blocks have a limit of
      their own, `transient_limit_bytes` of `ShardInfo`.
    * `stale`: The blocks in `refused` that were refused because the namespace has been purged since they were made.
      Only a set with `generation` has such blocks, unless the namespace is purged all the time. Do not set them again.
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
    stale: int = 0


class Lookup(NamedTuple):
    """How much of a chain is present or promised.

    * `present`: The number of leading keys that are present, without a gap.
    * `promised`: The number of leading keys that are either present or promised by some client, without a gap. It is
      at least `present`.
    """

    present: int
    promised: int


@dataclass(frozen=True)
class GetResult:
    """The blocks of a `get`. Iteration, `len` and an index give its `blocks`.

    ``np.frombuffer(block, dtype=np.float16)`` makes an array of a block without a copy; ``bytes(block)`` copies it.
    PyTorch warns about blocks because they are read-only: ``torch.frombuffer(bytearray(block), dtype=torch.float16)``
    copies the block first.

    * `total`: The number of keys in the call.
    * `hit`: The number of keys whose block was found.
    * `miss`: The number of keys whose block was not found.
    * `duplicate`: The number of keys that repeat an earlier key of the batch. These keys share the earlier key's block,
      and `hit` and `miss` count them like any other key.
    * `blocks`: The block of each key: a read-only memoryview of `block_bytes` bytes, or None on a miss.
    """

    total: int
    hit: int
    miss: int
    duplicate: int
    blocks: Sequence[memoryview | None]

    def __iter__(self) -> Iterator[memoryview | None]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, position: int) -> memoryview | None:
        return self.blocks[position]

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`, because views of memory cannot be pickled or copied."""
        raise TypeError(
            "a GetResult cannot be pickled or copied, because its blocks are views of this process's memory: take "
            "bytes(block) of each block that is not None"
        )


@dataclass(frozen=True)
class StoreInfo:
    """The state of all shards that answered. The block counts include only this client's namespace, and only memory.

    * `block_bytes`: The size of a block of the namespace, in bytes.
    * `total_blocks`: The number of blocks that the whole memory could hold.
    * `full_blocks`: The number of blocks that are stored.
    * `free_blocks`: The number of further blocks that fit without evicting a block of this or another namespace.
    * `shards`: The report of each shard on its memory, disk, counters and namespaces.
    """

    block_bytes: int
    total_blocks: int
    full_blocks: int
    free_blocks: int
    shards: Sequence[ShardInfo]


@dataclass(frozen=True)
class ShardStatus:
    """One shard as this client sees it.

    * `name`: The shard's name.
    * `node`: The node's id in a cluster, else HOST:PORT.
    * `zone`: The node's zone; empty if it has none.
    * `state`: The node's state in the directory, "joining", "serving" or "draining"; "listed" without a directory.
    * `endpoint`: The shard's address.
    * `weight`: The size of the shard's block memory in bytes. The shard owns keys in proportion to it.
    * `takes_sets`: Whether blocks are set on the shard; False while its node drains.
    * `info`: The shard's report; None if it does not answer, or refuses.
    * `error`: Why there is no report; empty if there is one.
    * `answered`: Whether the shard answered, be it with a refusal.
    * `path`: How blocks are received from the shard: "shared memory", a transport's name, "tls" or "tcp".
    """

    name: str
    node: str
    zone: str
    state: str
    endpoint: str
    weight: float
    takes_sets: bool
    info: ShardInfo | None
    error: str
    answered: bool
    path: str = "tcp"


@dataclass(frozen=True)
class ShardSettings:
    """The answer of one shard to `config_get` or `config_set`.

    * `name`: The shard's name.
    * `endpoint`: The shard's address.
    * `settings`: The settings, or only the one that was set; empty if there is an `error`.
    * `before`: The value that a setting had before `config_set`; else empty.
    * `error`: Why the shard did not answer, or refused the request; None if it did neither.
    """

    name: str
    endpoint: str
    settings: Sequence[RunningSetting] = ()
    before: str = ""
    error: KVStoreError | None = None


@dataclass(frozen=True)
class Location:
    """A shard that may have a block.

    * `role`: "owner", "replica" or "old owner". An old owner owned the block before a node joined or began to drain.
    * `node`: The node's id in a cluster, else HOST:PORT.
    * `zone`: The node's zone; empty if it has none.
    * `state`: As in `ShardStatus`.
    * `shard`: The shard's name.
    * `endpoint`: The shard's address.
    * `present`: Whether the shard has the block; None if it was not asked, or did not answer.
    """

    role: str
    node: str
    zone: str
    state: str
    shard: str
    endpoint: str
    present: bool | None


@dataclass
class ClientStats:
    """Counters of one client since it was made. They are updated without a lock, so they suit monitoring, not billing.

    * `hits`: Blocks that reads found.
    * `misses`: Blocks that reads did not find.
    * `blocks_set`: Blocks that sets created or replaced.
    * `bytes_in`: Bytes of blocks received.
    * `bytes_out`: Bytes of blocks given to `set`.
    * `checksum_errors`: Blocks that did not match their checksum or their MAC.
    * `failures`: Connections that broke or could not be made.
    * `reconnects`: Connections that were made again.
    * `unanswered`: Blocks of reads and sets for which no shard answered in time.
    * `found_elsewhere`: Blocks that were found at a shard other than the first one asked.
    * `failovers`: Blocks that were requested from another shard because a shard failed.
    * `repaired`: Blocks that were set again on owners that lacked them.
    * `repairs_dropped`: Blocks that were not repaired because too many others were waiting to be repaired.
    * `path`: How blocks are received: "shared memory" of a shard on this host, a transport's name, "tls" or "tcp".
    """

    hits: int = 0
    misses: int = 0
    blocks_set: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    checksum_errors: int = 0
    failures: int = 0
    reconnects: int = 0
    unanswered: int = 0
    found_elsewhere: int = 0
    failovers: int = 0
    repaired: int = 0
    repairs_dropped: int = 0
    path: str = "tcp"
