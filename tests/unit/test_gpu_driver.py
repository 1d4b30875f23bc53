"""The calls of the CUDA driver that replace vLLM's, tested with a library that records its arguments.

The library's functions are C functions with the signatures of cuda.h (CUDA 12.8 and 13.0), which are repeated here. So
their arguments pass through the C calling convention, as for libcuda.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from collections.abc import Callable, Sequence
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.driver import BATCHED, EACH, Attributes, Driver

BATCH = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t)
SIGNATURES: dict[str, Sequence[Any]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyBatchAsync_v2": (*BATCH, c_void_p),
    "cuMemcpyBatchAsync": (*BATCH, c_void_p, c_void_p),
}
ONE, BOTH = ["cuMemcpyBatchAsync"], ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"]
STREAM, LEGACY, CONTEXT = 0x7F00_1234_5678, 0, 0x5500_0000_0010
# Addresses that need all 64 bits, and sizes of more than 4 GiB.
SOURCES = [0x7FFF_FFFF_F000, 0xFFFF_8000_0000_1000, 0x1000]
TARGETS = [0xFEDC_BA98_7654_3000, 0x2000, 0x7F12_3456_7000]
SIZES = [1, 5 << 32, 4096]


class Library:
    """Those functions of libcuda that our code calls."""

    def __init__(self, batched: Sequence[str]) -> None:
        self.errors: dict[str, int] = {}  # call -> the error that it returns
        self.calls: list[tuple[Any, ...]] = []
        self.current: list[int] = []  # the contexts of the calling thread
        for name, arguments in SIGNATURES.items():
            if not name.startswith("cuMemcpyBatch") or name in batched:
                setattr(self, name, ctypes.CFUNCTYPE(c_int, *arguments)(self._noting(name)))

    def _noting(self, name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            if name.startswith("cuMemcpyBatch"):
                given = self._batch(*given)
            elif name in ("cuDeviceGet", "cuDevicePrimaryCtxRetain"):
                kind, value = (c_int, 70 + given[1]) if name == "cuDeviceGet" else (c_uint64, CONTEXT + given[1])
                kind.from_address(given[0]).value = value
            elif name == "cuCtxPushCurrent_v2":
                self.current.append(given[0])
            elif name == "cuCtxPopCurrent_v2":
                c_uint64.from_address(given[0]).value = self.current.pop()
                given = ()
            elif name.startswith("cuMemHost"):
                given = (*given, self.current[-1])
            self.calls.append((name, *given))
            return self.errors.get(name, 0)

        return call

    def _batch(self, *given: Any) -> tuple[Any, ...]:
        targets, sources, sizes, count, attributes, firsts, kinds, *rest = given
        arrays = [(c_uint64 * count).from_address(each)[:] for each in (sources, targets, sizes)]
        if len(rest) == 2:
            c_size_t.from_address(rest[0]).value = 1  # it is writable
        return (*arrays, ctypes.string_at(attributes, 24 * kinds), (c_size_t * kinds).from_address(firsts)[:], rest[-1])

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


class Numbers:
    """A tensor of int64 in host memory, with the methods that the driver uses."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._array = np.array(numbers, dtype=np.uint64).view(np.int64)

    def __len__(self) -> int:
        return len(self._array)

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def tolist(self) -> list[int]:
        return self._array.tolist()


class OnStream(Driver):
    """A `Driver` whose current stream the test sets."""

    stream = STREAM

    def _current_stream(self) -> int:
        return self.stream

    def _current_device(self) -> int:
        return 3


def copied(driver: Driver, **how: bool) -> None:
    driver.copy_batch(Numbers(SOURCES), Numbers(TARGETS), Numbers(SIZES), **how)


@pytest.mark.parametrize("names", [ONE, BOTH], ids=["12.8", "13.0"])
@pytest.mark.parametrize(("any_order", "order"), [(False, 1), (True, 3)])
def test_a_copy_is_one_call_with_all_its_runs(names: list[str], any_order: bool, order: int) -> None:
    library = Library(names)
    driver = OnStream(library)
    assert driver.how == BATCHED
    copied(driver, is_src_access_order_any=any_order)
    attributes = struct.pack("=iiiiiI", order, 0, 0, 0, 0, 0)
    assert library.named(names[-1]) == [(SOURCES, TARGETS, SIZES, attributes, [0], STREAM)]
    assert {call[0] for call in library.calls} == {"cuInit", names[-1]}


