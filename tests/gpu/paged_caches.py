"""Paged KV caches of every kind that vLLM makes, on any device, in memory whose every byte is known.

A `PagedCache` computes the place of each byte of a block itself (`places`), from the axes of a test's tensors and
without the code under test. So a test can check every byte that is copied, and every byte that must not change: other
blocks, gaps between pages, other rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore_client.engine.paged.layout import BlockLayout

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
Views = dict[str, torch.Tensor]

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 12, 6, 2, 4, 8
# The memory orders of layers, blocks, heads, tokens and content that vLLM's backends request.
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
# The value of each byte in rows and blocks that must not be written.
UNTOUCHED = 0xAB


def random_bytes(seed: int, count: int) -> Bytes:
    """Return random bytes; the same seed gives the same ones."""
    return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(count), dtype=np.uint8).copy()


class PagedCache:
    """The cache of some layers. ``memory``: all of its bytes, on its device."""

    def __init__(
        self,
        memory: torch.Tensor,
        views: Views,
        num_blocks: int = BLOCKS,
        *,
        ranges: int = 1,
        slices: int = 1,
        caches: Sequence[Sequence[str]] = (),
    ) -> None:
        """views: layer -> tensor. caches: groups of layers whose pages are in the same memory; empty: each layer has
        memory of its own. ranges, slices: as in `BlockLayout`."""
        self.memory = memory
        self.views = views
        self.num_blocks = num_blocks
        self.ranges = ranges
        self.slices = slices
        self._caches = caches or [[name] for name in views]
        self._on_device: dict[tuple[int, int], torch.Tensor] = {}  # block and part -> places

    def layout(self, kind: type[BlockLayout] = BlockLayout) -> BlockLayout:
        return kind(self.views, self.num_blocks, self.ranges, slices=self.slices)

    @property
    def block_bytes(self) -> int:
        return len(self.block_places(0))

    def places(self, block: int, part: int) -> Places:
        """Return the place in ``memory`` of each byte of this part of a block, in the order of a row."""
        layers = len(self._caches) // self.slices
        mine = self._caches[part * layers : (part + 1) * layers]
        found: list[Places] = []
        for heads in range(self.ranges):
            for names in mine:
                pages = [self._page(self.views[name].chunk(self.ranges, 1)[heads], block) for name in names]
                found.append(pages[0] if len(pages) == 1 else np.unique(np.concatenate(pages)))
        return np.concatenate(found)

    def block_places(self, block: int) -> Places:
        """Return the places of a block's bytes, for all of its parts."""
        return np.concatenate([self.places(block, part) for part in range(self.slices)])

    def _page(self, tensor: torch.Tensor, block: int) -> Places:
        """Return the places of a page's bytes: axis by axis, from the largest stride to the smallest, and one kernel
        block after another."""
        size, each = tensor.element_size(), tensor.shape[0] // self.num_blocks
        first = tensor.data_ptr() - self.memory.data_ptr()
        places = first + (block * each + np.arange(each)) * tensor.stride(0) * size
        for axis in sorted(range(1, tensor.ndim), key=lambda axis: -tensor.stride(axis)):
            places = (places[:, np.newaxis] + np.arange(tensor.shape[axis]) * tensor.stride(axis) * size).ravel()
        return (places[:, np.newaxis] + np.arange(size)).ravel()

    def bytes(self) -> Bytes:
        """Return a copy of the memory, after all queued work is done."""
        if self.memory.is_cuda:
            torch.cuda.synchronize()
        return self.memory.cpu().numpy().copy()

    def blocks(self) -> Bytes:
        """Return the bytes of each block, a row each."""
        everything = self.bytes()
        return np.stack([everything[self.block_places(block)] for block in range(self.num_blocks)])

    def upload(self, rows: Bytes) -> torch.Tensor:
        """Copy rows of blocks to the device, for `put`, which then waits for nothing."""
        for block, part in itertools.product(range(self.num_blocks), range(self.slices)):
            if (block, part) not in self._on_device:
                places = torch.from_numpy(self.places(block, part))
                self._on_device[block, part] = places.to(self.memory.device)
        return torch.from_numpy(rows.copy()).to(self.memory.device)

    def put(self, block: int, row: torch.Tensor, part: int | None = None) -> None:
        """Write a block, or a part of it, on the current stream, as a model does. row: a row of `upload`."""
        for each in range(self.slices) if part is None else [part]:
            self.memory[self._on_device[block, each]] = row.reshape(self.slices, -1)[each]


def _known(device: str, count: int) -> torch.Tensor:
    return torch.from_numpy(random_bytes(count, count)).to(device)


def ordered(
    device: str,
    order: str = "LBHNC",
    dtype: torch.dtype = torch.bfloat16,
    *,
    kernel_blocks: int = 1,
    gap: int = 0,
    num_blocks: int = BLOCKS,
    layers: int = LAYERS,
    heads: int = HEADS,
    tokens: int = TOKENS,
    content: int = CONTENT,
    **how: Any,
) -> PagedCache:
    """Return layers of logical shape (blocks, heads, tokens, content) in one memory with this physical order.
    kernel_blocks: the number of kernel blocks in a block. gap: the elements after each token's content that belong to
    no block."""
    axes = {"L": layers, "B": num_blocks * kernel_blocks, "H": heads, "N": tokens, "C": content + gap}
    memory = _known(device, math.prod(axes.values()) * dtype.itemsize)
    whole = memory.view(dtype).reshape([axes[axis] for axis in order])[..., :content]
    whole = whole.permute([order.index(axis) for axis in "LBHNC"])
    return PagedCache(
        memory, {f"model.layers.{layer}.attn": whole[layer] for layer in range(layers)}, num_blocks, **how
    )


