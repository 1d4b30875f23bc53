"""Ranks that only keep records of which block is in each cache block and in each slot of a host pool.

They move blocks when the test says so. They fail the test when a missing block is read, or when memory that is in use
is written.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstore_client.engine.paged.plan import VOID, Load, Saves, StepPlan, WorkerReport
from kvstore_client.engine.paged.weights import WeightsWatch

BLOCK_TOKENS = 32
STATE = -1  # instead of a window: the layers of the group have a state


@dataclass
class Work:
    """The tokens of a request in one step, from ``start`` to ``end``, and the cache blocks for them."""

    request: Request
    start: int
    end: int
    block_ids: Sequence[Sequence[int]]  # by group
    keys: Sequence[Sequence[bytes]] = ()  # keys of its blocks as they are computed, by group


@dataclass
class Step:
    """A scheduled step, as the workers see it."""

    output: SchedulerOutput
    plan: StepPlan
    work: list[Work]
    sampling: set[str]
    load_keys: dict[str, dict[int, bytes]] = field(default_factory=dict)


@dataclass
class LoadWork:
    """A load in progress on one rank. ``keys``: for each cache block, the key of the block that the engine expects
    there."""

    load: Load
    keys: dict[int, bytes]


@dataclass
class CopyWork:
    saves: Saves
    broken: bool


class FakeFingerprints:
    """Replaces `Fingerprints`: it reports the number of a rank's weights when the test says so (``ready``)."""

    def __init__(self) -> None:
        self.weights = 0
        self.ready = True

    def take(self) -> Any:
        return FakeTaken(self, str(self.weights).encode())


@dataclass
class FakeTaken:
    prints: FakeFingerprints
    number: bytes

    def done(self) -> bool:
        return self.prints.ready

    def value(self) -> bytes:
        return self.number


