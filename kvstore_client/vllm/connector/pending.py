"""The records of the scheduler's half. There is one record for each request, each load and each job of copies. A record
is kept until the request, load or job has ended.

`LoadPlanner` owns the records of waiting requests and of loads, and `SavePlanner` owns the others. Only the owner of a
record changes it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore_client.engine.lookup import PrefixLookup
from kvstore_client.engine.paged.plan import Load, SavedBlock
from kvstore_client.vllm.connector.request_options import RequestOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request


@dataclass
class WaitingRequest:
    """A request that has no blocks of the engine's cache yet."""

    options: RequestOptions
    since: float = field(default_factory=time.monotonic)
    lookup: PrefixLookup | None = None  # None: the store is not asked for this request
    next_lookup: PrefixLookup | None = None  # a new lookup, because the answer of `lookup` is old
    declined: int = 0  # blocks in the store that are computed because that takes less time
    unheard: bool = False  # whether computing takes less time than waiting for the store's answer
    waits: bool = False  # whether its load must wait for blocks that others compute
    local: int = 0  # leading blocks in the engine's own cache
    awaited: str | None = None  # the request for whose load it waited, to share that load's blocks
    hoped_tokens: int = 0  # how many of its first tokens that load was expected to bring


@dataclass
class TrackedRequest:
    """A request that has blocks of the engine's cache."""

    request: Request
    options: RequestOptions
    lookup: PrefixLookup | None  # None if there is none, or if its result was used
    next_save: int  # blocks before this one are stored, or passed to the workers to be saved
    stored: int | None = None  # the number of leading blocks in the store, once known
    computes_from: int | None = None  # it computes all blocks from this one on; None: only blocks that the store lacks
    last_job: int = -1  # the last job that copies blocks of this request
    loading: bool = False  # whether its load is in progress
    outdated: bool = False  # whether its blocks may have been computed with older weights


@dataclass
class UnplacedBlocks:
    """Blocks of a finished request that are to be handed over but have no slot yet. The engine keeps these blocks."""

    tracked: TrackedRequest
    computed_tokens: int
    block_ids: Sequence[Sequence[int]]
    until: float  # the time when they are dropped


@dataclass
class PendingLoad:
    """A load of blocks for a request, until every rank has ended it."""

    request: Request
    plan: Load  # the message to the workers
    keys: Sequence[bytes]  # the keys of all its blocks, whether in the host tier or to be fetched
    parents: Sequence[bytes | None]
    block_ids: list[int]
    from_store: int  # the number of blocks that come from the store
    began: float = 0.0
    cancelled: bool = False  # whether its request has ended
    void: bool = False  # whether its blocks must not be used any more
    failed: set[int] = field(default_factory=set)  # cache blocks that at least one rank could not load


@dataclass
class PendingCopies:
    """The copies out of the cache that belong to one job, until every rank has made them."""

    blocks: Sequence[SavedBlock]
    ranks_left: int
    broken: bool = False  # whether a rank could not make its copies
