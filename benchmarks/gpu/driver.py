"""Calls of the CUDA driver, which make the connector's copies if vLLM cannot make them.

Copies of paged caches need two things (`kvstore_client/engine/paged/device.py`): copies that are queued in one call,
and memory that is page-locked. `install` selects vLLM for both, or a `Driver` if vLLM is missing or its operators
cannot be used because they were built for another torch. The calls and their arguments are those of vLLM 0.32:
`cuMemcpyBatchAsync` with one set of attributes for all runs, and a registration without flags. If the driver lacks that
call or refuses it, each run is copied by a `cuMemcpyAsync`. `how` names the call that is used, for results.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

logger = logging.getLogger(__name__)

BATCHED: Final = "the CUDA driver, cuMemcpyBatchAsync"
EACH: Final = "the CUDA driver, one cuMemcpyAsync a run"

# CUresult
INVALID_VALUE: Final = 1
NOT_SUPPORTED: Final = 801
# CUmemcpySrcAccessOrder
IN_STREAM_ORDER: Final = 1
ANY_ORDER: Final = 3
# The handles of the legacy default stream, which accepts no batches.
LEGACY_STREAMS: Final = (0, 1)

_POINTER, _SIZE, _ADDRESS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64  # the last: CUdeviceptr
_BATCH: Final = [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE]
# The arguments of each call. All return a CUresult. The first of the two batched calls is that of CUDA 13. The second,
# of CUDA 12.8, also says which run it refused.
CALLS: Final[dict[str, list[Any]]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [_POINTER, ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [_POINTER, ctypes.c_int],
    "cuCtxPushCurrent_v2": [_POINTER],
    "cuCtxPopCurrent_v2": [_POINTER],
    "cuMemHostRegister_v2": [_POINTER, _SIZE, ctypes.c_uint],
    "cuMemHostUnregister": [_POINTER],
    "cuMemcpyAsync": [_ADDRESS, _ADDRESS, _SIZE, _POINTER],
    "cuMemcpyBatchAsync_v2": [*_BATCH, _POINTER],
    "cuMemcpyBatchAsync": [*_BATCH, _POINTER, _POINTER],
}
BATCHED_CALLS: Final = ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")


class Location(ctypes.Structure):
    """CUmemLocation. If all fields are zero, there is no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", Location),
        ("target_hint", Location),
        ("flags", ctypes.c_uint),
    )


class Copies(Protocol):
    """The code that makes the connector's copies."""

    how: str


@dataclass
class Vllm:
    """vLLM makes the copies."""

    how: str


