"""Ranks on one host that read a load's blocks together, into one pool. The tests check which rank reads which blocks,
and how a slow, dead or late rank affects the others. Every rank is a process."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, TypeAlias

import pytest

from kvstore_client import KVStoreClient
from kvstore_client.engine.shared_rows import Offer, share_rows
from tests.engine.shared_ranks import BLOCK_BYTES, Ranks, Spec
from tests.support.harness import Server, block_of, blocks_of, make_keys, make_namespace, put_into, wait_until
from tests.support.standing_clock import StandingClock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from kvstore_client.engine.paged import shared_pool
    from kvstore_client.engine.paged.plan import Load, SavedBlock, Saves, WorkerReport
    from kvstore_client.engine.paged.shared_pool import PASSAGES, WAITING_PASSAGES, Passages

StartRanks: TypeAlias = "Callable[..., Ranks]"


@pytest.fixture
def start_ranks(server: Server) -> Iterator[StartRanks]:
    started: list[Ranks] = []

    def start(ranks: int = 2, **fields: Any) -> Ranks:
        started.append(Ranks(Spec(server.endpoint, namespace(fields.get("slices", 1)), ranks, **fields)))
        return started[-1]

    yield start
    for each in started:
        each.close()


def namespace(slices: int = 1) -> Any:
    return make_namespace(BLOCK_BYTES // slices, f"shared-rows-{slices}")


def check(ranks: Ranks, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
    """Check that each rank has these blocks in its cache."""
    for found in ranks.all("read", block_ids):
        assert found == blocks_of(keys, BLOCK_BYTES)


def load(number: int, keys: Sequence[bytes], **fields: Any) -> Load:
    fields.setdefault("block_ids", list(range(len(keys))))
    return Load(f"load {number}", keys=list(keys), **{"within_s": 300.0, "number": number, **fields})


def test_each_rank_reads_its_share_and_gets_all_blocks(server: Server, start_ranks: StartRanks) -> None:
    keys = make_keys(24)
    put_into(server, namespace(), keys)
    ranks = start_ranks(3)
    ranks.all("load", load(1, keys, slots=list(range(24))))
    assert ranks.loaded("load 1") == [set()] * 3
    check(ranks, keys, range(24))
    counted = ranks.all("take_counters")
    assert [each["transfer_in_blocks"] for each in counted] == [8] * 3
    assert [each["swap_in_blocks"] for each in counted] == [24] * 3

    # All ranks have the blocks in their slots.
    again = Load("again", host_slots=[3, 23], host_block_ids=[100, 101], number=2)
    ranks.all("load", again)
    assert ranks.loaded("again") == [set()] * 3
    check(ranks, [keys[3], keys[23]], [100, 101])


def test_layer_slices_are_read_together_too(server: Server, start_ranks: StartRanks) -> None:
    keys = make_keys(12)
    slices = [key + bytes([part]) for key in keys for part in range(2)]
    put_into(server, namespace(2), slices)
    ranks = start_ranks(2, slices=2)
    ranks.all("load", load(1, keys, slots=list(range(12))))
    assert ranks.loaded("load 1") == [set()] * 2
    assert ranks.count("transfer_in_blocks") == [6] * 2
    half = BLOCK_BYTES // 2
    for found in ranks.all("read", range(12)):
        assert b"".join(found) == b"".join(block_of(part, half) for part in slices)


def test_the_rank_that_sends_a_block_copies_it_for_all(server: Server, start_ranks: StartRanks) -> None:
    keys = make_keys(16)
    ranks = start_ranks(2, slots=128)
    ranks.all("fill", range(16), blocks_of(keys, BLOCK_BYTES))
    saves = Saves(0, list(map(SavedBlock, keys, range(16, 32), range(16), [None, *keys[:-1]])))
    ranks.all("save", saves)
    total = WorkerReport()

    def released() -> bool:
        nonlocal total
        for report in ranks.all("take_report"):
            total = total.aggregate(report or WorkerReport())
        return len(total.released) == 16 and set(total.released.values()) == {2}

    wait_until(released, what="all slots are free again")
    assert total.copied == {0: 2} and set(total.stored.values()) == {1}
    counted = ranks.all("take_counters")
    assert sum(each["swap_out_blocks"] for each in counted) == 16, "each block was copied once"
    with KVStoreClient(server.endpoint, namespace()) as client:
        wait_until(lambda: client.contains(keys).all(), what="the store has them")
        assert [bytes(block or b"") for block in client.get(keys).blocks] == blocks_of(keys, BLOCK_BYTES)
    ranks.all("load", Load("it", host_slots=list(range(16, 32)), host_block_ids=list(range(50, 66)), number=1))
    assert ranks.loaded("it") == [set()] * 2
    check(ranks, keys, range(50, 66))


def test_the_ranks_have_one_pool(start_ranks: StartRanks) -> None:
    def pools(pid: int) -> set[str]:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "memfd:kvstore-client" in line}

    ranks = start_ranks(3)
    first, *others = map(pools, ranks.pids)
    assert len(first) == 2, "the rows, and their signs"
    assert all(each == first for each in others)


def test_more_blocks_than_rows_pass_through(server: Server, start_ranks: StartRanks) -> None:
    keys = make_keys(200)
    put_into(server, namespace(), keys)
    ranks = start_ranks(3, chunk_blocks=4, late=True)
    for number, (width, blocks) in enumerate(((8, 200), (8, 200), (3, 40), (2, 40)), 1):  # width: rows
        ranks.all("load", load(number, keys[:blocks], slots=list(range(width))))
        assert ranks.loaded(f"load {number}", within_s=60) == [set()] * 3
        check(ranks, keys[:blocks], range(blocks))
        assert sum(ranks.count("transfer_in_blocks")) == blocks
        ranks.all("fill", range(200), [bytes(BLOCK_BYTES)] * 200)
    ranks.all("load", load(9, keys, passage=PASSAGES - 1))
    ranks.all("load", load(10, keys[::-1], passage=0, block_ids=list(range(200, 100, -1)) + list(range(100))))
    assert ranks.loaded("load 9", "load 10", within_s=60) == [set()] * 3
    check(ranks, keys[:100][::-1], range(100))
    assert sum(ranks.count("transfer_in_blocks")) == 400


@pytest.mark.parametrize("width", [24, 6])
def test_a_block_missing_in_the_store_is_missing_at_once_everywhere(
    server: Server, start_ranks: StartRanks, width: int
) -> None:
    keys = make_keys(24)
    put_into(server, namespace(), keys[:13] + keys[14:])
    ranks = start_ranks(3, chunk_blocks=4)
    started = time.monotonic()
    ranks.all("load", load(1, keys, slots=list(range(width))))
    assert ranks.loaded("load 1") == [set(range(13, 24))] * 3
    assert time.monotonic() - started < 20
    check(ranks, keys[:13], range(13))


@pytest.mark.parametrize("width", [16, 4])
def test_a_stopped_ranks_unread_blocks_are_missing_by_the_deadline(
    server: Server, start_ranks: StartRanks, width: int
) -> None:
    """A rank is stopped until the others have given up the load. Another load gets the slots only after the stopped
    rank has continued and ended, too."""
    keys, others = make_keys(16), make_keys(16, first=100)
    put_into(server, namespace(), [*keys, *others])
    ranks = start_ranks(2, chunk_blocks=2)
    ranks.all("load", load(1, keys, slots=list(range(width))))  # shows the ranks that the store is fast
    assert ranks.loaded("load 1") == [set()] * 2
    ranks.all("fill", range(16), [bytes(BLOCK_BYTES)] * 16)
    with ranks.stopped(1):
        ranks.order("load", load(2, keys, slots=list(range(width)), within_s=2.0))
        ranks.answers([0])
        [missing] = ranks.loaded("load 2", ranks=[0], within_s=10)
        assert missing == set(range(1, 16)), "block 0 is rank 0's own, the next one is not"
    ranks.answers([1])
    [late] = ranks.loaded("load 2", ranks=[1])
    for rank, without in ((0, missing), (1, late)):
        there = [block for block in range(16) if block not in without]
        [found] = ranks.all("read", there, ranks=[rank])
        assert found == [block_of(keys[block], BLOCK_BYTES) for block in there]
    ranks.all("load", load(3, others, slots=list(range(width))))
    assert ranks.loaded("load 3") == [set()] * 2
    check(ranks, others, range(16))


def test_a_killed_rank_leaves_nothing_and_delays_no_other(server: Server, start_ranks: StartRanks) -> None:
    keys = make_keys(16)
    put_into(server, namespace(), keys)
    ranks = start_ranks(3)
    ranks.all("load", load(1, keys, slots=list(range(16))))
    assert ranks.loaded("load 1") == [set()] * 3
    for pid in ranks.pids:  # only these processes' files count: other tests have files in /dev/shm, too
        mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
        left = [line for line in mapped if "/dev/shm/" in line and not line.endswith("(deleted)")]
        assert not left, "a file there outlives who made it"
    ranks.kill(0)  # the rank that made the memory
    ranks.all("load", load(2, keys, slots=list(range(16)), within_s=1.0, block_ids=list(range(16, 32))), ranks=[1, 2])
    for missing in ranks.loaded("load 2", ranks=[1, 2], within_s=10):
        assert missing == set(range(16, 32))


def test_no_rank_ever_uses_another_loads_bytes(server: Server, start_ranks: StartRanks) -> None:
    """Loads of all kinds use slots that other loads have just released. Some blocks are not in the store, some
    deadlines pass, and ranks are stopped in the middle. Every block that is not reported as missing must be right."""
    chooser = random.Random(7)
    count, slots = 3, 24
    known, lacking = make_keys(160), set(make_keys(160)[5::23])
    put_into(server, namespace(), [key for key in known if key not in lacking])
    ranks = start_ranks(count, slots=slots, chunk_blocks=3, late=True)
    right = wrong = 0
    for round_ in range(15):
        free = chooser.sample(range(slots), slots)
        loads = []
        cache = chooser.sample(range(256), 256)
        for at in range(2):
            keys = chooser.sample(known, chooser.randrange(2, 40))
            block_ids = [cache.pop() for _ in keys]
            within_s = chooser.choice((0.05, 0.2, 300.0))
            fields: dict[str, Any] = {"block_ids": block_ids, "within_s": within_s}
            if chooser.random() < 0.3:
                fields["passage"] = at
            else:
                fields["slots"] = [free.pop() for _ in range(min(len(keys), chooser.randrange(2, 12)))]
            loads.append(load(2 * round_ + at + 1, keys, **fields))
        victim = chooser.randrange(count) if chooser.random() < 0.5 else None
        for each in loads:
            ranks.order("load", each)
        if victim is not None:
            time.sleep(chooser.random() * 0.01)  # at a random moment
            with ranks.stopped(victim):
                time.sleep(chooser.random() * 0.1)
        for _ in loads:
            ranks.answers()
        missing = ranks.loaded(*(each.request_id for each in loads), within_s=60)
        for rank in range(count):
            for each in loads:
                both = zip(each.keys, each.block_ids, strict=True)
                there = [(key, block) for key, block in both if block not in missing[rank]]
                assert not lacking.intersection(key for key, _ in there)
                [found] = ranks.all("read", [block for _, block in there], ranks=[rank])
                assert found == [block_of(key, BLOCK_BYTES) for key, _ in there]
                right, wrong = right + len(there), wrong + len(each.keys) - len(there)
    assert right > 100 and wrong > 100, (right, wrong)


@pytest.mark.parametrize("spoil", ["token", "process", "descriptor"])
def test_if_one_rank_cannot_open_the_memory_none_uses_it(spoil: str) -> None:
    """A rank on another host cannot open the memory: there, another process has the process id."""
    barrier, given = Barrier(2), [None, None]

    def share(rank: int) -> object:
        def exchange(mine: Any) -> Sequence[object]:
            given[rank] = mine
            barrier.wait()
            found = list(given)
            barrier.wait()
            if rank and isinstance(found[0], Offer):
                wrong = {"token": bytes(16), "process": 1 << 22, "rows": found[0].signs}
                name = "rows" if spoil == "descriptor" else spoil
                found[0] = found[0]._replace(**{name: wrong[name]})
            return found

        return share_rows(4, 4096, rank, 2, exchange)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(share, range(2))) == [None, None]


def test_loads_wait_for_a_passage_while_their_time_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StandingClock(monkeypatch, shared_pool)
    passages = Passages(there=True)
    loads = [Load(f"{at}", keys=[b"k"], block_ids=[1], within_s=0.2) for at in range(PASSAGES + 2)]
    going, waiting = passages.admit(loads)
    assert [load.number for load in going] == list(range(1, PASSAGES + 1))
    assert len({load.passage for load in going}) == PASSAGES
    passages.left("1")
    clock.now += 0.1
    going, waiting = passages.admit(waiting)
    [load] = going
    assert (load.passage, load.request_id) == (loads[1].passage, str(PASSAGES)) and load.within_s < 0.2
    assert [load.request_id for load in waiting] == [str(PASSAGES + 1)]
    slotted = Load("slotted", keys=[b"k"], block_ids=[1], within_s=1.0, slots=[7])
    promised = [
        Load(f"p{at}", keys=[b"k"], block_ids=[1], within_s=9.0, waits=True) for at in range(WAITING_PASSAGES + 1)
    ]
    going, _ = passages.admit([slotted, *promised])
    assert [load.passage is None for load in going] == [True, *[False] * WAITING_PASSAGES, True], "nobody waited"
    clock.now += 0.11
    [late], waiting = passages.admit(waiting)
    assert (late.within_s, late.passage, waiting) == (0.0, None, [])
    for load in [*loads, *promised]:
        passages.left(load.request_id)
    assert passages.under_way == 0


def test_without_a_shared_pool_loads_start_at_once() -> None:
    loads = [Load(f"{at}", keys=[b"k"], block_ids=[1], within_s=1.0) for at in range(20)]
    going, waiting = Passages(there=False).admit(loads)
    assert going == loads and not waiting and all(load.passage is None for load in loads)
