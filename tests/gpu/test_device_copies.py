"""Copies between the cache and rows in host memory, for every layout of a cache. The tests check each byte: those that
must be written, and all others."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.engine.test_kv_layout import ORDERS, block_layout, swapped_out
from tests.engine.test_kv_layout import caches as numbered_caches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    torch = pytest.importorskip("torch")
    from benchmarks.gpu.driver import BATCHED, Copies, Driver
    from kvstore_client.engine.paged import device as device_module
    from kvstore_client.engine.paged.layout import BlockLayout, Rows, rows_of
    from tests.gpu.paged_caches import CACHES, UNTOUCHED, PagedCache, one_model, ordered, random_bytes

every_cache = pytest.mark.parametrize("kind", list(CACHES))


def copied_out(cache: PagedCache, layout: BlockLayout, blocks: list[int], slots: list[int], pool: Rows) -> Rows:
    """Copy these blocks, with all their parts, to these slots of a pool. Returns the expected content of the pool."""
    everything = cache.bytes()
    pool[...] = UNTOUCHED
    expected = np.full_like(pool, UNTOUCHED)
    under_way = []
    for part in reversed(range(cache.slices)):
        rows = rows_of(slots, cache.slices, part)
        under_way.append(layout.swap_out(blocks, pool, rows, part))
        for block, row in zip(blocks, rows, strict=True):
            expected[row] = everything[cache.places(block, part)]
    for copy in under_way:
        copy.wait()
    assert np.array_equal(cache.bytes(), everything), "a copy out of the cache changes nothing there"
    return expected


def copied_in(cache: PagedCache, layout: BlockLayout, pool: Rows, slots: list[int], blocks: list[int]) -> Rows:
    """Copy these slots, with all parts, to these blocks. Returns the expected content of the cache's memory."""
    expected = cache.bytes()
    fence = layout.fence()
    under_way = []
    for part in range(cache.slices):
        rows = rows_of(slots, cache.slices, part)
        under_way.append(layout.swap_in(pool, rows, blocks, fence, part))
        for block, row in zip(blocks, rows, strict=True):
            expected[cache.places(block, part)] = pool[row]
    for copy in under_way:
        copy.wait()
    return expected


def check_every_byte(cache: PagedCache) -> None:
    layout = cache.layout()
    last = cache.num_blocks - 1
    pool = layout.pool(7 * cache.slices)
    assert layout.slice_bytes == len(cache.places(0, 0))
    expected = copied_out(cache, layout, [last, 0], [5, 2], pool)
    assert np.array_equal(pool, expected)
    pool[...] = random_bytes(1, pool.size).reshape(pool.shape)
    before = pool.copy()
    expected = copied_in(cache, layout, pool, [6, 3], [1, last])
    assert np.array_equal(cache.bytes(), expected)
    # One slot goes to several blocks.
    expected = copied_in(cache, layout, pool, [4, 4], [0, 1])
    assert np.array_equal(cache.bytes(), expected)
    assert np.array_equal(pool, before), "a copy into the cache changes no row"


@every_cache
def test_every_byte_of_a_block_goes_to_its_own_place(kind: str, device: str) -> None:
    check_every_byte(CACHES[kind](device))


@pytest.mark.parametrize("kind", ["BHLNC in ranges and parts", "LHBNC of 2 kernel blocks", "states over attention"])
def test_every_byte_is_right_memory_checked(kind: str, device: str) -> None:
    """Because of its name, `make gpu-test` also runs this test under a memory checker, with the caches of the most
    pieces."""
    check_every_byte(CACHES[kind](device))


@every_cache
def test_every_byte_is_right_in_copies_of_many_calls(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "RUNS_PER_CALL", 7)
    check_every_byte(CACHES[kind](device))


