"""The worker's half of the connector on a paged cache of tensors and a real store, step by step.

Every byte that is saved or loaded is checked, and so is what must not change.
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
    "in parts": partial(ordered, order="LHBNC", parts=4),
    "in ranges and parts": partial(ordered, order="BHLNC", ranges=2, parts=6),
    "of groups": partial(over_each_other, parts=2),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def rows(seed: int, count: int, rank: Rank) -> Bytes:
    return random_bytes(seed, count * rank.layout.block_bytes).reshape(count, -1)


def as_bytes(some: Bytes) -> list[bytes]:
    return [row.tobytes() for row in some]


def test_the_workers_half_is_imported_where_vllm_is_missing() -> None:
    code = "import sys; sys.modules['vllm'] = None; import kvstore_client.engine.paged.worker"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment(), timeout=DEADLINE_S, check=True)


@every_kind
def test_what_is_saved_is_in_the_store_byte_by_byte_memory_checked(
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
def test_loads_write_the_blocks_of_the_store_and_of_slots_byte_by_byte_memory_checked(
    kind: str, device: str, tcp_server: Server, start_rank: StartRank
) -> None:
    """Several in one step: into slots, through rows that are lent, and from slots, which keep their blocks."""
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


def test_blocks_that_the_model_computes_in_this_step_are_saved_as_they_are_then(
    device: str, tcp_server: Server, start_rank: StartRank
) -> None:
    """Each part when its last layer is computed, and not before."""
    rank = start_rank(tcp_server.endpoint, KINDS["in parts"](device))
    wanted = rows(1, 2, rank)
    uploaded = rank.cache.upload(wanted)
    job = rank.saves(make_keys(2), [3, 1], [0, 1])
    with model_stream(device):
        rank.step(StepPlan(saves=job), [(3, uploaded[0]), (1, uploaded[1])], before=lambda: busy(rank.layout, 0.05))
        rank.until_stored(job)
    assert rank.in_store([block.key for block in job.copied]) == as_bytes(wanted)


@pytest.mark.parametrize("parts", [1, 4])
def test_blocks_that_are_given_away_while_they_are_saved_are_saved_as_they_were(
    device: str, parts: int, tcp_server: Server, start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a preemption: the next step writes to all of the cache at once. On a device that takes a fiftieth of the
    time that the copies take, of 32 MiB."""
    copies_by_a_thread(monkeypatch)
    layers, blocks, tokens = 4, 8, 1024 if device == "cuda" else 64
    cache = ordered(device, layers=layers, heads=4, tokens=tokens, content=128, num_blocks=blocks, parts=parts)
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


@pytest.mark.parametrize("parts", [1, 4])
def test_a_load_comes_after_what_was_to_be_written_to_its_blocks_before(
    device: str, parts: int, tcp_server: Server, start_rank: StartRank
) -> None:
    """The engine is a step ahead of its device: the step before still writes to blocks that were given away since."""
    cache = ordered(device, tokens=16, content=64, parts=parts)
    rank = start_rank(tcp_server.endpoint, cache)
    keys, wanted = make_keys(3), rows(1, 3, rank)
    rank.put_in_store(keys, wanted)
    poison = cache.upload(rows(2, 6, rank))
    job = rank.saves(make_keys(1, first=9), [0], [8])
    rank.step(StepPlan(saves=job))
    rank.until_stored(job)
    expected = cache.blocks()
    with model_stream(device):
        for number in range(2):  # the first time, a device may load the code of what is called
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


def test_of_a_load_that_misses_a_block_the_rest_is_reported_and_not_written(
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
def test_of_a_store_that_fails_nothing_is_written(
    device: str, how: str, start_server: StartServer, start_rank: StartRank
) -> None:
    server = start_server()
    rank = start_rank(server.endpoint, ordered(device, parts=4), timeout_s=2.0)
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


@pytest.mark.parametrize("parts", [1, 4])
def test_a_load_that_is_aborted_ends_soon_and_nothing_comes_later(
    device: str, parts: int, tcp_server: Server, start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a link that stands still amid the blocks. What it did not load belongs to others from then on."""
    blocks = 64
    cache = ordered(device, layers=4, heads=4, tokens=16, content=64, num_blocks=blocks, parts=parts)
    monkeypatch.setattr(transfer_in, "CHUNK_BYTES", 4 * 32768)
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
        assert rank.failed and (len(rank.failed) < blocks or parts > 1)  # two parts come at a time
        found = cache.blocks()
        loaded = [index for index, block in enumerate(targets) if block not in rank.failed]
        assert np.array_equal(found[[targets[index] for index in loaded]], wanted[loaded])
        with model_stream(device):
            rank.step(writes=[(block, poison[block]) for block in range(blocks)])
            link.release()
            # Over the same link, and through the same rows.
            rank.step(StepPlan(loads=[Load("next", keys=keys[:8], block_ids=targets[:8], within_s=DEADLINE_S)]))
            rank.until_loaded("it", "next")
        expected[targets[:8]] = wanted[:8]
        rank.check(expected)
        rank.close()
        rank.check(expected)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_server_on_this_host_reads_the_page_locked_pool_by_itself_memory_checked(
    device: str, parts: int, start_server: StartServer, start_rank: StartRank, tmp_path: Path
) -> None:
    """`store_on_host`. What the server has is checked over TCP."""
    server = start_server("--unix-socket", str(tmp_path / "s"))
    rank = start_rank(server.endpoint, ordered(device, parts=parts), store_on_host=True)
    assert rank.guard.call(lambda client: client.stats.path, "") == "shared memory"
    expected = rank.cache.blocks()
    job = rank.saves(make_keys(4), [5, 0, 3, 2], [7, 1, 4, 0])
    rank.step(StepPlan(saves=job))
    rank.until_stored(job)
    assert rank.in_store([block.key for block in job.copied]) == as_bytes(expected[[5, 0, 3, 2]])
    [link] = rank.guard.call(lambda client: client._core.links, [])
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


def test_rows_that_are_lent_later_are_made_by_a_thread_that_has_not_used_the_device(
    device: str, tcp_server: Server, start_rank: StartRank
) -> None:
    """Those of loads that wait for blocks which another engine computes."""
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
