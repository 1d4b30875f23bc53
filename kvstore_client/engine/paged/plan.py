"""The messages between the halves of an adapter: a plan for every step, and the workers' reports.

Both travel pickled through the engine. A *slot* is a row of every worker's host pool. The scheduler's half alone
assigns slots, so that slot 7 holds the parts of one and the same block on all ranks. Ranks with the same part may have
one pool in common.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore_client import Namespace
from kvstore_client.engine.parts import HeadParts
from kvstore_client.engine.transfer_out import SendAs

# In the place of the check of a load, or of saves: none will agree.
VOID: Final = -1


@dataclass(frozen=True)
class RankStore:
    """What the scheduler's half must know of a worker: the namespace of its part of every block, how many blocks its
    host pool has room for, which ranges of heads it has, if blocks are kept as such, in how many parts of layers the
    store has each block, whether other ranks have the same host pool, and whether it can check its weights."""

    namespace: Namespace
    slots: int
    head_parts: HeadParts | None = None
    layer_parts: int = 1
    shares_rows: bool = False
    checks: bool = False

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
    load, the same for all ranks; each load has a higher one. ``check``: the check of the weights that must agree before
    the blocks are used; 0: none.
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
    check: int = 0


class SavedBlock(NamedTuple):
    """A block to save: from ``slot`` it is sent to the store as ``key``, which follows ``parent`` in its chain.
    ``block_id``: the block of the cache that is copied to the slot before; None: the slot has it already."""

    key: bytes
    slot: int
    block_id: int | None = None
    parent: bytes | None = None
    how: SendAs = SendAs()


@dataclass
class Saves:
    """Blocks to save that are complete at the end of a step: ``copied`` out of the cache and sent, or in their slots
    already and only ``sent``.

    ``job``: the number of these saves in the workers' reports. ``check``: the check of the weights that must agree on
    all ranks before a block is sent; 0: none. ``generations``: in which the blocks were made, by the ids of the
    namespaces.
    """

    job: int
    copied: list[SavedBlock] = field(default_factory=list)
    sent: list[SavedBlock] = field(default_factory=list)
    check: int = 0
    generations: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.copied or self.sent)


@dataclass
class StepPlan:
    """The workers' tasks in one step.

    cancelled: requests that have ended while their load is under way; it may end at once, and is reported as ever.
    held: finished request -> a job; the engine keeps the request's blocks until all copies up to that job are made.
    reusing: blocks of preempted requests, or blocks behind a window, may be given to others in this step, so copies out
        of them must end first.
    idle: no token is computed in this step; the engine comes back at once.
    ending: the engine was told to end, and computes nothing any more.
    check: the number of the check of the weights to be made before the step; 0: none.
    covering: of the check that vouches for what this step computes; it may be a later step's.
    agreed: all ranks agree up to this check.
    weights: what the keys take the weights to be called; None: nothing is loaded or saved.
    void_jobs, void_loads: jobs below, and loads up to these numbers are not to be sent or used any more.
    """

    loads: list[Load] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    saves: Saves | None = None
    held: dict[str, int] = field(default_factory=dict)
    reusing: bool = False
    idle: bool = False
    ending: bool = False
    check: int = 0
    covering: int = 0
    agreed: int = 0
    weights: str | None = None
    void_jobs: int = 0
    void_loads: int = -1


@dataclass
class WorkerReport:
    """What the workers have finished since their last report, counted in ranks.

    stores: of the workers whose first report this is.
    copied: job -> ranks that have made its copies out of the cache, or given them up.
    broken: jobs whose copies some rank has given up.
    released: (job, slot) -> ranks that will not read the slot for this job any more.
    stored: (job, slot) -> ranks that know the store to have their parts, of those that are released.
    arrived_blocks, arriving_seconds: what came from the store, and for how long blocks were on their way.
    agreed: check -> ranks whose weights are what they were.
    changed: checks at which those of some rank were not.
    check_seconds: what the last check took of the slowest rank's time.
    names: rank -> what it was told that its weights are called.
    """

    stores: list[RankStore] = field(default_factory=list)
    copied: Counter[int] = field(default_factory=Counter)
    broken: set[int] = field(default_factory=set)
    released: Counter[tuple[int, int]] = field(default_factory=Counter)
    stored: Counter[tuple[int, int]] = field(default_factory=Counter)
    arrived_blocks: float = 0.0
    arriving_seconds: float = 0.0
    agreed: Counter[int] = field(default_factory=Counter)
    changed: set[int] = field(default_factory=set)
    check_seconds: float = 0.0
    names: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.stores
            or self.copied
            or self.released
            or self.arriving_seconds
            or self.agreed
            or self.changed
            or self.names
        )

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """The sum of two ranks' reports."""
        return WorkerReport(
            self.stores + other.stores,
            self.copied + other.copied,
            self.broken | other.broken,
            self.released + other.released,
            self.stored + other.stored,
            self.arrived_blocks + other.arrived_blocks,
            self.arriving_seconds + other.arriving_seconds,
            self.agreed + other.agreed,
            self.changed | other.changed,
            max(self.check_seconds, other.check_seconds),
            self.names | other.names,
        )
