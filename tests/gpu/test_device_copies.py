"""Copies between a CUDA device and host memory: their bytes, their order, the memory they need."""

from __future__ import annotations

import threading

import numpy as np

from tests.engine.test_kv_layout import ORDERS, block_layout, caches, equal, swap_around, swapped_out
from tests.support.harness import wait_until


@ORDERS
def test_a_device_s_block_comes_back_where_it_is_put(order: str) -> None:
    tensors = caches(order, "cuda")
    swap_around(block_layout(tensors), tensors)


@ORDERS
def test_parts_of_a_device_s_block_are_those_of_a_host(order: str) -> None:
    """Each copied out by itself, behind the work of its layers alone, and back in."""
    tensors = caches(order, "cuda")
    layout, host = (block_layout(each, parts=4) for each in (tensors, caches(order)))
    rows, right = (each.pool(4) for each in (layout, host))
    for part in (2, 0, 3, 1):
        layout.swap_out([5], rows, [part], part).wait()
        host.swap_out([5], right, [part], part).wait()
    assert np.array_equal(rows, right)
    for part in range(4):
        layout.swap_in(rows, [part], [0], layout.fence(), part).wait()
    assert all(equal(tensor[0], tensor[5]) for tensor in tensors.values())


@ORDERS
def test_a_device_and_a_host_store_the_same_bytes(order: str) -> None:
    assert np.array_equal(
        swapped_out(block_layout(caches(order, "cuda")), 5, 1), swapped_out(block_layout(caches(order)), 5, 1)
    )


def test_a_copy_out_of_a_device_comes_after_the_work_queued_before_it() -> None:
    import torch

    tensors = caches("LBHNC", "cuda")
    layout = block_layout(tensors)
    pool = layout.pool(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        for tensor in tensors.values():
            tensor.view(torch.int16).fill_(0x0101)
        copy = layout.swap_out([2], pool, [0])
    assert not copy.done()
    wait_until(copy.done, what="the copy is done")
    assert (pool == 1).all()


def test_a_copy_into_a_device_comes_after_the_work_queued_before_the_fence() -> None:
    import torch

    tensors = caches("LBHNC", "cuda")
    layout = block_layout(tensors)
    pool = layout.pool(1)
    pool[...] = 7
    waited = []

    def swap_in() -> None:
        copy = layout.swap_in(pool, [0], [2], fence)
        waited.append(not copy.done())
        copy.wait()

    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        for tensor in tensors.values():
            tensor.view(torch.int16).zero_()
        fence = layout.fence()
        thread = threading.Thread(target=swap_in)
        thread.start()
        thread.join()
    assert waited == [True]
    assert (swapped_out(layout, 2) == 7).all()


def test_a_load_waits_for_its_own_fence_only() -> None:
    """With a load in each step, one that waited for the newest fence would wait for ever newer steps."""
    import torch

    layout = block_layout(caches("LBHNC", "cuda"))
    pool = layout.pool(2)
    pool[0], pool[1] = 7, 9
    with torch.cuda.stream(torch.cuda.Stream()):
        early = layout.fence()
        torch.cuda._sleep(400_000_000)
        late = layout.fence()
        second = layout.swap_in(pool, [1], [3], late)
        first = layout.swap_in(pool, [0], [2], early)
        first.wait()
        assert not second.done()
        second.wait()
    assert (swapped_out(layout, 2) == 7).all() and (swapped_out(layout, 3) == 9).all()


def test_the_pool_of_a_device_is_page_locked_and_as_large_as_asked_for() -> None:
    import torch

    layout = block_layout(caches("LBHNC", "cuda"))
    pool = layout.pool(11)
    assert pool.shape == (11, layout.block_bytes)
    assert torch.from_numpy(pool).is_pinned()
    assert torch.from_numpy(pool[-1]).is_pinned()