class Rank:
    """One worker's memory, and its pending work.

    A key represents the bytes of a block. In the engine's cache, keys do not contain the name of the weights.
    """

    def __init__(
        self,
        slots: int,
        held: set[bytes],
        windows: Sequence[int] = (0,),
        number: int = 0,
        watch: WeightsWatch | None = None,
        prints: FakeFingerprints | None = None,
        means: Callable[[bytes], int] = lambda _: 0,
        unnamed: Callable[[bytes], bytes] = lambda key: key,
    ) -> None:
        """windows: as in `ScheduledEngine`. watch, prints: those of the rank's weights. means: returns the number of
        the weights that computed a key's block. unnamed: returns the key without the name of the weights."""
        self.held = held
        self.number = number
        self.prints = prints or FakeFingerprints()
        self.watch = watch or WeightsWatch(None, "", alone=True)
        self._means = means
        self._unnamed = unnamed
        self.made: dict[int, int] = {}  # cache block -> the weights that computed it
        self.pool_made = [0] * slots
        self._void_jobs = 0
        self._void_loads = -1
        self._windows = windows
        self._recompute_whole = any(windows) or len(windows) > 1
        self._failed_requests: set[str] = set()
        self.cache: dict[int, bytes] = {}  # cache block -> the key of its bytes, if it has a whole block
        self.pool: list[bytes | None] = [None] * slots
        self.writing: set[int] = set()
        self.reading: Counter[int] = Counter()
        self.copies: deque[CopyWork] = deque()
        self.sends: list[tuple[int, int, bytes, int]] = []  # job, slot, key, check
        self.loads: list[LoadWork] = []
        self._last_load = 0
        self.break_next_copy = False
        self._finished_requests: dict[str, int] = {}
        self._copied_job = -1
        self._loaded: set[str] = set()
        self._failed: set[int] = set()
        self._report = WorkerReport()

    # Memory and its users.

    def begin_read(self, slot: int, key: bytes) -> None:
        assert slot not in self.writing, f"slot {slot} is read while it is written"
        assert self.pool[slot] == key, f"slot {slot} has another block than the one it is read for"
        self.reading[slot] += 1

    def end_read(self, slot: int, key: bytes) -> None:
        assert self.pool[slot] == key, f"slot {slot} changed while it was read"
        self.reading[slot] -= 1

    def begin_write(self, slot: int) -> None:
        assert slot not in self.writing, f"slot {slot} is written twice at a time"
        assert not self.reading[slot], f"slot {slot} is written while it is read"
        self.writing.add(slot)
        self.pool[slot] = None

    def end_write(self, slot: int, key: bytes | None) -> None:
        self.writing.remove(slot)
        self.pool[slot] = key

    # A step, in the order in which a worker executes it.

    def execute(self, step: Step) -> None:
        plan = step.plan
        self._void_jobs, self._void_loads = plan.void_jobs, plan.void_loads
        self.watch.begin(plan)
        self._finished_requests.update(plan.held)
        if plan.reusing:
            while self.copies:
                self.finish_copy()
        self._compute(step)
        for load in plan.loads:
            self._begin_load(load, step.load_keys[load.request_id])
        if plan.saves is not None:
            self._begin_save(plan.saves)

    def _compute(self, step: Step) -> None:
        copied_from = {block.block_id for work in self.copies for block in work.saves.copied}
        loaded_to = {block for work in self.loads for block in work.keys}
        parts = [
            (work, block_ids, keys, window)
            for work in step.work
            for block_ids, keys, window in zip(work.block_ids, work.keys, self._windows, strict=True)
            if window != STATE
        ]
        for work in step.work:
            for group, window in enumerate(self._windows):
                if window == STATE:
                    self._pass_state(work, group, copied_from, loaded_to)
        for work, block_ids, keys, _ in parts:
            for index in range(work.start // BLOCK_TOKENS, (work.end - 1) // BLOCK_TOKENS + 1):
                block = block_ids[index]
                assert block not in copied_from, f"block {block} is computed while it is copied from"
                assert block not in loaded_to, f"block {block} is computed while it is loaded"
                self.cache.pop(block, None)
                whole = (index + 1) * BLOCK_TOKENS <= work.end
                if index < len(keys) and (whole or work.end == work.request.num_prompt_tokens):
                    self.cache[block] = keys[index]  # or the tail of a prompt
                    self.made[block] = self.prints.weights
        for work, block_ids, keys, window in parts:
            first = max(0, work.start - window + 1) // BLOCK_TOKENS if window else 0
            for index in range(first, min(work.start // BLOCK_TOKENS, len(keys))):  # the other blocks are not shared
                assert self.cache.get(block_ids[index]) == keys[index], (
                    f"request {work.request.request_id} attends to the wrong bytes in its block {index}"
                )

    def _pass_state(self, work: Work, group: int, copied_from: set[int], loaded_to: set[int]) -> None:
        """Compute the state after the request's tokens, in its block, from the state before them."""
        name, block_ids = work.request.request_id, work.block_ids[group]

        def state(tokens: int) -> bytes:
            whole = not tokens % BLOCK_TOKENS and tokens // BLOCK_TOKENS <= len(work.keys[group])
            return work.keys[group][tokens // BLOCK_TOKENS - 1] if whole else f"{name} at {tokens}".encode()

        if work.start:
            before = block_ids[(work.start - 1) // BLOCK_TOKENS]
            assert self.cache.get(before) == state(work.start), f"request {name} goes on from a wrong state"
        block = block_ids[(work.end - 1) // BLOCK_TOKENS]
        assert block, "there is no room for the state"
        assert block not in copied_from, f"the state in block {block} changes while it is copied"
        assert block not in loaded_to, f"the state in block {block} changes while it is loaded"
        self.cache[block] = state(work.end)
        self.made[block] = self.prints.weights

    def _begin_load(self, load: Load, keys: dict[int, bytes]) -> None:
        if load.check == VOID:  # the load was planned when the weights had another name
            there = [self.pool[slot] or b"" for slot in load.host_slots]
            keys = dict(zip([*load.host_block_ids, *load.block_ids], [*there, *load.keys], strict=True))
        assert sorted(keys) == sorted([*load.host_block_ids, *load.block_ids])
        assert [keys[block] for block in load.block_ids] == list(load.keys)
        assert load.number > self._last_load, "two loads have one number"
        self._last_load = load.number
        if load.passage is not None:
            assert load.slots is None and load.keys
            assert load.passage not in [each.load.passage for each in self.loads], "two loads have one passage"
        for slot, block in zip(load.host_slots, load.host_block_ids, strict=True):
            self.begin_read(slot, keys[block])
        for slot in load.slots or ():
            self.begin_write(slot)
        for block in keys:
            self.cache.pop(block, None)
        self.loads.append(LoadWork(load, keys))

    def _begin_save(self, saves: Saves) -> None:
        for block in saves.copied:
            self.begin_write(block.slot)
        if saves.copied:
            self.copies.append(CopyWork(saves, self.break_next_copy))
            self.break_next_copy = False
        for block in saves.sent:
            self.begin_read(block.slot, block.key)
            self.sends.append((saves.job, block.slot, block.key, saves.check))

    # Work in the background.

    def finish_copy(self) -> None:
        """Complete the oldest job's copies out of the cache."""
        work = self.copies.popleft()
        saves = work.saves
        for key, slot, block, *_ in saves.copied:
            assert block is not None
            if work.broken:
                self.end_write(slot, None)
                self._report.released[saves.job, slot] += 1
                continue
            assert self.cache.get(block) == self._unnamed(key), f"block {block} does not have the bytes it is saved for"
            self.end_write(slot, key)
            self.pool_made[slot] = self.made[block]
            self.begin_read(slot, key)
            self.sends.append((saves.job, slot, key, saves.check))
        self._copied_job = saves.job
        self._report.copied[saves.job] += 1
        if work.broken:
            self._report.broken.add(saves.job)

    def finish_send(self, index: int = 0, *, stored: bool = True) -> bool:
        """Finish sending a block, successfully or not. Returns False while the block waits for a check of the
        weights."""
        job, slot, key, check = self.sends[index]
        agrees = self.watch.all_agree(check) if job >= self._void_jobs else False
        if agrees is None:
            return False
        del self.sends[index]
        self.end_read(slot, key)
        if stored and agrees:
            assert self.pool_made[slot] == self._means(key), (
                f"a block of weights {self.pool_made[slot]} is stored under the name of {self._means(key)}"
            )
            self.held.add(key)
            self._report.stored[job, slot] += 1
        self._report.released[job, slot] += 1
        return True

    def finish_sends(self) -> None:
        """Finish all sends that may be finished."""
        index = 0
        while index < len(self.sends):
            if not self.finish_send(index):
                index += 1

    def finish_load(self, index: int = 0, *, deliver: float = math.inf) -> bool:
        """Finish a load. Returns False while the load waits for a check of the weights. ``deliver``: the most blocks
        that come from the store, which sends only blocks that it has."""
        agrees = self.watch.mine_agree(self.loads[index].load.check)
        if agrees is None:
            return False
        work = self.loads.pop(index)
        load = work.load
        placed = set(load.host_block_ids)
        for slot, block in zip(load.host_slots, load.host_block_ids, strict=True):
            self.end_read(slot, work.keys[block])
        complete = True
        for number, (key, block) in enumerate(zip(load.keys, load.block_ids, strict=True)):
            complete = complete and number < deliver and key in self.held
            if load.slots is not None:
                self.end_write(load.slots[number], key if complete else None)
                self.pool_made[load.slots[number]] = self._means(key)
            if complete:
                placed.add(block)
        if not agrees or load.number <= self._void_loads:
            placed.clear()
        self.cache.update({block: self._unnamed(work.keys[block]) for block in placed})
        self.made.update((block, self._means(work.keys[block])) for block in placed)
        self._loaded.add(load.request_id)
        missing = work.keys.keys() - placed
        if not self._recompute_whole:
            self._failed |= missing
        elif missing:
            self._failed_requests.add(load.request_id)
        return True

    def finish_loads(self, deliver: float = math.inf) -> None:
        """Finish all loads that may end."""
        index = 0
        while index < len(self.loads):
            if not self.finish_load(index, deliver=deliver):
                index += 1

    def output(self) -> KVConnectorOutput:
        """Return the worker's report at the end of a step."""
        sent = {name for name, job in self._finished_requests.items() if job <= self._copied_job}
        for name in sent:
            del self._finished_requests[name]
        if (checks := self.watch.take_report()) is not None:
            self._report.agreed.update(checks.agreed)
            self._report.changed.update(checks.changed)
            if checks.name is not None:
                self._report.names[self.number] = checks.name
        output = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=self._loaded,
            failed_recving=self._failed_requests,
            invalid_block_ids=self._failed,
            kv_connector_worker_meta=self._report or None,
        )
        self._loaded, self._failed, self._failed_requests, self._report = set(), set(), set(), WorkerReport()
        return output
