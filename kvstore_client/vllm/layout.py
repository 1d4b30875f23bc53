"""The engine's paged KV cache, seen as blocks of bytes.

vLLM hands every layer's cache over as a tensor of logical shape (num_blocks, heads, tokens, content), where content
is K and V together, with whatever strides the attention backend asked for; a backend with small kernel blocks hands
over (num_blocks * r, ...). The content is the backend's own (the CPU backend stores K in tiles of the instruction
set), so a block here is opaque: for every layer, in layer order, the page's bytes in the order they have in memory.
That order makes the copies long; ``description`` records it, because it is part of what must agree before two
engines may share blocks.

Host tensors are copied by ``kvstore._cext`` straight between the paged tensors and the staging rows: one copy. For
device tensors ``index_select`` collects a chunk on the device and one transfer moves it: two copies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstore import _cext

Rows = npt.NDArray[np.uint8]


class BlockLayout:
    """Copies whole blocks between KV cache tensors and rows of ``block_bytes`` bytes.

    The tensors belong to the engine and live as long as it does. Copies run in the calling thread; the caller
    orders them with the model's own reads and writes (for device tensors: the current stream).
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """kv_caches: layer name -> tensor, as given to ``register_kv_caches``. Layers that share one cache appear
        once in a block. Raises ValueError when the pages of the layers have different shapes."""
        distinct: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        for name in sorted(kv_caches, key=_layer_order):
            tensor = kv_caches[name]
            distinct.setdefault((tensor.data_ptr(), tensor.stride()), tensor)
        tensors = list(distinct.values())
        if not tensors:
            raise ValueError("kvstore: the engine registered no KV cache, there is nothing to store")

        self.num_blocks = num_blocks
        self._pages = [_pages_of_bytes(tensor, num_blocks) for tensor in tensors]
        shapes = {tuple(page.shape[1:]) for page in self._pages}
        if len(shapes) > 1:
            raise ValueError(
                f"kvstore: the layers' KV cache pages differ in shape ({sorted(shapes)}); "
                "only models whose layers all have the same page are supported"
            )
        self._page_shape = shapes.pop()
        self._page_bytes = int(np.prod(self._page_shape))
        self._device = tensors[0].device
        # A host tensor and its array share memory, so scatter writes where the engine reads.
        self._arrays = [page.numpy() for page in self._pages] if self._device.type == "cpu" else None

        self.block_bytes = self._page_bytes * len(self._pages)
        self.dtype = str(tensors[0].dtype).removeprefix("torch.")
        order = "".join("bhnc"[axis] for axis in _memory_order(tensors[0])) if tensors[0].ndim == 4 else "raw"
        inner = "x".join(str(size) for size in tensors[0].shape[1:])
        self.description = f"{len(self._pages)}x{order}({inner})"

    def staging(self, rows: int) -> Rows:
        """Uninitialized host memory for ``rows`` blocks, pinned when the cache lies on a device."""
        pinned = self._device.type == "cuda"
        staging: Rows = torch.empty((rows, self.block_bytes), dtype=torch.uint8, pin_memory=pinned).numpy()
        return staging

    def gather(self, block_ids: Sequence[int], rows: Rows) -> None:
        """Copy the blocks out of the cache: ``rows[i]`` becomes block ``block_ids[i]``. rows: (n, block_bytes)."""
        if self._arrays is not None:
            _cext.gather(self._arrays, np.asarray(block_ids, dtype=np.int64), rows)
            return
        ids = torch.as_tensor(block_ids, dtype=torch.int64, device=self._device)
        picked = torch.stack([page.index_select(0, ids) for page in self._pages], dim=1)
        torch.from_numpy(rows).copy_(picked.reshape(len(block_ids), self.block_bytes))

    def scatter(self, rows: Rows, block_ids: Sequence[int]) -> None:
        """Copy blocks into the cache: block ``block_ids[i]`` becomes ``rows[i]``. rows: (n, block_bytes)."""
        if self._arrays is not None:
            _cext.scatter(rows, self._arrays, np.asarray(block_ids, dtype=np.int64))
            return
        ids = torch.as_tensor(block_ids, dtype=torch.int64, device=self._device)
        moved = torch.from_numpy(rows).to(self._device)
        for index, page in enumerate(self._pages):
            first = index * self._page_bytes
            part = moved[:, first : first + self._page_bytes]
            page.index_copy_(0, ids, part.reshape(len(block_ids), *self._page_shape))


def _layer_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layer 10 after layer 9: digits compare as numbers."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name) if part]


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """The block axis, then the others from the largest stride to the smallest."""
    inner = sorted(range(1, tensor.ndim), key=lambda axis: (-tensor.stride(axis), axis))
    return [0, *inner]


def _pages_of_bytes(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A view (num_blocks, ...) of bytes, inner axes in memory order; a dense page becomes one axis."""
    if tensor.shape[0] % num_blocks:
        raise ValueError(
            f"kvstore: a KV cache tensor has shape {tuple(tensor.shape)}, "
            f"which does not divide into {num_blocks} blocks"
        )
    ordered = tensor.permute(_memory_order(tensor))
    if ordered.stride(-1) != 1:
        raise ValueError(
            f"kvstore: a KV cache tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
            "has no contiguous axis, its bytes cannot be viewed"
        )
    pages = ordered.view(torch.uint8)
    if tensor.shape[0] != num_blocks:
        pages = pages.unflatten(0, (num_blocks, -1))
    try:
        return pages.view(num_blocks, -1)
    except RuntimeError:  # strides with gaps, or heads outside blocks: the copies walk the axes
        return pages
