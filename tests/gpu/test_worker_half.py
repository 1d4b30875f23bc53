"""The connector's worker half with a paged cache of tensors and a real store, step by step.

The tests check every byte that is saved or loaded, and every byte that must not change.
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.harness import Server, StartServer, environment, make_keys, wait_until
from tests.support.slow_link import SlowLink

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("torch")
    from kvstore_client.engine import transfer_in
    from kvstore_client.engine.paged.plan import Load, StepPlan
    from tests.gpu.paged_caches import Bytes, ordered, over_each_other, random_bytes
    from tests.gpu.rank import DEADLINE_S, Rank
    from tests.gpu.streams import busy, copies_by_a_thread, model_stream

StartRank = Callable[..., Rank]
KINDS: dict[str, Callable[[str], Any]] = {
    "whole": ordered,
    "in ranges": partial(ordered, order="LBNHC", ranges=2),
    "in parts": partial(ordered, order="LHBNC", slices=4),
    "in ranges and parts": partial(ordered, order="BHLNC", ranges=2, slices=6),
    "of groups": partial(over_each_other, slices=2),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def rows(seed: int, count: int, rank: Rank) -> Bytes:
    return random_bytes(seed, count * rank.layout.block_bytes).reshape(count, -1)


def as_bytes(some: Bytes) -> list[bytes]:
    return [row.tobytes() for row in some]


def test_the_workers_half_can_be_imported_without_vllm() -> None:
    code = "import sys; sys.modules['vllm'] = None; import kvstore_client.engine.paged.worker"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment(), timeout=DEADLINE_S, check=True)


@every_kind
def test_saved_blocks_are_in_the_store_byte_by_byte_memory_checked(
    kind: str, device: str, tcp_server: Server, start_rank: StartRank
) -> None:
    rank = start_rank(tcp_server.endpoint, KINDS[kind](device))
    before = rank.cache.blocks()
    keys = make_keys(5)
    first, second = rank.saves(keys[:3], [5, 0, 3], [7, 1, 4]), rank.saves(keys[3:], [1, 2], [0, 2])
    rank.step(StepPlan(saves=first, held={"finished": first.job}))
    rank.step(StepPlan(saves=second))
    rank.until_stored(first)
    rank.until_stored(second)
    assert rank.in_store(keys) == as_bytes(before[[5, 0, 3, 1, 2]])
    assert rank.saved == {"finished"} and not rank.report.broken
    assert rank.report.copied == {first.job: 1, second.job: 1}
    rank.check(before)


@every_kind
def test_loads_write_blocks_of_store_and_slots_byte_by_byte_memory_checked(
    kind: str, device: str, tcp_server: Server, start_rank: StartRank
) -> None:
    """One step has several loads: into slots, through rows lent for the load, and from slots, which keep their
    blocks."""
    rank = start_rank(tcp_server.endpoint, KINDS[kind](device))
    expected = rank.cache.blocks()
    keys = make_keys(3)
    wanted = rows(1, 3, rank)
    rank.put_in_store(keys, wanted)
    saved = rank.saves(make_keys(1, first=9), [0], [8])
    rank.step(StepPlan(saves=saved))
    rank.until(lambda: rank.report.copied)
    loads = [
        Load("into slots", keys=keys[:2], block_ids=[4, 1], slots=[5, 3], within_s=DEADLINE_S),
        Load("lent", [8], [2], keys[2:], [5], within_s=DEADLINE_S),
    ]
    rank.step(StepPlan(loads=loads))
    rank.until_loaded("into slots", "lent")
    expected[[4, 1, 5, 2]] = [*wanted, expected[0]]
    rank.check(expected)
    with tcp_server.stopped():
        rank.step(StepPlan(loads=[Load("slots", host_slots=[3, 5, 5], host_block_ids=[0, 3, 2])]))
        rank.until_loaded("slots")
    expected[[0, 3, 2]] = wanted[[1, 0, 0]]
    rank.check(expected)
    assert not rank.failed and not rank.counters.take().get("defects")


def test_blocks_computed_in_this_step_are_saved_with_their_new_bytes(
    device: str, tcp_server: Server, start_rank: StartRank
) -> None:
    """A part is saved only after its last layer is computed."""
    rank = start_rank(tcp_server.endpoint, KINDS["in parts"](device))
    wanted = rows(1, 2, rank)
    uploaded = rank.cache.upload(wanted)
    job = rank.saves(make_keys(2), [3, 1], [0, 1])
    with model_stream(device):
        rank.step(StepPlan(saves=job), [(3, uploaded[0]), (1, uploaded[1])], before=lambda: busy(rank.layout, 0.05))
        rank.until_stored(job)
    assert rank.in_store([block.key for block in job.copied]) == as_bytes(wanted)


@pytest.mark.parametrize("slices", [1, 4])
def test_blocks_reused_during_their_save_are_saved_with_their_old_bytes(
    device: str, slices: int, tcp_server: Server, start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a preemption, the next step writes to the whole cache at once. On a device, this takes a fiftieth of the
    time that the copies of 32 MiB take."""
    copies_by_a_thread(monkeypatch)
    layers, blocks, tokens = 4, 8, 1024 if device == "cuda" else 64
    cache = ordered(device, layers=layers, heads=4, tokens=tokens, content=128, num_blocks=blocks, slices=slices)
    rank = start_rank(tcp_server.endpoint, cache)
    before = cache.memory.clone()
    by_layer = cache.bytes().reshape(layers, blocks, -1)
    wanted = as_bytes(by_layer.swapaxes(0, 1).reshape(blocks, -1))
    for turn in range(3):
        cache.memory.copy_(before)
        cache.bytes()
        job = rank.saves(make_keys(blocks, first=100 * turn), list(range(blocks)), list(range(blocks)))
        with model_stream(device):
            rank.step(StepPlan(saves=job), before=lambda: busy(rank.layout, 0.1))
            rank.step(StepPlan(reusing=True), before=lambda turn=turn: cache.memory.fill_(turn))
            rank.until_stored(job)
        assert rank.in_store([block.key for block in job.copied]) == wanted, turn
        assert (cache.bytes() == turn).all()