def test_the_stream_order_is_kept_unless_another_is_requested() -> None:
    library = Library(BOTH)
    copied(OnStream(library))
    assert library.calls[-1][4][:4] == struct.pack("=i", 1)


def test_the_attributes_have_the_layout_of_the_header() -> None:
    """{enum srcAccessOrder; {enum type; int id} srcLocHint, dstLocHint; unsigned flags}"""
    assert ctypes.sizeof(Attributes) == 24
    places = [getattr(Attributes, field[0]) for field in Attributes._fields_]
    assert [(place.offset, place.size) for place in places] == [(0, 4), (4, 8), (12, 8), (20, 4)]


def expected_runs(stream: int) -> list[tuple[int, ...]]:
    targets = [number & (1 << 64) - 1 for number in TARGETS]
    return [(*run, stream) for run in zip(targets, SOURCES, SIZES, strict=True)]


def test_without_batch_support_each_run_is_a_call() -> None:
    library = Library([])
    driver = OnStream(library)
    assert driver.how == EACH
    copied(driver)
    assert library.named("cuMemcpyAsync") == expected_runs(STREAM)


@pytest.mark.parametrize("error", [1, 801], ids=["invalid value", "not supported"])
def test_after_a_refused_batch_each_run_is_a_call(error: int) -> None:
    library = Library(BOTH)
    driver = OnStream(library)
    library.errors["cuMemcpyBatchAsync_v2"] = error
    copied(driver)
    copied(driver)
    assert library.named("cuMemcpyAsync") == expected_runs(STREAM) * 2
    assert len(library.named("cuMemcpyBatchAsync_v2")) == 1
    assert driver.how == f"{EACH} (cuMemcpyBatchAsync_v2 failed with error {error})"


def test_wrong_runs_are_an_error_and_do_not_disable_batches() -> None:
    library = Library(BOTH)
    driver = OnStream(library)
    library.errors |= {"cuMemcpyBatchAsync_v2": 1, "cuMemcpyAsync": 1}
    with pytest.raises(RuntimeError, match="cuMemcpyAsync failed with error 1 of the CUDA driver"):
        copied(driver)
    library.errors.clear()
    copied(driver)
    assert driver.how == BATCHED
    assert len(library.named("cuMemcpyBatchAsync_v2")) == 2


@pytest.mark.parametrize("names", [ONE, BOTH], ids=["12.8", "13.0"])
def test_a_failed_call_is_named_with_its_error(names: list[str]) -> None:
    library = Library(names)
    driver = OnStream(library)
    library.errors[names[-1]] = 700
    with pytest.raises(RuntimeError, match=rf"^{names[-1]} failed with error 700 of the CUDA driver$"):
        copied(driver)
    assert not library.named("cuMemcpyAsync") and driver.how == BATCHED


def test_the_legacy_default_stream_uses_no_batches() -> None:
    library = Library(BOTH)
    driver = OnStream(library)
    driver.stream = LEGACY
    copied(driver)
    assert [run[:3] for run in library.named("cuMemcpyAsync")] == [run[:3] for run in expected_runs(LEGACY)]
    assert driver.how == BATCHED


def test_an_empty_copy_makes_no_call() -> None:
    library = Library(BOTH)
    OnStream(library).copy_batch(Numbers([]), Numbers([]), Numbers([]))
    assert [call[0] for call in library.calls] == ["cuInit"]


def test_memory_is_locked_and_unlocked_in_its_devices_context() -> None:
    """A thread without a context can also unlock the memory, as in a finalizer."""
    library = Library(BOTH)
    driver = OnStream(library)
    assert driver.host_register(SOURCES[1], SIZES[1])
    thread = threading.Thread(target=driver.host_unregister, args=[SOURCES[1]])
    thread.start()
    thread.join()
    context = CONTEXT + 73
    assert library.named("cuMemHostRegister_v2") == [(SOURCES[1], SIZES[1], 0, context)]
    assert library.named("cuMemHostUnregister") == [(SOURCES[1], context)]
    assert not library.current


def test_memory_that_the_driver_cannot_lock_is_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    library = Library(BOTH)
    driver = OnStream(library)
    library.errors["cuMemHostRegister_v2"] = 712
    with caplog.at_level(logging.WARNING):
        assert not driver.host_register(4096, 8192)
    assert "cuMemHostRegister_v2 failed with error 712" in caplog.text
    library.errors["cuMemHostUnregister"] = 713
    with pytest.raises(RuntimeError, match="cuMemHostUnregister failed with error 713"):
        driver.host_unregister(4096)
    assert not library.current
