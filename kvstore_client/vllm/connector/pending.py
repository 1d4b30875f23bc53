"""The records of the scheduler's half: one for each request, load and job of copies, kept until that is over.

`LoadPlanner` owns the records of waiting requests and of loads, `SavePlanner` the others. Only its owner changes a
record."""

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
    """A request that asked how much it may load and has no blocks of the engine's cache yet."""

    options: RequestOptions
    since: float = field(default_factory=time.monotonic)
    lookup: PrefixLookup | None = None  # None: the store is not asked for this request
    next_lookup: PrefixLookup | None = None  # asked because the answer of `lookup` is old
    declined: int = 0  # blocks that the store has, and that are computed because that is sooner
    unheard: bool = False  # what the store has was not waited for, because computing it is sooner
    waits: bool = False  # its load is to wait for blocks that others compute
    local: int = 0  # leading blocks in the engine's own cache
    awaited: str | None = None  # the other request whose load it waited for, to share that load's blocks
    hoped_tokens: int = 0  # of its first tokens, those that this load was to bring


@dataclass
class TrackedRequest:
    """A request that has blocks of the engine's cache."""

    request: Request
    options: RequestOptions
    lookup: PrefixLookup | None  # None: there is none, or its result was used
    next_save: int  # blocks before this one are in the store, or were handed to the workers to save
    stored: int | None = None  # leading blocks the store has, once known
    computes_from: int | None = None  # from this block on it computes whatever the store has; None: what that lacks
    last_job: int = -1  # the last job that copies out of this request's blocks
    loading: bool = False  # its load is under way
    outdated: bool = False  # its blocks may have been computed with older weights


@dataclass
class UnplacedBlocks:
    """Blocks of a finished request that are handed over, and for which no slot is free yet. The engine keeps them."""

    tracked: TrackedRequest
    computed_tokens: int
    block_ids: Sequence[Sequence[int]]
    until: float  # when they are given up


@dataclass
class PendingLoad:
    """A load of blocks for a request, until every rank is done with it."""

    request: Request
    plan: Load  # as the workers have it
    keys: Sequence[bytes]  # of all its blocks, whether in the host tier or to be fetched
    parents: Sequence[bytes | None]
    block_ids: list[int]
    from_store: int  # blocks that come from the store
    began: float = 0.0
    cancelled: bool = False  # its request has ended
    void: bool = False  # what it brings must not be used any more
    failed: set[int] = field(default_factory=set)  # cache blocks that some rank could not load


@dataclass
class PendingCopies:
    """A job's copies out of the cache, until every rank has made them."""

    blocks: Sequence[SavedBlock]
    ranks_left: int
    broken: bool = False  # some rank could not make its copies
