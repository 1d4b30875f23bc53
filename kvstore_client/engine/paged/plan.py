"""The messages between the two halves of an adapter: a plan for every step, and the workers' reports.

The engine transmits both of them pickled. A *slot* is a place for a block in every worker's host pool. Only the
scheduler's half assigns slots, so that a slot has slices of the same block on all ranks. Ranks that have the same slice
may share one pool.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore_client import Namespace
from kvstore_client.engine.slices import HeadSlices
from kvstore_client.engine.transfer_out import SendAs

# Takes the place of the number of a check if no rank will agree.
VOID: Final = -1


@dataclass(frozen=True)
class RankStore:
    """The description of a worker for the scheduler's half.

    namespace: the namespace of the worker's slice of every block.
    slots: the number of blocks for which its host pool has room.
    head_slices: the worker's ranges of heads, if blocks are kept in such ranges.
    layer_parts: the number of layer slices of each block in the store.
    shares_rows: whether other ranks use the same host pool.
    checks: whether the worker can check its weights.
    """

    namespace: Namespace
    slots: int
    head_slices: HeadSlices | None = None
    layer_parts: int = 1
    shares_rows: bool = False
    checks: bool = False

    @property
    def slice_id(self) -> tuple[str, HeadSlices | None]:
        """A value that is equal for ranks that have the same slice of every block."""
        return self.namespace.id, self.head_slices


@dataclass
class Load:
    """Blocks that must be in the cache before request `request_id` may run.

    The worker copies slot `host_slots[i]` to cache block `host_block_ids[i]`. It fetches block `keys[i]` from the store
    into slot `slots[i]`, where the block stays for later, and copies it to cache block `block_ids[i]`. If `slots` is
    None, the worker fetches into staging rows of its own. If ranks share a pool, it fetches into the rows of `passage`
    in that pool instead.

    Blocks are missing if they have not come `within_s` seconds after the transfer began, or `latest_s` seconds from
    now. With `waits`, the worker waits for promised blocks, and `within_s` counts from now. `number`: the load's
    number, which is the same on all ranks and rises from load to load. `check`: the check of the weights that must
    agree before the blocks are used, or 0 if none is needed.

    Raises ValueError if `keys` and `block_ids`, or `host_slots` and `host_block_ids`, do not have equal lengths.
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

    def __post_init__(self) -> None:
        for name, other, count, expected in (
            ("block_ids", "keys", len(self.block_ids), len(self.keys)),
            ("host_block_ids", "host_slots", len(self.host_block_ids), len(self.host_slots)),
        ):
            if count != expected:
                raise ValueError(
                    f"kvstore: the load of request {self.request_id} has {count} {name} and {expected} {other}; "
                    f"expected one of {name} for each of {other}"
                )


class SavedBlock(NamedTuple):
    """A block to save. It is sent from slot `slot` to the store under `key`, which follows `parent` in its chain.
    `block_id`: the cache block that is first copied to the slot. It is None if the slot has the block already. `how`:
    how it is sent."""

    key: bytes
    slot: int
    block_id: int | None = None
    parent: bytes | None = None
    how: SendAs = SendAs()


@dataclass
class Saves:
    """Blocks that are complete at the end of a step and are to be saved. Blocks in `copied` are copied out of the cache
    and then sent. Blocks in `sent` are in their slots already and are only sent.

    `job`: the number of these saves in the workers' reports. `check`: the check of the weights that must agree on all
    ranks before a block is sent, or 0 if none is needed. `generations`: the generations in which the blocks were
    computed, by namespace id.
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

    loads: the loads to begin.
    cancelled: requests that ended during their load. The load may end at once, and is still reported.
    saves: the blocks to save, None if there are none.
    held: for each finished request, the number of a job. The engine keeps the request's blocks until all copies of jobs
        up to that number are made.
    reusing: whether blocks of preempted requests, or blocks before a window, may be given to other requests in this
        step. If so, copies out of these blocks must end first.
    idle: whether no token is computed in this step. If so, the engine begins the next step at once.
    ending: whether the engine is shutting down and computes nothing more.
    check: the number of the check of the weights to make before the step, or 0 if none is to be made.
    covering: the check on which the use of this step's blocks depends. It may be made in a later step.
    agreed: the newest check up to which all ranks agree.
    weights: the name of the weights that the keys assume. If it is None, nothing is loaded or saved.
    void_jobs: blocks of jobs with lower numbers must not be sent any more.
    void_loads: blocks of loads up to this number must not be used any more.
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
    """The results of the workers since their last report. The counters count ranks.

    stores: a description of each worker that reports for the first time.
    copied: for each job, the number of ranks that have either made its copies out of the cache or given them up.
    broken: the jobs whose copies at least one rank has given up.
    released: for each job and slot, the number of ranks that will not read the slot for this job any more.
    stored: for each job and slot, how many of these ranks know that the store has their slices.
    arrived_blocks: the number of blocks that came from the store.
    arriving_seconds: the time during which blocks were on their way from the store.
    agreed: for each check, the number of ranks whose weights are unchanged.
    changed: the checks in which the weights of at least one rank had changed.
    check_seconds: the time that the slowest rank took for the last check.
    names: for each rank by number, the name that it was given for its weights.
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
        """Return the sum of the reports of two ranks."""
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
