"""Blocks of bytes out of KV cache tensors of every memory order vLLM has, and back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    import torch

    from kvstore_client.vllm.layout import BlockLayout

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 12, 6, 2, 4, 8
AXES = dict(zip("LBHNC", (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT), strict=True))


def caches(order: str) -> dict[str, torch.Tensor]:
    """Layers of logical shape (B, H, N, C) in one buffer of this physical order, every element different."""
    import torch

    buffer = torch.arange(math.prod(AXES.values()), dtype=torch.int16).view(torch.bfloat16)
    whole = buffer.reshape([AXES[axis] for axis in order]).permute([order.index(axis) for axis in "LBHNC"])
    return {f"model.layers.{index}.attn": whole[index] for index in range(LAYERS)}


def block_layout(tensors: dict[str, torch.Tensor], num_blocks: int = BLOCKS) -> BlockLayout:
    from kvstore_client.vllm.layout import BlockLayout  # with torch: only when these tests run

    return BlockLayout(tensors, num_blocks)


def to_bytes(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit: some patterns are not numbers."""
    return to_bytes(one) == to_bytes(other)


@pytest.mark.parametrize("on_device", [False, True], ids=["host copies", "device copies"])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_a_block_comes_back_where_it_is_put(order: str, on_device: bool) -> None:
    tensors = caches(order)
    layout = block_layout(tensors)
    if on_device:
        layout._arrays = None  # take the way of tensors that have no host memory
    assert layout.block_bytes == LAYERS * HEADS * TOKENS * CONTENT * 2
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    rows = layout.staging(3)
    layout.gather([4, 0, 2], rows)
    layout.scatter(rows[:2], [1, 3])
    for name, tensor in tensors.items():
        assert equal(tensor[1], before[name][4])
        assert equal(tensor[3], before[name][0])
        for untouched in (0, 2, 4, 5):
            assert equal(tensor[untouched], before[name][untouched])


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BHLNC"])
def test_both_ways_of_copying_store_the_same_bytes(order: str) -> None:
    layout = block_layout(caches(order))
    host, device = layout.staging(2), layout.staging(2)
    layout.gather([5, 1], host)
    layout._arrays = None
    layout.gather([5, 1], device)
    assert np.array_equal(host, device)


def test_layers_are_stored_by_number_and_shared_caches_once() -> None:
    tensors = caches("LBHNC")
    shuffled = {name: tensors[name] for name in reversed(tensors)}
    shuffled["model.layers.12.attn"] = tensors["model.layers.11.attn"]
    layout = block_layout(shuffled)
    rows = layout.staging(1)
    layout.gather([2], rows)
    for index, page in enumerate(rows.reshape(LAYERS, -1)):
        assert page.tobytes() == to_bytes(tensors[f"model.layers.{index}.attn"][2])


def test_kernel_blocks_smaller_than_blocks_are_put_together() -> None:
    tensors = caches("LBHNC")
    whole = block_layout(tensors)
    halves = block_layout(tensors, BLOCKS // 2)
    assert halves.block_bytes == 2 * whole.block_bytes
    one, two = halves.staging(1), whole.staging(2)
    halves.gather([1], one)
    whole.gather([2, 3], two)
    page = whole.block_bytes // LAYERS
    assert np.array_equal(one.reshape(LAYERS, 2, page), two.reshape(2, LAYERS, page).swapaxes(0, 1))


def test_the_description_tells_memory_orders_apart() -> None:
    descriptions = {block_layout(caches(order)).description for order in ("LBHNC", "LBNHC")}
    assert len(descriptions) == 2


def test_pages_of_different_shapes_are_refused() -> None:
    tensors = caches("LBHNC")
    tensors["model.layers.3.attn"] = tensors["model.layers.4.attn"].repeat(1, 1, 1, 2)
    with pytest.raises(ValueError, match="differ in shape"):
        block_layout(tensors)
