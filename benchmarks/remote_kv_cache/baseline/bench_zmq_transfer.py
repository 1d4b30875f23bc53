"""Measures the speed of ZeroMQ's own library: 512 blocks from a ROUTER to a DEALER over tcp, ipc and inproc, compared
with the plain socket.

The ROUTER sends from the blocks' memory (`copy=False`). The DEALER requests 64 blocks at a time and receives each frame
into its row (`recv_into`), or as a message that is then copied. Over tcp, ipc and the plain socket they are two
processes; inproc uses a thread. These figures are the reason why kvstore speaks ZeroMQ's protocol without its library.
"""

from __future__ import annotations

import contextlib
import struct
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
import zmq

from benchmarks.remote_kv_cache.harness import Benchmark, Operation, add_model_option, chosen_models
from benchmarks.remote_kv_cache.plain import plain_socket
from benchmarks.remote_kv_cache.processes import serving_process
from benchmarks.remote_kv_cache.shapes import Model, Rows, random_rows
from benchmarks.remote_kv_cache.transfers import MEMCPY, PLAIN_GET, Blocks, memcpy_operation, plain_operations

_CALL: Final = struct.Struct("<II")
_ANSWER_MS: Final = 60_000


def serve(router: zmq.Socket[bytes], rows: Rows) -> None:
    """Answer each request `(first, last)` with these rows, one frame for each, until an empty request arrives."""
    while True:
        identity, request = router.recv_multipart()
        if not request:
            return
        start, end = _CALL.unpack(request)
        router.send_multipart([identity, *rows[start:end]], copy=False)


def _serve_process(pipe: Connection, ipc: str, count: int, row_bytes: int) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        router.bind(ipc)
        rows = random_rows(count, row_bytes)
        pipe.send(f"tcp://127.0.0.1:{port}")
        serve(router, rows)


@contextlib.contextmanager
def router_process(ipc: str, count: int, row_bytes: int) -> Iterator[str]:
    """A ROUTER in its own process, at `ipc` and at a tcp endpoint. Yield the tcp endpoint."""
    with serving_process(_serve_process, ipc, count, row_bytes, what="the ROUTER process") as endpoint:
        yield endpoint


@contextlib.contextmanager
def router_thread(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, rows: Rows) -> Iterator[None]:
    """A ROUTER in a thread, for inproc."""
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    thread = threading.Thread(target=serve, args=(router, rows))
    thread.start()
    try:
        yield
    finally:
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(endpoint)
            dealer.send(b"")
            thread.join()
        router.close(linger=0)


def dealer_operation(dealer: zmq.Socket[bytes], blocks: Blocks, name: str, into: bool) -> Operation:
    """Return the operation that requests the blocks and receives them in place (`into`), or as messages that are
    copied."""

    def call(start: int, end: int) -> None:
        dealer.send(_CALL.pack(start, end))
        for row in blocks.out[start:end]:
            if into:
                dealer.recv_into(row)
            else:
                row[:] = np.frombuffer(dealer.recv(copy=False).buffer, dtype=np.uint8)

    return blocks.reading(name, call, PLAIN_GET)


def measure(benchmark: Benchmark, model: Model) -> None:
    """Measure one model, with its own peers."""
    benchmark.say(f"{model.name}: making {benchmark.batch.blocks} blocks of {model.block_bytes} bytes")
    blocks = Blocks(benchmark.batch, model.block_bytes)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ipc = f"ipc://{folder}/router"
        tcp = stack.enter_context(router_process(ipc, blocks.batch.blocks, model.block_bytes))
        plain = stack.enter_context(plain_socket(blocks.batch.blocks, model.block_bytes))
        context = stack.enter_context(zmq.Context())
        inproc = "inproc://router"
        stack.enter_context(router_thread(context, inproc, blocks.source))
        operations = [memcpy_operation(blocks), *plain_operations(plain, blocks)]
        for name, endpoint in {"tcp": tcp, "ipc": ipc, "inproc": inproc}.items():
            for into in (True, False):
                dealer = stack.enter_context(context.socket(zmq.DEALER))
                dealer.linger, dealer.rcvtimeo = 0, _ANSWER_MS
                dealer.connect(endpoint)
                title = f"zmq {name}" if into else f"zmq {name}, recv and copy"
                operations.append(dealer_operation(dealer, blocks, title, into))
        benchmark.measure(
            model.name,
            operations,
            references=(MEMCPY,),
            **blocks.batch.described(model.block_bytes),
        )


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__, add_options=add_model_option)
    for model in chosen_models(benchmark.options):
        measure(benchmark, model)
    benchmark.matrix("As multiples of block-to-block naive (memcpy)", MEMCPY)
    benchmark.matrix("As multiples of the plain socket")
    benchmark.finish(zmq_io_threads=1, libzmq=zmq.zmq_version())


if __name__ == "__main__":
    main()