def latents(device: str, **how: Any) -> PagedCache:
    """MLA: no heads."""
    memory = _known(device, LAYERS * BLOCKS * TOKENS * CONTENT * 2)
    whole = memory.view(torch.bfloat16).reshape(LAYERS, BLOCKS, TOKENS, CONTENT)
    return PagedCache(memory, {f"layers.{layer}": whole[layer] for layer in range(LAYERS)}, **how)


def with_a_draft(device: str) -> PagedCache:
    """Return a cache in which one layer has smaller pages and another dtype."""
    page = HEADS * TOKENS * CONTENT * 2
    memory = _known(device, 2 * BLOCKS * page + BLOCKS * 48)
    target = memory[: 2 * BLOCKS * page].view(torch.bfloat16).reshape(2, BLOCKS, HEADS, TOKENS, CONTENT)
    draft = memory[2 * BLOCKS * page :].view(torch.int16).reshape(BLOCKS, 1, 4, 6)
    return PagedCache(memory, {"layers.0": target[0], "layers.1": target[1], "layers.2": draft})


def over_each_other(device: str, state_bytes: int = 40, num_blocks: int = BLOCKS, **how: Any) -> PagedCache:
    """Return two groups of two layers each: pages of attention, and of states that are smaller, in the same memory."""
    page = HEADS * TOKENS * CONTENT * 2
    memory = _known(device, 2 * num_blocks * page)
    attention = memory.view(torch.bfloat16).reshape(2, num_blocks, HEADS, TOKENS, CONTENT)
    states = memory.view(torch.int8).reshape(2, num_blocks, 1, 1, page)[..., :state_bytes]
    views = {f"layers.{2 * layer}.attn": attention[layer] for layer in range(2)}
    views |= {f"layers.{2 * layer + 1}.mixer": states[layer] for layer in range(2)}
    caches = [[f"layers.{2 * layer}.attn", f"layers.{2 * layer + 1}.mixer"] for layer in range(2)]
    return PagedCache(memory, views, num_blocks, caches=caches, **how)


def side_by_side(device: str) -> PagedCache:
    """Return a block-outermost cache of two groups: one has a wide page and a narrow one, the other has two pages in
    the same memory."""
    memory = _known(device, BLOCKS * 96)
    rows = memory.reshape(BLOCKS, 96)
    cuts = {"0.a": (0, 64), "0.b": (0, 40), "1.a": (64, 80), "1.b": (40, 96)}
    return PagedCache(memory, {name: rows[:, first:end] for name, (first, end) in cuts.items()}, caches=[list(cuts)])


def shared_by_layers(device: str) -> PagedCache:
    """Return a cache whose last layer shares the memory of the first one."""
    cache = ordered(device, layers=4)
    first, *others = cache.views
    views = {**cache.views, "model.layers.4.attn": cache.views[first]}
    return PagedCache(cache.memory, views, caches=[[first], *([name] for name in others)])


def one_model(device: str, num_blocks: int = 8, **how: Any) -> PagedCache:
    """Return a cache with the pages of Qwen2.5-7B: 896 KiB per block."""
    return ordered(device, layers=28, heads=4, tokens=16, content=256, num_blocks=num_blocks, **how)


Make = Callable[[str], PagedCache]

# Each function takes a device.
CACHES: dict[str, Make] = {
    **{order: partial(ordered, order=order) for order in ORDERS},
    **{f"{order} in ranges": partial(ordered, order=order, ranges=2) for order in ORDERS},
    **{f"{order} in parts": partial(ordered, order=order, slices=4) for order in ORDERS},
    **{f"{order} in ranges and parts": partial(ordered, order=order, ranges=2, slices=6) for order in ORDERS},
    **{f"{order} with gaps": partial(ordered, order=order, gap=3, slices=2) for order in ("LBHNC", "BHLNC")},
    **{
        f"{order} of {count} kernel blocks": partial(ordered, order=order, kernel_blocks=count, num_blocks=3)
        for order in ("LBHNC", "LHBNC", "BLNHC")
        for count in (2, 4)
    },
    **{
        str(dtype).removeprefix("torch."): partial(ordered, order="LBNHC", dtype=dtype)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.float16, torch.float32)
    },
    "fp8 in ranges and parts": partial(ordered, order="LBNHC", dtype=torch.float8_e4m3fn, ranges=2, slices=3),
    "latents": latents,
    "latents in parts": partial(latents, slices=3),
    "with a draft": with_a_draft,
    "states over attention": over_each_other,
    "states over attention in parts": partial(over_each_other, slices=2),
    "attention under larger states": partial(over_each_other, state_bytes=128),
    "groups side by side": side_by_side,
    "shared by layers": shared_by_layers,
    "one model": one_model,
}
