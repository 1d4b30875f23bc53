"""Imports of the parts of vLLM that are not its public interface and may move between versions. Tested with 0.32.

The parts are imported when first needed: vLLM takes seconds to import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kvstore_client.engine.paged import device
from kvstore_client.engine.paged.device import BatchedCopy


def batched_copy() -> BatchedCopy:
    """See `device`. Raises RuntimeError when this vLLM has no such function."""
    copy: BatchedCopy = _part("vllm._custom_ops", "swap_blocks_batch")
    return copy


def host_register() -> tuple[Callable[[int, int], bool], Callable[[int], None]]:
    """See `device`. Raises RuntimeError when this vLLM lacks them."""
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


def make_device_copies() -> None:
    """Have vLLM's functions make the copies from and to devices."""
    device.batched_copy, device.host_register = batched_copy, host_register
