"""The order of copies and the model's work: which of them waits for which."""

from __future__ import annotations

import gc
import threading
import time
import warnings

import numpy as np
import pytest

from tests.support.harness import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    torch = pytest.importorskip("torch")
    from kvstore_client.engine.paged.layout import Copy
    from tests.gpu.paged_caches import UNTOUCHED, Bytes, one_model, ordered, random_bytes
    from tests.gpu.streams import after_a_rehearsal, busy, copies_by_a_thread, model_stream

BUSY_S = 0.3
DEADLINE_S = 60.0


def rows_of_bytes(seed: int, rows: int, row_bytes: int) -> Bytes:
    return random_bytes(seed, rows * row_bytes).reshape(rows, row_bytes)


def test_a_copy_out_comes_after_the_work_queued_before_it(cuda: str) -> None:
    cache = one_model(cuda, num_blocks=6)
    layout = cache.layout()
    pool = layout.pool(1)

    def attempt(number: int) -> bool:
        [row] = rows = rows_of_bytes(number, 1, layout.block_bytes)
        [uploaded] = cache.upload(rows)
        pool[...] = UNTOUCHED
        with model_stream(cuda):
            busy(layout, BUSY_S)
            cache.put(2, uploaded)
            copy = layout.swap_out([2], pool, [0])
        under_way = not copy.done() and bool((pool == UNTOUCHED).all())
        wait_until(copy.done, DEADLINE_S)
        assert np.array_equal(pool[0], row)
        return under_way

    after_a_rehearsal(attempt)


def test_a_copy_in_comes_after_the_work_queued_before_the_fence(cuda: str) -> None:
    """The thread that makes the copy has not used the device before."""
    cache = one_model(cuda, num_blocks=6)
    layout = cache.layout()
    pool = layout.pool(1)

    def attempt(number: int) -> bool:
        pool[...], poison = rows_of_bytes(number, 2, layout.block_bytes)
        [uploaded] = cache.upload(poison[np.newaxis])
        waited: list[bool] = []

        def swap_in() -> None:
            copy = layout.swap_in(pool, [0], [2], fence)
            waited.append(not copy.done())
            copy.wait()

        with model_stream(cuda):
            busy(layout, BUSY_S)
            cache.put(2, uploaded)
            fence = layout.fence()
            thread = threading.Thread(target=swap_in)
            thread.start()
            thread.join()
        assert np.array_equal(cache.blocks()[2], pool[0])
        return waited == [True]

    after_a_rehearsal(attempt)


def test_a_copy_in_without_a_fence_comes_after_all_work(cuda: str) -> None:
    cache = one_model(cuda, num_blocks=6)
    layout = cache.layout()
    pool = layout.pool(1)
    pool[...], poison = rows_of_bytes(1, 2, layout.block_bytes)
    [uploaded] = cache.upload(poison[np.newaxis])
    with model_stream(cuda):
        busy(layout, BUSY_S)
        cache.put(2, uploaded)
    layout.swap_in(pool, [0], [2]).wait()
    assert np.array_equal(cache.blocks()[2], pool[0])


def test_a_load_waits_for_its_own_fence_only(cuda: str) -> None:
    """If loads waited for the newest fence, a load in each step would delay the earlier loads again and again."""
    cache = ordered(cuda)
    layout = cache.layout()
    pool = layout.pool(2)

    def attempt(number: int) -> bool:
        pool[...] = rows_of_bytes(number, 2, layout.block_bytes)
        with model_stream(cuda):
            early = layout.fence()
            busy(layout, BUSY_S)
            late = layout.fence()
            second = layout.swap_in(pool, [1], [3], late)
            first = layout.swap_in(pool, [0], [2], early)
            first.wait()
            waits = not second.done()
            second.wait()
        assert np.array_equal(cache.blocks()[[2, 3]], pool)
        return waits

    after_a_rehearsal(attempt)


def test_a_load_does_not_wait_for_a_copy_out(cuda: str) -> None:
    cache = ordered(cuda)
    layout = cache.layout()
    pool = layout.pool(2)

    def attempt(number: int) -> bool:
        pool[...] = rows_of_bytes(number, 2, layout.block_bytes)
        with model_stream(cuda):
            fence = layout.fence()
            busy(layout, BUSY_S)
            out = layout.swap_out([0], pool, [1])
            layout.swap_in(pool, [0], [2], fence).wait()
            waits = not out.done()
            out.wait()
        blocks = cache.blocks()
        assert np.array_equal(blocks[2], pool[0]) and np.array_equal(blocks[0], pool[1])
        return waits

    after_a_rehearsal(attempt)


