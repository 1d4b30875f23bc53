"""The places where the KV of some layers may be, and how the decoder uses the KV in each of them.

* `Resident`: in the decoder's own memory.
* `Fetched`: in a kvstore-server. A thread reads the KV of the next layers into buffers, `depth` layers ahead; with
  depth 0, a layer's KV is read when the layer needs it (serial). The thread works in native code, without Python's
  lock.
* `Pushed`: also in a kvstore-server, but the query is sent to the KV. A process on the server's host attends over views
  of the server's memory and sends back partial attention, which is merged.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from benchmarks.kv_pipeline.beside import ANSWER, Beside
from benchmarks.kv_pipeline.blocks import keys_of
from benchmarks.kv_pipeline.decoder import Array, Partial, Shape, attend
from kvstore_client import KVStoreClient


def lent_layers(shape: Shape, lent: int) -> list[int]:
    """Return the numbers of `lent` layers, evenly spread."""
    return sorted({number * shape.layers // lent for number in range(lent)}) if lent else []


def make_kv(shape: Shape, layer: int) -> Array:
    """Return the KV of a layer, made from a seed."""
    random = np.random.default_rng(1000 + layer)
    size = (shape.batch, 2, shape.heads, shape.context, shape.head_size)
    return random.standard_normal(size, dtype=np.float32)


class Resident:
    """The KV of all layers in memory."""

    def __init__(self, kv: Sequence[Array]) -> None:
        self.kv = kv

    def of_batch(self, batch: int) -> Resident:
        """Return the KV of the first `batch` sequences, in the same memory."""
        return Resident([each[:batch] for each in self.kv])

    def attend(self, layer: int, query: Array) -> Partial:
        return attend(query, self.kv[layer])


class Fetched:
    """Some layers are in the store, and the others are resident. Used in a `with` statement."""

    def __init__(
        self, shape: Shape, resident: Resident, lent: Sequence[int], client: KVStoreClient, depth: int, core: int | None
    ) -> None:
        """core: the core of the reading thread; if it is None, any core."""
        self._shape, self._resident, self._lent, self._client = shape, resident, list(lent), client
        self._depth, self._core = depth, core
        self._keys = {layer: keys_of(shape, layer) for layer in lent}
        size = (shape.batch, 2, shape.heads, shape.context, shape.head_size)
        self._buffers = [np.zeros(size, dtype=np.float32) for _ in range(depth + 1)]
        self._wanted: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._there: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._next = 0  # how many lent layers have been requested
        self._used = 0
        self._thread = threading.Thread(target=self._read) if depth else None

    def __enter__(self) -> Fetched:
        if self._thread is not None:
            self._thread.start()
            for _ in range(min(self._depth, len(self._lent))):
                self._ask()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join()

    def attend(self, layer: int, query: Array) -> Partial:
        if layer not in self._keys:
            return self._resident.attend(layer, query)
        if self._thread is None:
            self._into(layer, self._buffers[0])
            return attend(query, self._buffers[0])
        failed = self._there.get()
        if failed is not None:
            raise failed
        self._ask()  # into the buffer of the previous layer, which is no longer needed
        buffer = self._buffers[self._used % len(self._buffers)]
        self._used += 1
        return attend(query, buffer)

    def _ask(self) -> None:
        """Request the next lent layer. After the last one comes the first, for the next step."""
        layer, buffer = self._lent[self._next % len(self._lent)], self._next % len(self._buffers)
        self._next += 1
        self._wanted.put((layer, buffer))

    def _read(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(threading.get_native_id(), {self._core})
        while (wanted := self._wanted.get()) is not None:
            try:
                self._into(wanted[0], self._buffers[wanted[1]])
                self._there.put(None)
            except Exception as error:  # raised by the thread that waits for the read
                self._there.put(error)

    def _into(self, layer: int, buffer: Array) -> None:
        blocks = buffer.view(np.uint8).reshape(self._shape.batch, self._shape.block_bytes)
        if not self._client.get_into(self._keys[layer], blocks).all():
            raise RuntimeError(f"the store lacks KV of layer {layer}")


class Pushed:
    """Some layers are in the store and attended there."""

    def __init__(self, shape: Shape, resident: Resident, lent: Sequence[int], beside: Beside) -> None:
        self._resident, self._lent, self._beside = resident, set(lent), beside
        self._size = (shape.batch, shape.heads, 1, ANSWER + shape.head_size)

    def attend(self, layer: int, query: Array) -> Partial:
        if layer not in self._lent:
            return self._resident.attend(layer, query)
        answer = np.frombuffer(self._beside.ask(layer, query), np.float32).reshape(self._size)
        return Partial(answer[..., ANSWER:], answer[..., :1], answer[..., 1:ANSWER])


def fill(shape: Shape, resident: Resident, client: KVStoreClient) -> None:
    """Store the KV of all layers."""
    for layer, kv in enumerate(resident.kv):
        client.set(keys_of(shape, layer), kv.view(np.uint8).reshape(shape.batch, shape.block_bytes), deferred=False)


@contextmanager
def copying(shape: Shape, client: KVStoreClient, layers: Sequence[int], core: int) -> Iterator[None]:
    """While the body runs, a thread on this core reads these layers again and again, without using them."""
    over = threading.Event()

    def read() -> None:
        os.sched_setaffinity(threading.get_native_id(), {core})
        buffer = np.zeros((shape.batch, shape.block_bytes), dtype=np.uint8)
        for layer in itertools.cycle(layers):
            if over.is_set():
                return
            client.get_into(keys_of(shape, layer), buffer)

    with ThreadPoolExecutor(1) as executor:
        reading = executor.submit(read)
        try:
            yield
        finally:
            over.set()
        reading.result()


def read_time(shape: Shape, client: KVStoreClient, layers: Sequence[int], core: int) -> float:
    """Return the seconds that a thread on this core takes to read these layers one after the other."""

    def read() -> float:
        os.sched_setaffinity(threading.get_native_id(), {core})
        buffer = np.zeros((shape.batch, shape.block_bytes), dtype=np.uint8)
        begin = time.perf_counter()
        for layer in layers:
            client.get_into(keys_of(shape, layer), buffer)
        return time.perf_counter() - begin

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(read).result()
