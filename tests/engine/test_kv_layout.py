"""Copies blocks out of KV cache tensors, in every memory order of vLLM, and back, on the CPU.

On a device, the driver copies the runs that ``BlockLayout.runs`` finds; these runs are tested here without a device.
The tests that need a device are in ``tests/gpu``.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import torch

    from kvstore_client.engine.paged.layout import BlockLayout, Rows

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 12, 6, 2, 4, 8
AXES = dict(zip("LBHNC", (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT), strict=True))
# The number of dense runs in one block, for each order in memory of layers, blocks, heads, tokens and content.
RUNS = {"LBHNC": LAYERS, "LBNHC": LAYERS, "LHBNC": LAYERS * HEADS, "BLHNC": 1, "BLNHC": 1, "BHLNC": LAYERS * HEADS}
ORDERS = pytest.mark.parametrize("order", list(RUNS))


def caches(order: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return layers of logical shape (B, H, N, C) in one buffer with this physical order. All elements differ."""
    import torch

    buffer = torch.arange(math.prod(AXES.values()), dtype=torch.int16).view(torch.bfloat16).to(device)
    whole = buffer.reshape([AXES[axis] for axis in order]).permute([order.index(axis) for axis in "LBHNC"])
    return {f"model.layers.{index}.attn": whole[index] for index in range(LAYERS)}


def block_layout(
    tensors: dict[str, torch.Tensor], num_blocks: int = BLOCKS, ranges: int = 1, slices: int = 1
) -> BlockLayout:
    from kvstore_client.engine.paged.layout import BlockLayout  # imports torch, so only in these tests

    return BlockLayout(tensors, num_blocks, ranges, slices=slices)


def swapped_out(layout: BlockLayout, *block_ids: int) -> Rows:
    """Copy these blocks out, and return a row for each."""
    rows = layout.pool(len(block_ids))
    layout.swap_out(block_ids, rows, range(len(block_ids))).wait()
    return rows


