"""What the scheduling half remembers: of each request, load and copy, until it is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore_client.engine.lookup import PrefixLookup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request


@dataclass
class WaitingRequest:
    """A request that asked what it may load and has no blocks yet."""

    lookup: PrefixLookup | None = None  # None: the store is not asked for it
    local: int = 0  # leading blocks in the engine's own cache
    awaited: str | None = None  # the request whose load it waited for, to share it


@dataclass
class TrackedRequest:
    """A request that has blocks."""

    request: Request
    lookup: PrefixLookup | None
    next_save: int  # blocks before this one are in the store, or were handed to the workers to save
    stored: int | None = None  # leading blocks the store has, once that is known
    last_job: int = -1  # the last one that copies out of this request's blocks
    outdated: bool = False  # its blocks were computed with other weights


@dataclass
class PendingLoad:
    """Blocks on their way to a request, until every rank is done."""

    keys: Sequence[bytes]
    block_ids: list[int]
    held: list[int]  # slots of the host tier that are read
    fetched: list[int] = field(default_factory=list)  # slots of the host tier that are written …
    fetched_block_ids: list[int] = field(default_factory=list)  # … and the cache blocks filled from them
    failed: set[int] = field(default_factory=set)


@dataclass
class PendingCopies:
    """A job's copies out of the cache, until every rank has made them."""

    slots: list[int]
    ranks_left: int
    broken: bool = False  # on some rank they could not be made
