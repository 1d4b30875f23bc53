"""Imports from vLLM modules that are not part of its public interface and may move between versions.

The modules are imported when they are first needed, because importing vLLM takes seconds.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvstore_client.engine.paged import device
from kvstore_client.engine.paged.device import BatchedCopy
from kvstore_client.vllm.shared.releases import host_register


def batched_copy() -> BatchedCopy:
    """Return the function that `device` describes. Raises RuntimeError if this vLLM has no such function."""
    copy: BatchedCopy = _part("vllm._custom_ops", "swap_blocks_batch")
    return copy


def _part(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        version = importlib.import_module("vllm").__version__
        raise RuntimeError(
            f"kvstore: vLLM {version} has no {module}.{name}, which copies between GPU and CPU need. "
            "Install one of vLLM 0.28 to 0.33, with which kvstore is tested"
        ) from error


def make_device_copies() -> None:
    """Use vLLM's functions for the copies from and to devices."""
    device.batched_copy, device.host_register = batched_copy, host_register
