"""The writer of test_torture.py: sets, replaces and deletes blocks whose bytes contain their key and version.

It notes every operation in a journal, before the operation begins and after it was acknowledged. Arguments: the
endpoint, the journal, a seed, and the number before its first version.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from pathlib import Path

from kvstore.disk.segments import MIN_DIRECT_BYTES
from kvstore_client import KVStoreClient, KVStoreError, Namespace
from tests.support.harness import block_of, make_keys, make_namespace

# Bytes of a block: number of keys. Only the largest blocks bypass the page cache (O_DIRECT).
SHAPES = {4096: 2500, 20_000: 700, 1000: 1500, MIN_DIRECT_BYTES: 200}


def namespaces() -> dict[int, Namespace]:
    return {size: make_namespace(size, "torture") for size in SHAPES}


def torture_block(key: bytes, size: int, version: int) -> bytes:
    """Return a block that begins with its version; all other bytes follow from the key and the version."""
    return version.to_bytes(8, "little") + block_of(key, size - 8, version)


def write(endpoint: str, journal: Path, seed: int, version: int) -> None:
    """Write until the server is gone."""
    rng = random.Random(seed)
    clients = {
        size: KVStoreClient(endpoint, namespace, timeout_s=20.0, checksum=False)
        for size, namespace in namespaces().items()
    }
    keys = {size: make_keys(count) for size, count in SHAPES.items()}
    with journal.open("ab", buffering=0) as opened:

        def note(*fields: object) -> None:
            opened.write(json.dumps(fields).encode() + b"\n")

        while True:
            version += 1
            size = rng.choice(list(SHAPES))
            count = rng.choice([1, 1, 3, 10, 60])
            first = rng.randrange(SHAPES[size])
            numbers = [(first + at) % SHAPES[size] for at in range(count)]
            some = [keys[size][number] for number in numbers]
            kind = rng.choices(["set", "force", "delete", "read"], [60, 15, 10, 15])[0]
            client = clients[size]
            if kind == "read":
                client.get(some)
                continue
            note("begin", version, kind, size, numbers)
            if kind == "delete":
                client.delete(some)
                note("done", version)
                continue
            result = client.set(some, [torture_block(key, size, version) for key in some], force=kind == "force")
            # A forced set did not replace a block that another client was writing.
            complete = result.error == 0 and not (kind == "force" and result.existed)
            note("done" if complete else "partly", version)


if __name__ == "__main__":
    with contextlib.suppress(KVStoreError):  # the server is gone
        write(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
