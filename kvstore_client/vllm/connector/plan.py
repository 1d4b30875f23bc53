"""The messages between the connector's halves: a plan for every step, and the workers' reports.

Both travel pickled through the engine. A *slot* is a row of every worker's host pool. The scheduler's half alone
assigns slots, so that slot 7 holds the parts of one and the same block on all ranks. Ranks with the same part may have
one pool in common.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvstore_client import Namespace
from kvstore_client.engine.parts import HeadParts
from kvstore_client.engine.transfer_out import SendAs


@dataclass(frozen=True)
class RankStore:
    """What the scheduler's half must know of a worker: the namespace of its part of every block, how many blocks its
    host pool has room for, which ranges of heads it has, if blocks are kept as such, in how many parts of layers the
    store has each block, and whether other ranks have the same host pool."""

    namespace: Namespace
    slots: int
    head_parts: HeadParts | None = None
    layer_parts: int = 1
    shares_rows: bool = False

    @property
    def part(self) -> tuple[str, HeadParts | None]:
        """Equal for ranks that have the same part of every block."""
        return self.namespace.id, self.head_parts


@dataclass
class Load:
    """Blocks that must be in the cache before ``request_id`` may run.

    The worker copies ``host_slots[i]`` to cache block ``host_block_ids[i]``. It fetches block ``keys[i]`` from the
    store into ``slots[i]``, where the block stays for later, and copies it to cache block ``block_ids[i]``. With
    ``slots`` None it fetches into staging rows of its own instead, or, if ranks have a pool in common, through the
    rows of ``passage`` there. What has not come ``within_s``, from when its turn begins, or ``latest_s`` from now, is
    missing; with ``waits``, blocks that are promised are waited for ``within_s``, from now on. ``number``: of this
    load, the same for all ranks; each load has a higher one.
    """

    request_id: str
    host_slots: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    slots: list[int] | None = None
    within_s: float = 0.0
    latest_s: float = math.inf
    waits: bool = False
    passage: int | None = None
    number: int = 0


@dataclass
class Saves:
    """Blocks to save that are complete at the end of a step. The worker copies cache block ``block_ids[i]`` to
    ``slots[i]`` and then sends that slot to the store as ``keys[i]``, which follows ``parents[i]`` in its chain. Blocks
    ``send_keys[i]``, which follow ``send_parents[i]``, are in their slots ``send_slots[i]`` already and are only sent.
    ``how[i]``, ``send_how[i]``: how they are sent.
    ``job``: the number of these saves in the workers' reports."""

    job: int
    keys: list[bytes] = field(default_factory=list)
    parents: list[bytes | None] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    how: list[SendAs] = field(default_factory=list)
    send_keys: list[bytes] = field(default_factory=list)
    send_parents: list[bytes | None] = field(default_factory=list)
    send_slots: list[int] = field(default_factory=list)
    send_how: list[SendAs] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.keys or self.send_keys)


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """The workers' tasks in one step.

    cancelled: requests that have ended while their load is under way; it may end at once, and is reported as ever.
    held: finished request -> a job; the engine keeps the request's blocks until all copies up to that job are made.
    reusing: blocks of preempted requests, or blocks behind a window, may be given to others in this step, so copies out
        of them must end first.
    idle: no token is computed in this step; the engine comes back at once.
    """

    loads: list[Load] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    saves: Saves | None = None
    held: dict[str, int] = field(default_factory=dict)
    reusing: bool = False
    idle: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the workers have finished since their last report, counted in ranks.

    stores: of the workers whose first report this is.
    copied: job -> ranks that have made its copies out of the cache, or given them up.
    broken: jobs whose copies some rank has given up.
    released: (job, slot) -> ranks that will not read the slot for this job any more.
    stored: (job, slot) -> ranks that know the store to have their parts, of those that are released.
    arrived_blocks, arriving_seconds: what came from the store, and for how long blocks were on their way.
    """

    stores: list[RankStore] = field(default_factory=list)
    copied: Counter[int] = field(default_factory=Counter)
    broken: set[int] = field(default_factory=set)
    released: Counter[tuple[int, int]] = field(default_factory=Counter)
    stored: Counter[tuple[int, int]] = field(default_factory=Counter)
    arrived_blocks: float = 0.0
    arriving_seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.stores or self.copied or self.released or self.arriving_seconds)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The sum of two ranks' reports."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.stores + other.stores,
            self.copied + other.copied,
            self.broken | other.broken,
            self.released + other.released,
            self.stored + other.stored,
            self.arrived_blocks + other.arrived_blocks,
            self.arriving_seconds + other.arriving_seconds,
        )
