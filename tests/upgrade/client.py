"""A client of either release, for test_rolling.py. It reads the same blocks again and again, and sets those that it
missed.

python client.py URL sync|async    prints a line of JSON in each round, until its standard input is closed

The bytes of a block follow from its key, so every client can check the blocks of the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import os
import random
import select
import sys
from typing import Any

from kvstore_client import AsyncKVStoreClient, KVStoreClient, KVStoreError, Namespace

BLOCK_BYTES = 16 * 1024
NAMESPACE = Namespace(model="upgraded", dtype="uint8", block_tokens=16, block_bytes=BLOCK_BYTES)
KEYS = [hashlib.blake2b(b"%d" % number, digest_size=16).digest() for number in range(300)]
BLOCKS = [random.Random(key).randbytes(BLOCK_BYTES) for key in KEYS]
PAUSE_S = 0.1


def told_to_end() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0]) and not os.read(sys.stdin.fileno(), 1)


async def done(result: Any) -> Any:
    """Return the result of a call of the synchronous or the asynchronous client."""
    return await result if inspect.isawaitable(result) else result


async def work(client: Any) -> None:
    while not told_to_end():
        hit, wrong, failed = 0, 0, ""
        try:
            found = (await done(client.get(KEYS))).blocks
            missed = [number for number, block in enumerate(found) if block is None]
            hit = len(KEYS) - len(missed)
            wrong = sum(block is not None and bytes(block) != BLOCKS[number] for number, block in enumerate(found))
            await done(client.set([KEYS[number] for number in missed], [BLOCKS[number] for number in missed]))
        except KVStoreError as error:
            failed = repr(error)
        print(json.dumps({"hit": hit, "wrong": wrong, "failed": failed}), flush=True)
        await asyncio.sleep(PAUSE_S)


async def main(url: str, kind: str) -> None:
    if kind == "sync":
        with KVStoreClient(url, NAMESPACE, timeout_s=5.0, fail_open=True) as client:
            await work(client)
    else:
        async with AsyncKVStoreClient(url, NAMESPACE, timeout_s=5.0, fail_open=True) as other:
            await work(other)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