class Driver:
    """Calls of libcuda for a process that uses devices through torch. It is thread-safe without a lock, because memory
    is unregistered by a finalizer, which may run within any other call. Raises RuntimeError if a call fails."""

    def __init__(self, library: Any = None) -> None:
        """library: libcuda, with every call of `CALLS`; the batched ones may be missing. If it is None, libcuda is
        loaded."""
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._calls = {}
        for name, arguments in CALLS.items():
            call = getattr(self._library, name, None) if name in BATCHED_CALLS else getattr(self._library, name)
            if call is not None:
                call.argtypes, call.restype = arguments, ctypes.c_int
                self._calls[name] = call
        self._batched = next((name for name in BATCHED_CALLS if name in self._calls), None)
        self.how = BATCHED if self._batched else EACH
        self._contexts: dict[int, ctypes.c_void_p] = {}  # the context of each device
        self._registered: dict[int, ctypes.c_void_p] = {}  # address -> the context where it is page-locked
        self._call("cuInit", 0)

    def copy_batch(self, src: Any, dst: Any, sizes: Any, /, *, is_src_access_order_any: bool = False) -> None:
        """Queue copies on the calling thread's current stream, as `BatchedCopy` describes."""
        if not len(sizes):
            return
        stream, batched = self._current_stream(), self._batched
        if batched is None or stream in LEGACY_STREAMS:
            self._copy_each(src, dst, sizes, stream)
            return
        attributes = Attributes(source_access_order=ANY_ORDER if is_src_access_order_any else IN_STREAM_ORDER)
        first, refused = ctypes.c_size_t(0), ctypes.c_size_t(0)  # the attributes are those of run 0 and all after it
        arguments = [
            *(dst.data_ptr(), src.data_ptr(), sizes.data_ptr(), len(sizes)),
            *(ctypes.byref(attributes), ctypes.byref(first), 1),
            *([ctypes.byref(refused)] if batched == "cuMemcpyBatchAsync" else []),
            stream,
        ]
        error = self._calls[batched](*arguments)
        if error in (INVALID_VALUE, NOT_SUPPORTED):  # the error came before any run was queued
            self._copy_each(src, dst, sizes, stream)  # raises if the runs are at fault
            self.how, self._batched = f"{EACH} ({batched} failed with error {error})", None
        elif error:
            raise _failure(batched, error)

    def _copy_each(self, src: Any, dst: Any, sizes: Any, stream: int) -> None:
        for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
            self._call("cuMemcpyAsync", target, source, size, stream)

    def host_register(self, address: int, size: int) -> bool:
        """Page-lock memory, as `host_register` does. If the driver refuses, warn and return False."""
        context = self._context(self._current_device())
        with self._in(context):
            if error := self._calls["cuMemHostRegister_v2"](address, size, 0):
                logger.warning("cuMemHostRegister_v2 failed with error %d of the CUDA driver", error)
                return False
        self._registered[address] = context
        return True

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`. Any thread may call it, even one that has not used a device and therefore has no
        context."""
        context = self._registered.pop(address, None) or self._context(self._current_device())
        with self._in(context):
            self._call("cuMemHostUnregister", address)

    def _context(self, device: int) -> ctypes.c_void_p:
        """Return the context that torch uses on this device."""
        if device not in self._contexts:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
            self._contexts[device] = context
        return self._contexts[device]

    @contextlib.contextmanager
    def _in(self, context: ctypes.c_void_p) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _current_stream(self) -> int:
        import torch

        stream: int = torch.cuda.current_stream().cuda_stream
        return stream

    def _current_device(self) -> int:
        import torch

        return torch.cuda.current_device()

    def _call(self, name: str, *arguments: Any) -> None:
        if error := self._calls[name](*arguments):
            raise _failure(name, error)


def _failure(call: str, error: int) -> RuntimeError:
    return RuntimeError(f"{call} failed with error {error} of the CUDA driver")


def why_not_vllm() -> str:
    """Return why vLLM cannot make the copies; empty if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns while it is imported
        try:
            import torch

            importlib.import_module("vllm._custom_ops")
            importlib.import_module("vllm.v1.kv_offload.cpu.host_register")
            if hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
                return ""
        except Exception as error:  # a broken installation may raise anything
            return f"vLLM cannot be used: {error}"
    return "vLLM cannot be used: it has no operator swap_blocks_batch"


def install() -> Copies:
    """Have vLLM make the connector's copies, or the driver if vLLM cannot. Return the object that makes them.

    Needs torch and a device. Layouts of the connector that are made after this call use it.
    """
    from kvstore_client.engine.paged import device

    if not why_not_vllm():
        from kvstore_client.vllm.connector.vllm_parts import make_device_copies

        make_device_copies()
        return Vllm(f"vLLM {importlib.import_module('vllm').__version__}")

    driver = Driver()
    device.batched_copy = lambda: driver.copy_batch
    device.host_register = lambda: (driver.host_register, driver.host_unregister)
    return driver


@contextlib.contextmanager
def installed() -> Iterator[Copies]:
    """Call `install`, and undo it at the end."""
    from kvstore_client.engine.paged import device

    before = device.batched_copy, device.host_register
    try:
        yield install()
    finally:
        device.batched_copy, device.host_register = before
