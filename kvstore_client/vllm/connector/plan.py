"""What the connector's halves tell each other: a plan for every step, and the workers' report on it.

Both travel pickled through the engine. A *slot* is a row of every worker's host pool: the scheduler's half assigns
slots, the workers only do as they are told, so slot 7 holds the same block's parts on all ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class Load:
    """Blocks that must be in the cache before ``request_id`` may run.

    ``host_slots[i]`` goes to ``host_block_ids[i]``; the store's block ``keys[i]`` to ``block_ids[i]``, by way of
    ``slots[i]``, where it stays for later, or without slots by way of rows of the worker's own.
    """

    request_id: str
    host_slots: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    slots: list[int] | None = None


@dataclass
class Saves:
    """Blocks complete at the end of a step. ``copies``: first cache block ``block_ids[i]`` to ``slots[i]``, then that
    to the store as ``keys[i]``. ``sends``: in their slots already."""

    job: int
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    send_keys: list[bytes] = field(default_factory=list)
    send_slots: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.keys or self.send_keys)


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in one step.

    held: finished requests whose blocks must stay until all copies up to a job's are made.
    preempting: blocks of preempted requests are given to others in this step, so copies out of them must be over.
    idle: no token is computed in this step; the engine comes back at once.
    """

    loads: list[Load] = field(default_factory=list)
    saves: Saves | None = None
    held: dict[str, int] = field(default_factory=dict)
    preempting: bool = False
    idle: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What is over on the workers since their last report, in numbers of ranks.

    copied: job -> ranks whose copies out of the cache are made, or given up (``broken``: somewhere).
    released: (job, slot) -> ranks that will not read the slot for this job any more.
    """

    copied: Counter[int] = field(default_factory=Counter)
    broken: set[int] = field(default_factory=set)
    released: Counter[tuple[int, int]] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(self.copied or self.released)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The reports of two ranks as one."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.copied + other.copied, self.broken | other.broken, self.released + other.released)
