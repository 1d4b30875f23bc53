"""Imports of the parts of vLLM that are not its public interface and may move between versions. Tested with 0.32.

The parts are imported when first needed: vLLM takes seconds to import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch


class BatchedCopy(Protocol):
    """``src``, ``dst``, ``sizes``: int64 tensors in host memory; addresses and bytes. ``is_src_access_order_any``: the
    sources may be read before the stream comes to the copy, because nothing that is queued writes to them."""

    def __call__(
        self, src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, /, *, is_src_access_order_any: bool = False
    ) -> None: ...


def batched_copy() -> BatchedCopy:
    """The function that queues, on the current stream, copies of ``sizes[i]`` bytes from address ``src[i]`` to
    ``dst[i]`` for every i: in one call to the driver where possible (cuMemcpyBatchAsync, CUDA 12.8). Raises
    RuntimeError when this vLLM has no such function."""
    copy: BatchedCopy = _part("vllm._custom_ops", "swap_blocks_batch")
    return copy


def host_register() -> tuple[Callable[[int, int], bool], Callable[[int], None]]:
    """Two functions: one page-locks memory given as ``(address, bytes)`` and returns False, with a warning, if the
    system refuses; the other undoes that for an ``address``. Raises RuntimeError when this vLLM lacks them."""
    module = "vllm.v1.kv_offload.cpu.host_register"
    return _part(module, "host_register"), _part(module, "host_unregister")


def _part(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        version = importlib.import_module("vllm").__version__
        raise RuntimeError(
            f"kvstore: vLLM {version} has no {module}.{name}, which copies between GPU and CPU need. "
            "Install vLLM 0.32, with which kvstore is tested"
        ) from error