@pytest.mark.parametrize("slices", [1, 4])
def test_a_load_comes_after_earlier_writes_to_its_blocks(
    device: str, slices: int, tcp_server: Server, start_rank: StartRank
) -> None:
    """The engine plans one step ahead of its device: when a load begins, the previous step still writes to blocks that
    the engine has given to the load."""
    cache = ordered(device, tokens=16, content=64, slices=slices)
    rank = start_rank(tcp_server.endpoint, cache)
    keys, wanted = make_keys(3), rows(1, 3, rank)
    rank.put_in_store(keys, wanted)
    poison = cache.upload(rows(2, 6, rank))
    job = rank.saves(make_keys(1, first=9), [0], [8])
    rank.step(StepPlan(saves=job))
    rank.until_stored(job)
    expected = cache.blocks()
    with model_stream(device):
        for number in range(2):  # at the first attempt, a device may load code
            names = f"slot {number}", f"store {number}", f"slots {number}"
            rank.step(writes=[(block, poison[block]) for block in range(1, 6)], before=lambda: busy(rank.layout, 0.2))
            loads = [
                Load(names[0], host_slots=[8], host_block_ids=[1]),
                Load(names[1], keys=keys[:2], block_ids=[2, 3], within_s=DEADLINE_S),
                Load(names[2], keys=keys[1:], block_ids=[5, 4], slots=[1, 2], within_s=DEADLINE_S),
            ]
            rank.step(StepPlan(loads=loads))
            rank.until_loaded(*names)
            expected[1:] = [expected[0], wanted[0], wanted[1], wanted[2], wanted[1]]
            rank.check(expected)
    assert not rank.failed


def test_a_load_stops_at_a_missing_block_and_reports_the_rest(
    device: str, tcp_server: Server, start_rank: StartRank
) -> None:
    rank = start_rank(tcp_server.endpoint, ordered(device))
    expected = rank.cache.blocks()
    keys, wanted = make_keys(5), rows(1, 5, rank)
    there = [0, 1, 3, 4]
    rank.put_in_store([keys[index] for index in there], wanted[there])
    rank.step(StepPlan(loads=[Load("it", keys=keys, block_ids=[5, 3, 1, 0, 2], within_s=DEADLINE_S)]))
    rank.until_loaded("it")
    assert rank.failed == {1, 0, 2}
    expected[[5, 3]] = wanted[:2]
    rank.check(expected)


@pytest.mark.parametrize("how", ["stands still", "is gone"])
def test_if_the_store_fails_nothing_is_written(
    device: str, how: str, start_server: StartServer, start_rank: StartRank
) -> None:
    server = start_server()
    rank = start_rank(server.endpoint, ordered(device, slices=4), timeout_s=2.0)
    expected = rank.cache.blocks()
    keys = make_keys(3)
    rank.put_in_store(keys, rows(1, 3, rank))
    loads = [
        Load("into slots", keys=keys, block_ids=[4, 1, 0], slots=[5, 3, 2], within_s=0.5),
        Load("lent", keys=keys[1:], block_ids=[2, 5], within_s=0.5),
    ]
    job = rank.saves(make_keys(1, first=9), [3], [8])
    if how == "is gone":
        server.kill()
        rank.step(StepPlan(loads=loads, saves=job))
        rank.until_loaded("into slots", "lent")
    else:
        with server.stopped():
            rank.step(StepPlan(loads=loads, saves=job))
            rank.until_loaded("into slots", "lent")
            rank.until(lambda: rank.report.released)
    assert rank.failed == {4, 1, 0, 2, 5}
    rank.until(lambda: rank.report.released)
    assert not rank.report.stored and not rank.report.broken, "the slot can be used again, the store has no block"
    rank.check(expected)


