"""A client in a separate container: python -m tests.containers.client_program ENDPOINT USE FIRST COUNT.

FIRST and COUNT choose the keys (`make_keys`). The bytes of a block follow from its key, so every byte can be checked.
Standard output has one JSON object per line, and standard error has the client's log. Uses:

    set    stores the blocks, and waits until the store has them: {"created", "errors", "path"}
    get    {"hit", "wrong", "path"}
    hold   keeps the blocks where they are in the server's memory, {"hit", "wrong", "path"}, until it is killed, and
           compares them again at each SIGUSR1: {"hit", "wrong"}
    load   stores blocks, one after another, and reads some of those before, until SIGTERM: a `Step` a line
"""

from __future__ import annotations

import json
import logging
import random
import signal
import sys
import time
from typing import Any

from kvstore_client import KVStoreClient, KVStoreError, Namespace
from tests.support.harness import block_of, blocks_of, make_keys, make_namespace

NAMESPACE: Namespace = make_namespace(64 << 10, "containers")
SIZE = NAMESPACE.block_bytes


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def compare(keys: list[bytes], blocks: Any) -> dict[str, int]:
    pairs = [(key, block) for key, block in zip(keys, blocks, strict=True) if block is not None]
    return {"hit": len(pairs), "wrong": sum(bytes(block) != block_of(key, SIZE) for key, block in pairs)}


def load(client: KVStoreClient, first: int) -> None:
    """Print {"at", "set", "missed", "wrong", "raised"} for each step. `at` is the time of the monotonic clock, which
    all containers share; `set` is the number of blocks acknowledged so far."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    done: list[bytes] = []
    chosen = random.Random(first)
    while not stop:
        (key,) = make_keys(1, first + len(done))
        looked_for = chosen.sample(done, min(3, len(done)))
        step = {"at": time.monotonic(), "set": len(done), "missed": 0, "wrong": 0, "raised": ""}
        try:
            if client.set([key], [block_of(key, SIZE)], deferred=False).error:
                step["raised"] = "not stored"
            else:
                done.append(key)
                step["set"] = len(done)
            found = compare(looked_for, client.get(looked_for).blocks) if looked_for else {"hit": 0, "wrong": 0}
            step |= {"missed": len(looked_for) - found["hit"], "wrong": found["wrong"]}
        except KVStoreError as error:
            step["raised"] = str(error)
        say(**step)
        time.sleep(0.01)


def main(endpoint: str, use: str, first: int, count: int) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    keys = make_keys(count, first)
    with KVStoreClient(endpoint, NAMESPACE, timeout_s=10.0) as client:
        path = client.stats.path
        if use == "set":
            result = client.set(keys, blocks_of(keys, SIZE), deferred=False)
            say(created=result.created, errors=result.error, path=path)
        elif use == "get":
            say(**compare(keys, client.get(keys).blocks), path=path)
        elif use == "hold":
            with client.borrow(keys) as blocks:
                say(**compare(keys, blocks), path=path)
                while True:
                    signal.sigwait([signal.SIGUSR1])
                    say(**compare(keys, blocks))
        else:
            assert use == "load", f"{use!r}: expected set, get, hold or load"
            load(client, first)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