def test_work_ordered_after_a_copy_out_writes_after_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy does not wait for the later work's stream, so only `order` makes that work come after the copy."""
    copies_by_a_thread(monkeypatch)
    cache = one_model(device, num_blocks=4)
    layout = cache.layout()
    pool = layout.pool(3)

    def attempt(number: int) -> bool:
        before = cache.blocks()
        uploaded = cache.upload(rows_of_bytes(number, 3, layout.block_bytes))
        with model_stream(device):
            busy(layout, BUSY_S)
            copy = layout.swap_out([0, 1, 2], pool, [2, 1, 0])
        under_way = not copy.done()
        with model_stream(device):
            copy.order()
            if device == "cuda":
                under_way = under_way and not copy.done()  # `order` has not made the thread wait
            for block, row in enumerate(uploaded):
                cache.put(block, row)
            copy.wait()
        assert np.array_equal(pool[::-1], before[:3])
        assert np.array_equal(cache.blocks()[:3], rows_of_bytes(number, 3, layout.block_bytes))
        return under_way

    after_a_rehearsal(attempt)


def test_asking_whether_a_copy_is_done_never_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies_by_a_thread(monkeypatch)
    cache = ordered(device)
    layout = cache.layout()
    pool = layout.pool(2)

    def attempt(number: int) -> bool:
        with model_stream(device):
            fence = layout.fence()
            busy(layout, BUSY_S)
            copies: list[Copy] = [layout.swap_out([0], pool, [0])]
            if device == "cuda":
                copies.append(layout.swap_in(pool, [1], [1], layout.fence()))
            layout.swap_in(pool, [1], [2], fence).wait()
            longest, asked = 0.0, 0
            while not all(copy.done() for copy in copies):
                asked += 1
                before = time.perf_counter()
                for copy in copies:
                    copy.done()
                longest = max(longest, time.perf_counter() - before)
        assert all(copy.done() for copy in copies)
        return asked > 1 and longest < BUSY_S / 2

    after_a_rehearsal(attempt)


def test_a_copy_keeps_the_memory_that_it_reads(cuda: str) -> None:
    cache = one_model(cuda, num_blocks=6)
    layout = cache.layout()

    def attempt(number: int) -> bool:
        pool = layout.pool(3)
        pool[...] = expected = rows_of_bytes(number, 3, layout.block_bytes)
        with model_stream(cuda):
            busy(layout, BUSY_S)
            copy = layout.swap_in(pool, [0, 1, 2], [5, 4, 3], layout.fence())
        del pool
        gc.collect()
        waste = [np.full((3, layout.block_bytes), UNTOUCHED, dtype=np.uint8) for _ in range(4)]
        under_way = not copy.done()
        copy.wait()
        assert np.array_equal(cache.blocks()[[5, 4, 3]], expected) and len(waste) == 4
        return under_way

    after_a_rehearsal(attempt)


def test_steps_of_a_model_that_computes_save_and_load_right_bytes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step multiplies matrices, writes two blocks and saves them. The next step writes to these blocks again,
    after the copies, and reads a block that was loaded in the meantime. On a device, the test runs on the default
    stream and on another one.
    """
    copies_by_a_thread(monkeypatch)
    compute_steps(device)
    if device == "cuda":
        with model_stream(device):
            compute_steps(device)


def compute_steps(device: str) -> None:
    steps, size = (60, 2048) if device == "cuda" else (20, 128)
    cache = ordered(device, layers=8, heads=4, tokens=16, content=64, num_blocks=8)
    layout = cache.layout()
    pool, source = layout.pool(2 * steps), layout.pool(4)
    source[...] = rows_of_bytes(0, 4, layout.block_bytes)
    written = rows_of_bytes(1, 2 * steps, layout.block_bytes)
    uploaded = cache.upload(written)
    places = torch.from_numpy(cache.block_places(5)).to(device)
    matrix = torch.full((size, size), 1 / size, device=device)  # a power of two, so that products are exact
    product, seen, saves = matrix, [], []
    for step in range(steps):
        load = layout.swap_in(source, [step % 4], [5], layout.fence())
        for _ in range(4):
            product = product @ matrix
        for number in (2 * step, 2 * step + 1):
            cache.put(number % 2, uploaded[number])
        saves.append(layout.swap_out([0, 1], pool, [2 * step, 2 * step + 1]))
        saves[-1].order()
        load.wait()  # in an engine, the request waits for its load, and not the model
        seen.append(cache.memory[places])
    for copy in saves:
        copy.wait()
    assert torch.equal(product, matrix)
    assert np.array_equal(pool, written)
    for step, block in enumerate(seen):
        assert np.array_equal(block.cpu().numpy(), source[step % 4]), step