@pytest.mark.parametrize("slices", [1, 4])
def test_an_aborted_load_ends_soon_and_writes_nothing_later(
    device: str, slices: int, tcp_server: Server, start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link stops after some of the blocks. After the abort, the blocks that were not loaded belong to other
    requests."""
    blocks = 64
    cache = ordered(device, layers=4, heads=4, tokens=16, content=64, num_blocks=blocks, slices=slices)
    monkeypatch.setattr(transfer_in, "LOAD_CHUNK_BYTES", 4 * 32768)
    with SlowLink(tcp_server.port) as link:
        rank = start_rank(link.endpoint, cache)
        assert rank.layout.block_bytes == 32768
        keys, wanted = make_keys(blocks), rows(1, blocks, rank)
        rank.put_in_store(keys, wanted)
        poison = cache.upload(rows(2, blocks, rank))
        expected = rows(2, blocks, rank)
        rank.step(StepPlan(loads=[Load("first", keys=keys[:4], block_ids=[0, 1, 2, 3], within_s=DEADLINE_S)]))
        rank.until_loaded("first")
        link.hold(after_bytes=16 * rank.layout.block_bytes)
        targets = list(reversed(range(blocks)))
        rank.step(StepPlan(loads=[Load("it", keys=keys, block_ids=targets, within_s=DEADLINE_S)]))
        rank.until(lambda: link.held)
        cancelled_at = time.monotonic()
        rank.step(StepPlan(cancelled=["it", "no such request"]))
        rank.until_loaded("it", deadline_s=DEADLINE_S / 4)
        assert time.monotonic() - cancelled_at < DEADLINE_S / 4
        assert rank.failed and (len(rank.failed) < blocks or slices > 1)  # two parts arrive together
        found = cache.blocks()
        loaded = [index for index, block in enumerate(targets) if block not in rank.failed]
        assert np.array_equal(found[[targets[index] for index in loaded]], wanted[loaded])
        with model_stream(device):
            rank.step(writes=[(block, poison[block]) for block in range(blocks)])
            link.release()
            # The next load uses the same link and the same rows.
            rank.step(StepPlan(loads=[Load("next", keys=keys[:8], block_ids=targets[:8], within_s=DEADLINE_S)]))
            rank.until_loaded("it", "next")
        expected[targets[:8]] = wanted[:8]
        rank.check(expected)
        rank.close()
        rank.check(expected)


@pytest.mark.parametrize("slices", [1, 4])
def test_a_local_server_reads_the_page_locked_pool_directly_memory_checked(
    device: str, slices: int, start_server: StartServer, start_rank: StartRank, tmp_path: Path
) -> None:
    """The option `store_on_host` makes the server read the pool. The test checks the server's blocks over TCP."""
    server = start_server("--unix-socket", str(tmp_path / "s"))
    rank = start_rank(server.endpoint, ordered(device, slices=slices), store_on_host=True)
    assert rank.guard.call(lambda client: client.stats.path, "") == "shared memory"
    expected = rank.cache.blocks()
    job = rank.saves(make_keys(4), [5, 0, 3, 2], [7, 1, 4, 0])
    rank.step(StepPlan(saves=job))
    rank.until_stored(job)
    assert rank.in_store([block.key for block in job.copied]) == as_bytes(expected[[5, 0, 3, 2]])
    [link] = rank.guard.call(lambda client: client._pool.links, [])
    assert link.staging is not None and link.staging.ring is None, "no block went through memory of the client's"
    loads = [
        Load("slots", host_slots=[7, 4], host_block_ids=[0, 1]),
        Load(
            "store", keys=[block.key for block in job.copied[1:3]], block_ids=[2, 4], slots=[9, 10], within_s=DEADLINE_S
        ),
    ]
    rank.step(StepPlan(loads=loads))
    rank.until_loaded("slots", "store")
    expected[[0, 1, 2, 4]] = expected[[5, 3, 0, 3]]
    rank.check(expected)
    assert not rank.failed


def test_a_thread_without_device_use_makes_rows_for_later_loans(
    device: str, tcp_server: Server, start_rank: StartRank
) -> None:
    """The rows are for loads that wait for blocks that another engine computes."""
    from kvstore_client import KVStoreClient

    rank = start_rank(tcp_server.endpoint, ordered(device))
    expected = rank.cache.blocks()
    keys, wanted = make_keys(2), rows(1, 2, rank)
    with KVStoreClient(tcp_server.endpoint, rank.guard.namespace) as other, other.promise(keys):
        rank.step(StepPlan(loads=[Load("it", keys=keys, block_ids=[3, 1], within_s=DEADLINE_S, waits=True)]))
        for _ in range(5):
            rank.step()
        assert not rank.loaded
        other.set(keys, list(wanted))
        rank.until_loaded("it")
    expected[[3, 1]] = wanted
    rank.check(expected)
    assert not rank.failed
    wait_until(lambda: not rank.worker.loads._in.waiting)
