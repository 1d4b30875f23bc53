"""A process that promises many blocks to a server and waits for some of them, until its standard input ends.

`python -m benchmarks.remote_kv_cache.waiting ENDPOINT MODEL BLOCK_BYTES CONNECTIONS READS PROMISES`: READS reads wait
on each of CONNECTIONS connections, each for a different one of PROMISES promised blocks. It prints a line when all
reads wait, and, after the promises have ended, the number of reads that missed.

The connections use ZeroMQ's own library, with messages that this module makes, because a client of kvstore has at most
one read in progress for each thread.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final

import numpy as np
import zmq

from benchmarks.remote_kv_cache.shapes import KEY_BYTES
from benchmarks.remote_kv_cache.transfers import connect, namespace
from kvstore import wire

PROMISED_S: Final = 300.0
LOOK_S: Final = 0.05
_ANSWER_MS: Final = 30_000


def _ask(socket: zmq.Socket[bytes], request: wire.Request, *frames: bytes) -> None:
    socket.send_multipart([wire.encode(request), *frames])


def _reply(socket: zmq.Socket[bytes]) -> Any:
    if not socket.poll(_ANSWER_MS):
        raise RuntimeError(f"no reply within {_ANSWER_MS / 1000:.0f} s")
    reply = wire.decode_reply(socket.recv_multipart()[0])
    if isinstance(reply, wire.Error):
        raise RuntimeError(reply.message)
    return reply


def main(endpoint: str, model: str, block_bytes: int, connections: int, reads: int, promises: int) -> None:
    keys = np.random.default_rng(7).integers(0, 256, (promises, KEY_BYTES), dtype=np.uint8)
    canonical = namespace(model, block_bytes).canonical()
    wait_ms = int(PROMISED_S * 1000)
    with connect(endpoint, model, block_bytes) as producer, zmq.Context() as context:
        promise = producer.promise(keys, ttl_s=PROMISED_S)
        sockets = [context.socket(zmq.DEALER) for _ in range(connections)]
        for number, socket in enumerate(sockets):
            socket.linger = 0
            socket.connect(endpoint)
            _ask(socket, wire.Hello(0, wire.PROTOCOL_VERSION, canonical))
            _reply(socket)
            for read in range(reads):
                get = wire.Get(read + 1, wait_ms, 1, KEY_BYTES, wait_ms=wait_ms)
                _ask(socket, get, keys[number * reads + read].tobytes())
        while sum(each.awaited for each in producer.info().shards[0].namespaces) < connections * reads:
            if early := [socket for socket in sockets if socket.poll(0)]:
                raise RuntimeError(f"a read did not wait: the reply was {_reply(early[0])}")
            time.sleep(LOOK_S)
        print("waiting", flush=True)
        sys.stdin.read()
        promise.withdraw()
        print(sum(_reply(socket).miss for socket in sockets for _ in range(reads)), flush=True)
        for socket in sockets:
            socket.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
