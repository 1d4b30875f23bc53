"""Saves and loads of the connector's worker half, in many steps and in random order, compared with a model of their
outcome.

Chance decides which blocks are computed, which are saved to which slots, and which are loaded, from the store or from
slots, with slots or without. It also decides which blocks the store lacks, which requests are aborted, and which steps
follow a preemption. The model knows the expected content of every cache block, slot and key, byte by byte.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.harness import StartServer, make_keys

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("torch")
    from kvstore_client.engine import transfer_in
    from kvstore_client.engine.paged.layout import BlockLayout
    from kvstore_client.engine.paged.plan import Load, Saves, StepPlan, WorkerReport
    from kvstore_client.engine.transfer_out import SendAs
    from tests.engine.late_layout import LateLayout
    from tests.gpu.paged_caches import Bytes, PagedCache, ordered, over_each_other, random_bytes
    from tests.gpu.rank import DEADLINE_S, Rank
    from tests.gpu.streams import busy, copies_by_a_thread, model_stream

BLOCKS, SLOTS, ROWS = 20, 24, 40
small = partial(ordered, num_blocks=BLOCKS, tokens=16, content=32)


@dataclass
class UnderWay:
    """A load, and its expected outcome."""

    wanted: dict[int, int]  # block -> its expected row
    missing: set[int]  # cache blocks that the load cannot fill
    reads: list[int] = field(default_factory=list)  # slots
    fills: dict[int, int] = field(default_factory=dict)  # slot -> row
    cancelled: bool = False


class Schedule:
    """The model. The model of the outcome. A number stands for a row of random bytes."""

    def __init__(self, rank: Rank, seed: int, chance: random.Random) -> None:
        self.rank = rank
        self.chance = chance
        self.rows: Bytes = random_bytes(seed, ROWS * rank.layout.block_bytes).reshape(ROWS, -1)
        self.uploaded = rank.cache.upload(self.rows)
        self.number_of = {row.tobytes(): number for number, row in enumerate(self.rows)}
        self.keys = iter(make_keys(100_000, first=seed))
        self.cache: dict[int, int | None] = dict.fromkeys(range(rank.cache.num_blocks))  # None: not known
        self.slots: dict[int, int | None] = dict.fromkeys(range(SLOTS))  # None: the slot cannot be read
        self.store: dict[bytes, int] = {}
        self.sent: dict[tuple[int, int], tuple[bytes, int]] = {}  # job and slot -> key and row being sent
        self.users: Counter[int] = Counter()  # slot -> the number of jobs and loads that use it
        self.copying: dict[int, list[tuple[int, int, int]]] = {}  # job -> its blocks, slots and rows
        self.loading: dict[str, UnderWay] = {}
        self.held: set[str] = set()  # requests whose copies are complete
        self.counts: Counter[str] = Counter()
        keys = [next(self.keys) for _ in range(12)]
        self.store.update(zip(keys, range(12), strict=True))
        rank.put_in_store(keys, self.rows[:12])

    # ---- a step --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        chance = self.chance
        reusing = chance.random() < 0.3
        kept = {block for each in self.loading.values() for block in each.wanted}
        if not reusing:
            kept |= {block for job in self.copying.values() for block, _, _ in job}
        usable = [block for block in self.cache if block not in kept]
        chance.shuffle(usable)
        loads = [load for _ in range(chance.randrange(3)) if (load := self._load(usable)) is not None]
        writes = {usable.pop(): chance.randrange(ROWS) for _ in range(min(len(usable), chance.randrange(5)))}
        self.cache.update(writes)
        saves = self._saves([*writes, *usable])
        plan = StepPlan(loads=loads, saves=saves, reusing=reusing, idle=not writes, cancelled=self._cancelled(loads))
        if saves is not None:
            plan.held = {f"held until {saves.job}": saves.job}
        self.rank.step(
            plan,
            [(block, self.uploaded[row]) for block, row in writes.items()],
            before=lambda: chance.random() < 0.3 and busy(self.rank.layout, 0.002),
        )
        self._settle()

    def _free_slots(self) -> list[int]:
        free = [slot for slot in self.slots if not self.users[slot]]
        self.chance.shuffle(free)
        return free

    def _load(self, usable: list[int]) -> Load | None:
        """Add a load of some blocks from slots and then some from the store."""
        chance = self.chance
        name = f"load {self.counts['loads']}"
        readable = [slot for slot, row in self.slots.items() if row is not None]
        reads = chance.sample(readable, min(len(readable), chance.randrange(4)))[: len(usable)]
        keys = chance.choices(list(self.store), k=chance.randrange(1, 9) if chance.random() < 0.7 else 0)
        keys = list(dict.fromkeys(keys))[: len(usable) - len(reads)]
        if not reads and not keys:
            return None
        load = Load(name, host_slots=reads, host_block_ids=[usable.pop() for _ in reads], within_s=DEADLINE_S)
        found = UnderWay(
            {block: self.slots[slot] for slot, block in zip(reads, load.host_block_ids, strict=True)},  # type: ignore[misc]
            set(),
            reads,
        )
        load.keys, load.block_ids = keys, [usable.pop() for _ in keys]
        rows = [self.store[key] for key in keys]
        found.wanted.update(zip(load.block_ids, rows, strict=True))
        if keys and chance.random() < 0.25:
            gap = chance.randrange(len(keys))
            load.keys[gap] = next(self.keys)
            found.missing = set(load.block_ids[gap:])
        free = [slot for slot in self._free_slots() if slot not in reads]
        if keys and len(free) >= len(keys) and chance.random() < 0.5:
            load.slots = free[: len(keys)]
            found.fills = dict(zip(load.slots, rows, strict=True))
        for slot in (*reads, *found.fills):
            self.users[slot] += 1
        for slot in found.fills:
            self.slots[slot] = None
        self.loading[name] = found
        self.counts["loads"] += 1
        return load

    def _saves(self, blocks: Sequence[int]) -> Saves | None:
        known = [block for block in dict.fromkeys(blocks) if self.cache[block] is not None]
        some = list(zip(known[: self.chance.randrange(5)], self._free_slots(), strict=False))
        if not some:
            return None
        job = self.rank.saves([next(self.keys) for _ in some], *zip(*some, strict=True))
        if self.chance.random() < 0.3:  # as for blocks that another engine waits for
            job.copied = [block._replace(how=SendAs(handed_over=True)) for block in job.copied]
        copied: list[tuple[int, int, int]] = []
        for (key, *_), (block, slot) in zip(job.copied, some, strict=True):
            row = self.cache[block]
            assert row is not None
            copied.append((block, slot, row))
            self.sent[job.job, slot] = key, row
            self.users[slot] += 1
            self.slots[slot] = None
        self.copying[job.job] = copied
        self.counts["saves"] += len(some)
        return job

    def _cancelled(self, just_begun: Sequence[Load]) -> list[str]:
        names = [name for name in self.loading if name not in {load.request_id for load in just_begun}]
        if not names or self.chance.random() > 0.2:
            return []
        name = self.chance.choice(names)
        self.loading[name].cancelled = True
        self.counts["cancelled"] += 1
        return [name]

    # ---- what has ended ------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        rank = self.rank
        loaded, rank.loaded = rank.loaded, set()
        failed, rank.failed = rank.failed, set()
        for name in loaded:
            load = self.loading.pop(name)
            lost = failed & set(load.wanted)
            assert lost == load.missing or (load.cancelled and load.missing <= lost), (name, lost, load)
            for block, row in load.wanted.items():
                if block not in lost:
                    self.cache[block] = row
                elif rank.cache.slices > 1:  # some of the block's parts may be stored
                    self.cache[block] = None
            for slot in (*load.reads, *load.fills):
                self.users[slot] -= 1
            if not lost:
                self.slots.update(load.fills)
            self.counts["lost"] += len(lost)
            failed -= lost
        assert not failed, f"{failed} failed, of no load that ended"
        report, rank.report = rank.report, WorkerReport()
        assert not report.broken
        for job in sorted(report.copied):
            self.slots.update({slot: row for _, slot, row in self.copying.pop(job)})
            self.held.add(f"held until {job}")
        for token in report.released:
            key, row = self.sent.pop(token)
            self.users[token[1]] -= 1
            if token in report.stored:
                self.store[key] = row
                self.counts["stored"] += 1

    def finish(self) -> None:
        """Run steps until nothing is in progress, and then check everything."""
        self.rank.until(
            lambda: self._settle() or not (self.loading or self.copying or self.sent), what="all loads and saves end"
        )
        assert not +self.users
        self.rank.step()
        assert self.rank.saved == self.held, "the engine may give their blocks away"
        self.check_cache()
        keys = list(self.store)
        found = self.rank.in_store(keys)
        wrong = [key.hex() for key, block in zip(keys, found, strict=True) if block != self._bytes(self.store[key])]
        assert not wrong, f"the store has other bytes, or none, for {len(wrong)} of {len(keys)} keys: {wrong}"
        readable = [slot for slot, row in self.slots.items() if row is not None]
        for first in range(0, len(readable), BLOCKS):
            some = readable[first : first + BLOCKS]
            blocks = list(self.cache)[: len(some)]
            self.rank.step(StepPlan(loads=[Load(f"last {first}", host_slots=some, host_block_ids=blocks)]))
            self.rank.until_loaded(f"last {first}")
            self.cache.update({block: self.slots[slot] for block, slot in zip(blocks, some, strict=True)})
            self.check_cache()

    def check_cache(self) -> None:
        found = self.rank.cache.blocks()
        for block, row in self.cache.items():
            assert row is None or np.array_equal(found[block], self.rows[row]), (
                f"block {block} has row {self.number_of.get(found[block].tobytes())} instead of {row}"
            )

    def _bytes(self, row: int) -> bytes:
        return self.rows[row].tobytes()


KINDS: dict[str, Callable[[str], PagedCache]] = {
    "whole": small,
    "in parts": partial(small, order="LBNHC", slices=4),
    "in ranges and parts": partial(small, order="BHLNC", ranges=2, slices=3),
    "of groups": partial(over_each_other, num_blocks=BLOCKS),
}


def run(
    kind: str,
    device: str,
    seed: int,
    steps: int,
    endpoint: str,
    start_rank: Callable[..., Rank],
    patch: pytest.MonkeyPatch,
    **options: Any,
) -> Schedule:
    """Run a schedule of this many steps. On the CPU, copies are made as late as a device may make them. Loads have
    chunks of two blocks."""
    copies_by_a_thread(patch)
    cache = KINDS[kind](device)
    patch.setattr(transfer_in, "LOAD_CHUNK_BYTES", 2 * cache.block_bytes)
    rank = start_rank(
        endpoint, cache, slots=SLOTS, layout_class=LateLayout if device == "cpu" else BlockLayout, **options
    )
    schedule = Schedule(rank, seed, random.Random(seed))
    with model_stream(device):
        for _ in range(steps):
            schedule.step()
        schedule.finish()
    assert not rank.counters.take().get("defects")
    return schedule


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_byte_is_right_in_any_order(
    kind: str, device: str, start_server: StartServer, start_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 250 if device == "cuda" else 120
    schedule = run(kind, device, 7, steps, start_server(memory="256MiB").endpoint, start_rank, monkeypatch)
    counts = schedule.counts
    assert min(counts[each] for each in ("loads", "stored", "lost")) > 10, f"it tried little: {counts}"


@pytest.mark.parametrize("kind", ["whole", "in parts"])
def test_every_byte_is_right_in_any_order_with_a_server_read_pool(
    kind: str,
    device: str,
    start_server: StartServer,
    start_rank: Callable[..., Rank],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = start_server("--unix-socket", str(tmp_path / "s"), memory="256MiB")
    run(kind, device, 8, 120 if device == "cuda" else 60, server.endpoint, start_rank, monkeypatch, store_on_host=True)


def test_a_few_steps_memory_checked(
    device: str, start_server: StartServer, start_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("in parts", device, 9, 30, start_server().endpoint, start_rank, monkeypatch)
