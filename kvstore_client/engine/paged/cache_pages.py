"""Finds out how the pages of the engine's KV cache lie in memory, and which layers' pages overlay each other.

vLLM keeps all layers in one allocation. Groups of layers overlay each other there, because a block belongs to only one
group at a time. The pages of different groups may have different content. A page of a layer with a state has all of the
layer's states. A page of an attention layer has the keys and values of a block's tokens. The smaller page is padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvstore_client.engine.paged.device import Addresses


def check_caches(kv_caches: Mapping[str, torch.Tensor]) -> None:
    """Raise TypeError if these are not tensors by layer name."""
    if not isinstance(kv_caches, Mapping):
        raise TypeError(
            f"kvstore: kv_caches is of type {type(kv_caches).__name__}; expected a dict from the name of each layer to "
            'its tensor, such as {"layers.0.k": k, "layers.0.v": v}'
        )
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"kvstore: the KV cache {name!r} is of type {type(tensor).__name__}; expected a torch.Tensor "
                "(torch.from_numpy makes one in an array's memory)"
            )


def kind(tensor: torch.Tensor) -> str:
    """Return a description of a layer's page: the order of its axes in memory, and their sizes."""
    order = "".join("bhnc"[axis] for axis in memory_order(tensor)) if tensor.ndim == 4 else "raw"
    return f"{order}({'x'.join(str(size) for size in tensor.shape[1:])})"


def pages_of_bytes(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a view of the tensor's bytes with shape (num_blocks, ...). The inner axes are in memory order, and a dense
    page has one axis. Raises ValueError for a tensor whose bytes cannot be viewed in this way."""
    if tensor.shape[0] % num_blocks:
        raise ValueError(
            f"kvstore: a KV cache tensor has shape {tuple(tensor.shape)}; "
            f"expected a first dimension that is a multiple of {num_blocks}, the number of blocks"
        )
    ordered = tensor.permute(memory_order(tensor))
    if ordered.stride(-1) != 1:
        raise ValueError(
            f"kvstore: a KV cache tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
            "has no contiguous axis, so its bytes cannot be viewed"
        )
    pages = ordered.view(torch.uint8)
    if tensor.shape[0] != num_blocks:
        pages = pages.unflatten(0, (num_blocks, -1))
    try:
        return pages.view(num_blocks, -1)
    except RuntimeError:  # there are gaps, or the axis of heads is outside that of blocks; copies follow the axes
        return pages


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the block axis, then the axes of size 1, whose strides do not matter, and then the other axes. The latter
    are ordered from the largest stride to the smallest."""
    inner = sorted(range(1, tensor.ndim), key=lambda axis: (tensor.shape[axis] > 1, -tensor.stride(axis), axis))
    return [0, *inner]


def dense_runs(page: torch.Tensor) -> tuple[Addresses, int]:
    """Return the offsets at which the dense runs of one page of bytes start, and the size of a run. All runs have the
    same size."""
    axes: list[tuple[int, int]] = []  # (size, stride) of each axis, the innermost last
    for size, stride in zip(page.shape[1:], page.stride()[1:], strict=True):
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        elif size > 1:
            axes.append((size, stride))
    run = axes.pop()[0] if axes and axes[-1][1] == 1 else 1
    starts = np.zeros(1, dtype=np.int64)
    for size, stride in axes:
        starts = (starts[:, np.newaxis] + np.arange(size) * stride).ravel()
    return starts, run


class _Span(NamedTuple):
    """A dense run of bytes of block 0, from address `first` to `end`. `stride` is the distance to the same run of the
    next block, and `view` is the number of the view that has the run."""

    first: int
    end: int
    stride: int
    view: int


def merged_caches(views: Sequence[torch.Tensor], num_blocks: int) -> tuple[list[torch.Tensor], list[int]]:
    """Return caches that do not overlap, in the order of their first views, and for each view the number of its cache.
    A view that shares no byte with others is a cache of its own. Views that share bytes become one tensor with all
    bytes that any of them covers. Raises ValueError if these bytes are not contiguous."""
    if len({(view.shape, view.stride(), view.dtype) for view in views}) == 1:  # alike, so no two views share a byte
        return list(views), list(range(len(views)))
    spans = []
    for number, view in enumerate(views):
        page = pages_of_bytes(view, num_blocks)
        starts, size = dense_runs(page)
        firsts = [page.data_ptr() + int(start) for start in starts]
        spans += [_Span(first, first + size, page.stride(0), number) for first in firsts]
    joined: list[_Span] = []  # `view` is the first view of those that are joined
    first_view = list(range(len(views)))

    def root(view: int) -> int:
        while first_view[view] != view:
            view = first_view[view]
        return view

    for span in sorted(spans):
        if not joined or span.first >= joined[-1].end:
            joined.append(span)
            continue
        last = joined[-1]
        if span.stride != last.stride:
            raise ValueError(
                f"kvstore: the KV caches of two layers share memory, but their blocks are {last.stride} and "
                f"{span.stride} bytes apart; expected the same distance. Run this model without kvstore"
            )
        one, other = sorted((root(last.view), root(span.view)))
        first_view[other] = one
        joined[-1] = last._replace(end=max(last.end, span.end))
    roots = [root(view) for view in range(len(views))]
    caches = sorted(set(roots))
    tensors = []
    for cache in caches:
        if roots.count(cache) == 1:
            tensors.append(views[cache])
            continue
        covered = [span for span in joined if root(span.view) == cache]
        if len(covered) > 1:
            raise ValueError(
                "kvstore: layers of different kinds share memory of the KV cache, and the pages of a block are not "
                "contiguous. Set VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        tensors.append(_bytes_of(views[cache], covered[0], num_blocks))
    return tensors, [caches.index(root) for root in roots]


def _bytes_of(view: torch.Tensor, span: _Span, num_blocks: int) -> torch.Tensor:
    """Return these bytes of all blocks as a tensor of shape (num_blocks, size) in the memory of `view`."""
    memory = view.untyped_storage()
    everything = torch.empty(0, dtype=torch.uint8, device=view.device).set_(memory)
    return everything.as_strided((num_blocks, span.end - span.first), (span.stride, 1), span.first - memory.data_ptr())