def to_bytes(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit, because some bit patterns are NaN."""
    return to_bytes(one) == to_bytes(other)


def swap_around(layout: BlockLayout, tensors: dict[str, torch.Tensor]) -> None:
    """Move blocks 4 and 0 through scattered slots of a pool to blocks 1 and 3; nothing else may change."""
    assert layout.block_bytes == LAYERS * HEADS * TOKENS * CONTENT * 2
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    pool = layout.pool(5)
    pool[...] = 0xAB
    layout.swap_out([4, 0, 2], pool, [3, 1, 0]).wait()
    assert (pool[[2, 4]] == 0xAB).all()
    layout.swap_in(pool, [3, 1], [1, 3], layout.fence()).wait()
    for name, tensor in tensors.items():
        assert equal(tensor[1], before[name][4])
        assert equal(tensor[3], before[name][0])
        for untouched in (0, 2, 4, 5):
            assert equal(tensor[untouched], before[name][untouched])


@ORDERS
def test_a_block_read_back_equals_what_was_written(order: str) -> None:
    tensors = caches(order)
    swap_around(block_layout(tensors), tensors)


@ORDERS
def test_a_large_copy_out_by_a_thread_gives_the_same_bytes(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore_client.engine.paged import layout as module

    monkeypatch.setattr(module, "AT_ONCE_BYTES", 0)
    tensors = caches(order)
    swap_around(block_layout(tensors), tensors)


def test_a_threads_copy_is_done_only_when_complete_and_computing_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvstore_client.engine.paged import layout as module

    monkeypatch.setattr(module, "AT_ONCE_BYTES", 0)
    may_copy = threading.Event()

    class Slow(module.BlockLayout):
        def _gather(self, *arguments: Any) -> None:
            assert may_copy.wait(10)
            super()._gather(*arguments)

    layout = Slow(caches("LBHNC"), BLOCKS)
    expected = block_layout(caches("LBHNC"))
    pool = layout.pool(3)
    pool[...] = 0xAB
    copies = [layout.swap_out([4], pool, [0]), layout.swap_out([1, 2], pool, [1, 2])]
    assert not copies[0].done() and not copies[1].done() and (pool == 0xAB).all()
    with ThreadPoolExecutor(1) as model:
        ordered = model.submit(copies[1].order)
        with pytest.raises(TimeoutError):
            ordered.result(0.05)
        may_copy.set()
        ordered.result(10)
    assert copies[0].done() and copies[1].done()
    assert np.array_equal(pool, swapped_out(expected, 4, 1, 2))


@ORDERS
def test_a_small_copy_of_host_tensors_is_done_at_once(order: str) -> None:
    layout = block_layout(caches(order))
    pool = layout.pool(1)
    assert layout.swap_out([2], pool, [0]).done()
    assert layout.swap_in(pool, [0], [3]).done()


@ORDERS
def test_a_devices_runs_are_the_bytes_the_host_copies(order: str) -> None:
    tensors = caches(order)
    layout = block_layout(tensors)
    pool, by_runs = layout.pool(4), layout.pool(4)
    pool[...] = by_runs[...] = 0
    layout.swap_out([5, 1], pool, [0, 2])
    runs = layout.runs([5, 1], by_runs, [0, 2])
    for source, target, size in zip(runs.cache.tolist(), runs.rows.tolist(), runs.sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
    assert np.array_equal(pool, by_runs)
    runs = layout.runs([3, 0], by_runs, [2, 0])
    for target, source, size in zip(runs.cache.tolist(), runs.rows.tolist(), runs.sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
    assert np.array_equal(swapped_out(layout, 0, 3), pool[[0, 2]])


@ORDERS
def test_runs_are_as_long_as_the_memory_order_allows(order: str) -> None:
    layout = block_layout(caches(order))
    runs = layout.runs([5, 1, 0], layout.pool(9), [8, 0, 4])
    assert [array.dtype for array in runs] == [np.int64] * 3
    assert len(runs.sizes) == 3 * RUNS[order]
    assert set(runs.sizes.tolist()) == {layout.block_bytes // RUNS[order]}


@ORDERS
@pytest.mark.parametrize("copies", ["host", "runs"])
def test_ranges_of_heads_equal_blocks_of_engines_with_fewer_heads(order: str, copies: str) -> None:
    tensors = caches(order)
    layout = block_layout(tensors, ranges=HEADS)
    narrow = [{name: tensor[:, head : head + 1].clone() for name, tensor in tensors.items()} for head in range(HEADS)]
    expected = np.stack([swapped_out(block_layout(each), 4, 1) for each in narrow], axis=1)
    if copies == "host":
        found = swapped_out(layout, 4, 1)
    else:
        found = layout.pool(2)
        runs = layout.runs([4, 1], found, [0, 1])
        for source, target, size in zip(runs.cache.tolist(), runs.rows.tolist(), runs.sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)
    assert np.array_equal(found.reshape(2, HEADS, -1), expected)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    layout.swap_in(found, [0, 1], [0, 3]).wait()
    for name, tensor in tensors.items():
        assert equal(tensor[[0, 3]], before[name][[4, 1]])


def test_a_ranges_order_is_described_like_that_of_fewer_heads() -> None:
    for order in ("LBHNC", "LBNHC", "BLHNC"):
        tensors = caches(order)
        dense = {name: tensor[:, :1].clone() for name, tensor in tensors.items()}
        assert block_layout(tensors, ranges=HEADS).description == block_layout(dense).description


def overlaid(state_bytes: int = 40) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return two groups of two layers each: pages of attention, and of states that are smaller, in the same memory."""
    import torch

    page = HEADS * TOKENS * CONTENT * 2
    memory = torch.arange(2 * BLOCKS * page, dtype=torch.int64).to(torch.uint8)
    attention = memory.view(torch.bfloat16).reshape(2, BLOCKS, HEADS, TOKENS, CONTENT)
    states = memory.view(torch.int8).reshape(2, BLOCKS, 1, 1, page)[..., :state_bytes]
    views = {f"layers.{2 * layer}.attn": attention[layer] for layer in range(2)}
    return memory, views | {f"layers.{2 * layer + 1}.mixer": states[layer] for layer in range(2)}


@pytest.mark.parametrize("copies", ["host", "runs"])
def test_overlapping_pages_give_a_block_every_byte_once(copies: str) -> None:
    memory, views = overlaid()
    layout = block_layout(views)
    page = HEADS * TOKENS * CONTENT * 2
    assert layout.block_bytes == 2 * page
    expected = memory.numpy().reshape(2, BLOCKS, page)[:, [4, 1]].swapaxes(0, 1).reshape(2, -1)
    rows = layout.pool(2)
    if copies == "host":
        layout.swap_out([4, 1], rows, [0, 1])
    else:
        runs = layout.runs([4, 1], rows, [0, 1])
        assert len(runs.sizes) == 2 * 2
        for source, target, size in zip(runs.cache.tolist(), runs.rows.tolist(), runs.sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)
    assert np.array_equal(rows, expected)
    layout.swap_in(rows, [0], [3])
    assert to_bytes(views["layers.3.mixer"][3]) == to_bytes(views["layers.3.mixer"][4])
    assert to_bytes(views["layers.2.attn"][3]) == to_bytes(views["layers.2.attn"][4])


def test_overlapping_layers_are_in_one_slice() -> None:
    _, views = overlaid()
    layout = block_layout(views, slices=2)
    assert layout.layers == [{"layers.0.attn", "layers.1.mixer"}, {"layers.2.attn", "layers.3.mixer"}]
    assert layout.description == block_layout(views).description == "2xbhnc(2x4x8)+2xbhnc(1x1x40)@2"
    assert layout.dtype == "bfloat16/int8"


def test_a_blocks_adjacent_pages_are_one_run() -> None:
    """With blocks outermost, pages of two groups have the same memory: a wide page and a narrow one in one group, and
    two others in the other."""
    import torch

    memory = torch.arange(BLOCKS * 96, dtype=torch.int64).to(torch.uint8).reshape(BLOCKS, 96)
    cuts = {"0.a": (0, 64), "1.a": (64, 80), "0.b": (0, 40), "1.b": (40, 96)}
    layout = block_layout({name: memory[:, first:end] for name, (first, end) in cuts.items()})
    assert layout.block_bytes == 96
    assert np.array_equal(swapped_out(layout, 5, 0), memory.numpy()[[5, 0]])
    runs = layout.runs([5], layout.pool(1), [0])
    assert runs.sizes.tolist() == [96]


def test_caches_that_share_memory_but_no_blocks_are_refused() -> None:
    import torch

    memory = torch.zeros(BLOCKS * 64, dtype=torch.uint8)
    wide, narrow = memory.reshape(BLOCKS, 64), memory[: BLOCKS * 32].reshape(BLOCKS, 32)
    with pytest.raises(ValueError, match=r"blocks are .* bytes apart; expected the same distance"):
        block_layout({"0": wide, "1": narrow})


def test_blocks_with_scattered_pages_are_refused() -> None:
    import torch

    memory = torch.zeros(2, BLOCKS, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT=LBHNC"):
        block_layout({"0": memory.permute(1, 0, 2), "1": memory[0, :, :32], "2": memory[1, :, 32:]})


def test_caches_without_heads_to_split_are_refused() -> None:
    import torch

    for shape in ((BLOCKS, TOKENS, CONTENT), (BLOCKS, 3, TOKENS, CONTENT)):
        with pytest.raises(ValueError, match=r"cannot be cut into 2 ranges of heads.*head_shards"):
            block_layout({"0": torch.zeros(shape)}, ranges=2)


def test_runs_of_pages_with_gaps_skip_the_gaps() -> None:
    import torch

    buffer = torch.arange(LAYERS * BLOCKS * HEADS * TOKENS * (CONTENT + 1), dtype=torch.int16)
    whole = buffer.reshape(LAYERS, BLOCKS, HEADS, TOKENS, CONTENT + 1)[..., :CONTENT]
    layout = block_layout({str(index): layer for index, layer in enumerate(whole)})
    rows = swapped_out(layout, 4)
    runs = layout.runs([4], layout.pool(1), [0])
    assert runs.sizes.tolist() == [CONTENT * 2] * (LAYERS * HEADS * TOKENS)
    assert b"".join(ctypes.string_at(run, CONTENT * 2) for run in runs.cache.tolist()) == rows.tobytes()


@pytest.mark.parametrize("block_id", [-1, BLOCKS])
def test_a_missing_block_or_slot_is_refused_before_any_byte_moves(block_id: int) -> None:
    tensors = caches("LBHNC")
    layout = block_layout(tensors)
    before = swapped_out(layout, *range(BLOCKS))
    pool = layout.pool(BLOCKS)
    pool[...] = 0xAB
    for ids, slots in (([0, block_id], [0, 1]), ([0, 1], [0, block_id])):
        for call in (
            lambda ids=ids, slots=slots: layout.swap_out(ids, pool, slots),
            lambda ids=ids, slots=slots: layout.swap_in(pool, slots, ids),
            lambda ids=ids, slots=slots: layout.runs(ids, pool, slots),
        ):
            with pytest.raises(IndexError, match=f"{block_id}.*nothing was copied"):
                call()
    assert (pool == 0xAB).all()
    assert np.array_equal(swapped_out(layout, *range(BLOCKS)), before)


def test_a_pool_with_other_rows_is_refused() -> None:
    layout = block_layout(caches("LBHNC"))
    wide = np.zeros((2, layout.block_bytes + 1), np.uint8)
    for pool in (wide, np.zeros((2, 2 * layout.block_bytes), np.uint8)[:, ::2]):
        for call in (layout.swap_out, layout.runs):
            with pytest.raises(ValueError, match=f"rows of {layout.block_bytes} bytes"):
                call([0], pool, [0])
    for call in (layout.swap_out, layout.runs):
        with pytest.raises(ValueError, match="slots"):
            call([0, 1], layout.pool(2), [0])


def test_an_empty_copy_is_no_error() -> None:
    layout = block_layout(caches("LBHNC"))
    pool = layout.pool(0)
    assert pool.shape == (0, layout.block_bytes)
    assert layout.swap_out([], pool, []).done()
    assert layout.swap_in(pool, [], []).done()
    assert all(len(array) == 0 for array in layout.runs([], pool, []))


def test_a_host_pools_pages_are_untouched_until_used() -> None:
    layout = block_layout(caches("LBHNC"))
    before = resident_bytes()
    pool = layout.pool((1 << 30) // layout.block_bytes)
    assert resident_bytes() - before < 64 << 20
    assert pool.nbytes > 1 << 29


def test_a_server_on_this_host_copies_from_a_shared_pool() -> None:
    from kvstore_client.memory import region_of

    tensors = caches("LBHNC")
    layout = block_layout(tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    pool = layout.pool(5, shared=True)
    assert pool.shape == (5, layout.block_bytes) and not pool.any()
    region = region_of(pool.ctypes.data, pool.nbytes)
    assert region is not None and region.nbytes == pool.nbytes
    layout.swap_out([4, 0], pool, [3, 1]).wait()
    layout.swap_in(pool, [3, 1], [1, 3]).wait()
    for name, tensor in tensors.items():
        assert equal(tensor[[1, 3]], before[name][[4, 0]])


def test_without_sharable_memory_the_pool_is_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvstore_client.memory

    def refused(*arguments: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(kvstore_client.memory.os, "memfd_create", refused)
    layout = block_layout(caches("LBHNC"))
    assert layout.pool(5, shared=True).shape == (5, layout.block_bytes)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_caches_on_other_devices_are_refused() -> None:
    import torch

    tensors = {"0": torch.empty((BLOCKS, HEADS, TOKENS, CONTENT), dtype=torch.bfloat16, device="meta")}
    with pytest.raises(ValueError, match="lies on meta"):
        block_layout(tensors)


def test_the_installed_vllm_has_the_functions_for_devices() -> None:
    from kvstore_client.vllm.connector.vllm_parts import batched_copy, host_register
    from kvstore_client.vllm.shared import releases

    def needed(function: object) -> list[str]:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return [parameter.name for parameter in parameters if parameter.default is parameter.empty]

    assert needed(batched_copy()) == ["src_ptrs", "dst_ptrs", "sizes"]
    assert "is_src_access_order_any" in inspect.signature(batched_copy()).parameters
    for functions in (host_register(), (releases._lock, releases._unlock)):
        assert [needed(function) for function in functions] == [["ptr", "num_bytes"], ["ptr"]]


def test_layers_are_stored_by_number_and_shared_caches_once() -> None:
    tensors = caches("LBHNC")
    shuffled = {name: tensors[name] for name in reversed(tensors)}
    shuffled["model.layers.12.attn"] = tensors["model.layers.11.attn"]
    layout = block_layout(shuffled)
    rows = swapped_out(layout, 2)
    for index, page in enumerate(rows.reshape(LAYERS, -1)):
        assert page.tobytes() == to_bytes(tensors[f"model.layers.{index}.attn"][2])


@ORDERS
@pytest.mark.parametrize("slices", [2, 4, 12])
def test_slices_are_a_blocks_layer_groups(order: str, slices: int) -> None:
    tensors = caches(order)
    layout, whole = block_layout(tensors, slices=slices), block_layout(tensors)
    assert layout.block_bytes == whole.block_bytes == slices * layout.slice_bytes
    assert layout.description == whole.description
    rows, by_runs = layout.pool(2 * slices), layout.pool(2 * slices)
    for part in reversed(range(slices)):
        layout.swap_out([5, 1], rows, [part, slices + part], part)
        runs = layout.runs([5, 1], by_runs, [part, slices + part], part)
        for source, target, size in zip(runs.cache, runs.rows, runs.sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(size))
    assert np.array_equal(rows.reshape(2, -1), swapped_out(whole, 5, 1))
    assert np.array_equal(rows, by_runs)
    layers = LAYERS // slices
    assert layout.layers == [
        {f"model.layers.{part * layers + index}.attn" for index in range(layers)} for part in range(slices)
    ]
    layout.swap_in(rows, [slices - 1], [0], slice_index=slices - 1)
    changed = [name for name, tensor in tensors.items() if equal(tensor[0], tensor[5])]
    assert set(changed) == layout.layers[-1]


def test_a_slice_waits_for_all_layers_that_share_its_caches() -> None:
    tensors = caches("LBHNC")
    tensors["model.layers.12.attn"] = tensors["model.layers.1.attn"]
    layout = block_layout(tensors, slices=6)
    assert layout.layers[0] == {"model.layers.0.attn", "model.layers.1.attn", "model.layers.12.attn"}


def test_kernel_blocks_smaller_than_blocks_are_combined() -> None:
    tensors = caches("LBHNC")
    whole = block_layout(tensors)
    halves = block_layout(tensors, BLOCKS // 2)
    assert halves.block_bytes == 2 * whole.block_bytes
    one, two = swapped_out(halves, 1), swapped_out(whole, 2, 3)
    page = whole.block_bytes // LAYERS
    assert np.array_equal(one.reshape(LAYERS, 2, page), two.reshape(2, LAYERS, page).swapaxes(0, 1))


def test_the_description_distinguishes_memory_orders() -> None:
    descriptions = {block_layout(caches(order)).description for order in ("LBHNC", "LBNHC")}
    assert len(descriptions) == 2


@ORDERS
@pytest.mark.parametrize("copies", ["host", "runs"])
def test_pages_of_different_sizes_are_copied_in_sequence(order: str, copies: str) -> None:
    """The layers of a draft model, or layers with another dtype, may have pages of another size."""
    import torch

    tensors = caches(order)
    tensors["model.layers.3.attn"] = torch.arange(BLOCKS * 24, dtype=torch.int16).reshape(BLOCKS, 1, 4, 6)
    layout = block_layout(tensors)
    rows = layout.pool(2)
    if copies == "host":
        layout.swap_out([4, 1], rows, [1, 0])
    else:
        runs = layout.runs([4, 1], rows, [1, 0])
        for source, target, size in zip(runs.cache.tolist(), runs.rows.tolist(), runs.sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)
    page, third = HEADS * TOKENS * CONTENT * 2, 48
    assert layout.block_bytes == (LAYERS - 1) * page + third
    assert rows[1, 3 * page : 3 * page + third].tobytes() == to_bytes(tensors["model.layers.3.attn"][4])
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    layout.swap_in(rows, [1], [0])
    assert all(equal(tensor[0], before[name][4]) for name, tensor in tensors.items())
    assert layout.dtype == "bfloat16/int16"
    with pytest.raises(ValueError, match=r"layer_parts is 2, but the layers of this model differ in their pages"):
        block_layout(tensors, slices=2)


def test_rows_for_pages_of_different_sizes_are_checked() -> None:
    tensors = caches("LBHNC")
    tensors["model.layers.3.attn"] = tensors["model.layers.4.attn"].repeat(1, 1, 1, 2)
    layout = block_layout(tensors)
    for call in (layout.swap_out, layout.runs):
        with pytest.raises(ValueError, match=f"rows of {layout.block_bytes} bytes"):
            call([0], np.zeros((2, layout.block_bytes + 1), np.uint8), [0])


def test_caches_of_a_wrong_type_are_named() -> None:
    import torch

    zeros = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT)
    wrong: list[tuple[Any, str]] = [
        ([zeros], "kv_caches is of type list; expected a dict"),
        (zeros, "kv_caches is of type Tensor; expected a dict"),
        ({"k": zeros, "v": zeros.numpy()}, "'v' is of type ndarray; expected a torch.Tensor"),
        ({"layers.0": [zeros, zeros]}, "'layers.0' is of type list; expected a torch.Tensor"),
    ]
    for given, said in wrong:
        with pytest.raises(TypeError, match=said):
            block_layout(given)
    with pytest.raises(ValueError, match="expected a first dimension that is a multiple"):
        block_layout({"layers.0": zeros}, BLOCKS - 1)