def test_every_byte_is_right_if_the_driver_takes_one_run_per_call(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver older than CUDA 12.8, the replacement for vLLM's copy function makes one call per run."""
    driver = Driver()
    driver._batched = None
    monkeypatch.setattr(device_module, "batched_copy", lambda: driver.copy_batch)
    for kind in ("LHBNC in ranges and parts", "states over attention", "float8_e4m3fn"):
        check_every_byte(CACHES[kind](cuda))


def test_the_driver_queues_a_batch_in_one_call(cuda: str, copies: Copies) -> None:
    """A benchmark's results name what makes the copies, so that name must be right."""
    if not isinstance(copies, Driver):
        pytest.skip(f"the copies are made by {copies.how}")
    check_every_byte(ordered(cuda))
    if not hasattr(copies._library, "cuMemcpyBatchAsync"):
        pytest.skip("this driver has no batched copies")
    assert copies.how == BATCHED


def test_a_copys_calls_have_a_bounded_number_of_runs(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has more runs than the driver accepts in one call."""
    calls: list[int] = []
    copy = device_module.batched_copy()

    def counting(*arrays: torch.Tensor, is_src_access_order_any: bool = False) -> None:
        calls.append(len(arrays[0]))
        copy(*arrays, is_src_access_order_any=is_src_access_order_any)

    monkeypatch.setattr(device_module, "batched_copy", lambda: counting)
    cache = ordered(cuda, gap=1, num_blocks=128)
    layout = cache.layout()
    pool = layout.pool(128)
    expected = copied_out(cache, layout, list(range(128)), list(reversed(range(128))), pool)
    assert np.array_equal(pool, expected)
    assert calls == [device_module.RUNS_PER_CALL, 128 * 12 * 2 * 4 - device_module.RUNS_PER_CALL]
    calls.clear()
    pool[...] = random_bytes(2, pool.size).reshape(pool.shape)
    expected = copied_in(cache, layout, pool, list(range(128)), list(range(128)))
    assert np.array_equal(cache.bytes(), expected)
    assert calls == [device_module.RUNS_PER_CALL, 128 * 12 * 2 * 4 - device_module.RUNS_PER_CALL]


@ORDERS
def test_a_device_and_a_host_store_the_same_bytes(order: str, device: str) -> None:
    one, other = (block_layout(numbered_caches(order, where)) for where in (device, "cpu"))
    assert np.array_equal(swapped_out(one, 5, 1), swapped_out(other, 5, 1))
    assert one.description == other.description


def test_copies_out_are_made_in_the_order_of_the_calls(device: str) -> None:
    cache = one_model(device, num_blocks=6)
    layout = cache.layout()
    pool = layout.pool(2)
    for block in range(6):
        last = layout.swap_out([block] * 2, pool, [0, 1])
    last.wait()
    assert np.array_equal(pool, cache.blocks()[[5, 5]])


def test_an_empty_copy_is_no_error(device: str) -> None:
    layout = ordered(device).layout()
    pool = layout.pool(0)
    for copy in (layout.swap_out([], pool, []), layout.swap_in(pool, [], [], layout.fence())):
        copy.wait()
        assert copy.done()


def test_a_missing_block_is_refused_before_any_byte_moves(device: str) -> None:
    cache = ordered(device)
    layout = cache.layout()
    before, pool = cache.bytes(), layout.pool(2)
    pool[...] = UNTOUCHED
    for wrong in (-1, cache.num_blocks):
        with pytest.raises(IndexError, match=f"{wrong}.*nothing was copied"):
            layout.swap_out([0, wrong], pool, [0, 1])
        with pytest.raises(IndexError, match=f"{wrong}.*nothing was copied"):
            layout.swap_in(pool, [0, 1], [0, wrong], layout.fence())
    assert (pool == UNTOUCHED).all() and np.array_equal(cache.bytes(), before)


@pytest.mark.parametrize("slices", [1, 4])
def test_many_threads_copy_in_and_out_at_once(device: str, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has blocks and slots of its own. No thread has used the device before."""
    monkeypatch.setattr("kvstore_client.engine.paged.layout.AT_ONCE_BYTES", 0)
    threads, rounds, blocks = 8, 12, 3
    cache = ordered(device, num_blocks=threads * blocks, tokens=16, content=64, slices=slices)
    layout = cache.layout()
    slots = 2 * threads * blocks
    pool = layout.pool(slots * slices)
    pool[...] = UNTOUCHED
    by_slot = pool.reshape(slots, -1)
    begin = threading.Barrier(threads)

    def work(number: int) -> None:
        mine = list(range(number * blocks, (number + 1) * blocks))
        back = [threads * blocks + block for block in mine]
        begin.wait(30)
        for turn in range(rounds):
            wanted = random_bytes(1000 * number + turn, blocks * layout.block_bytes).reshape(blocks, -1)
            by_slot[mine] = wanted
            fence = layout.fence()
            loaded = [layout.swap_in(pool, rows_of(mine, slices, part), mine, fence, part) for part in range(slices)]
            for copy in loaded:
                copy.wait()
            by_slot[mine] = UNTOUCHED
            saved = [layout.swap_out(mine, pool, rows_of(back, slices, part), part) for part in range(slices)]
            for copy in reversed(saved):
                copy.wait()
            assert np.array_equal(by_slot[back], wanted), f"thread {number}, round {turn}"

    with ThreadPoolExecutor(threads) as pool_of_threads:
        for done in [pool_of_threads.submit(work, number) for number in range(threads)]:
            done.result(120)
    last = [
        random_bytes(1000 * number + rounds - 1, blocks * layout.block_bytes).reshape(blocks, -1)
        for number in range(threads)
    ]
    assert np.array_equal(cache.blocks(), np.concatenate(last))
