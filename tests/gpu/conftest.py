"""What the tests of a CUDA device need. Without a device they are skipped, but not by `make gpu-test`."""

from __future__ import annotations

import ctypes
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def why_not() -> str:
    """Why no device can be used; empty if one can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about itself while it is imported
        import torch
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM, the driver is called directly for what vLLM does for the connector."""
    if reason := why_not():
        pytest.skip(reason)
    if importlib.util.find_spec("vllm") is None:
        from kvstore_client.vllm.connector import device

        cuda = Driver()
        monkeypatch.setattr(device, "batched_copy", lambda: cuda.copy_batch)
        monkeypatch.setattr(device, "host_register", lambda: (cuda.host_register, cuda.host_unregister))


class Driver:
    """Calls of libcuda, in the context that torch made current."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def copy_batch(
        self, src: Sequence[Any], dst: Sequence[Any], sizes: Sequence[Any], is_src_access_order_any: bool = False
    ) -> None:
        """As vLLM's ``swap_blocks_batch``, one copy a call."""
        import torch

        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for source, target, size in zip(src, dst, sizes, strict=True):
            self._call(
                "cuMemcpyAsync",
                ctypes.c_uint64(int(target)),
                ctypes.c_uint64(int(source)),
                ctypes.c_size_t(int(size)),
                stream,
            )

    def host_register(self, address: int, size: int) -> bool:
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(0))
        return True

    def host_unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def _call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} failed with error {error} of the CUDA driver")
