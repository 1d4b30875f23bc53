"""Attention on the store's host: a process that attends over views of the server's own memory.

The decoder sends a layer's number and the queries of its sequences, and gets partial attention. For each sequence and
head this is the sum of the weights, the largest score, and the weighted values (float32). Nothing else crosses the
link. One request is in progress at a time: the decoder waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
import numpy as np
import zmq

from benchmarks.kv_pipeline.blocks import TIMEOUT_S, connect, keys_of
from benchmarks.kv_pipeline.decoder import Array, Shape, attend
from benchmarks.remote_kv_cache.processes import child

ANSWER: Final = 2  # numbers before the values of a sequence and head: the sum of the weights, and the largest score
_READY: Final = "attending at "


class Beside:
    """The decoder's connection to the process. Not thread-safe."""

    def __init__(self, address: str) -> None:
        """address: `tcp://host:port` of the process."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._address = address

    def ask(self, layer: int, query: Array) -> bytes:
        """Send a query. Return the answer. Raises `TimeoutError` if none comes."""
        self._socket.send_multipart((layer.to_bytes(4, "little"), np.ascontiguousarray(query)))
        if not self._socket.poll(TIMEOUT_S * 1e3):
            raise TimeoutError(f"{self._address} did not answer within {TIMEOUT_S:g} s: check that its process runs")
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close()


@contextmanager
def attending(shape: Shape, endpoint: str, host: str, prefix: Sequence[str]) -> Iterator[str]:
    """Run the process, for all KV that the server at `endpoint` has. Yield its address.

    host: the address on which it listens. prefix: the command that runs it on that host."""
    command = [*prefix, sys.executable, "-m", __spec__.name, msgspec.json.encode(shape).decode(), endpoint, host]
    with child(command, _READY, "the process beside the store") as address:
        yield address


def main() -> None:
    shape = msgspec.json.decode(sys.argv[1], type=Shape)
    endpoint, host = sys.argv[2:]
    size = (2, shape.heads, shape.context, shape.head_size)
    with connect(endpoint, shape, True) as client, zmq.Context() as context, context.socket(zmq.REP) as socket:
        keys = [key for layer in range(shape.layers) for key in keys_of(shape, layer)]
        with client.borrow(keys) as borrowed:
            views = [np.frombuffer(block, np.float32).reshape(size) for block in borrowed if block is not None]
            if len(views) < len(keys):
                sys.exit(f"the store lacks {len(keys) - len(views)} of the {len(keys)} blocks to be attended")
            port = socket.bind_to_random_port(f"tcp://{host}")
            print(f"{_READY}tcp://{host}:{port}", flush=True)
            while True:  # until the process is ended
                number, asked = socket.recv_multipart()
                query = np.frombuffer(asked, np.float32).reshape(-1, shape.heads, 1, shape.head_size)
                first = int.from_bytes(number, "little") * shape.batch
                socket.send(_answer(query, views[first : first + len(query)]))


def _answer(query: Array, kv: Sequence[Array]) -> Array:
    """kv: the KV of each sequence, `(2, heads, context, head_size)`."""
    parts = [attend(query[number : number + 1], each[None]) for number, each in enumerate(kv)]
    answers = [np.concatenate((part.weights, part.top, part.values), axis=-1) for part in parts]
    return np.concatenate(answers)


if __name__ == "__main__":
    main()
