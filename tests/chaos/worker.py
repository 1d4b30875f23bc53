"""A client process of the soak test: it sets and reads blocks that other processes set and read too, and checks every
byte. `soak` runs several of them.

Arguments: the endpoint, a seed, the seconds to run; it runs longer if it has not counted `LEAST` of each kind by then.
It prints its counts as JSON; its exit status is 0 if no byte was wrong.
"""

from __future__ import annotations

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvstore_client import KVStoreClient
from tests.support import forked
from tests.support.harness import Server, block_of, environment, make_keys, make_namespace

BLOCK_BYTES = 64 << 10
KEYS = 2000
VERSIONS = 3
LEAST = 500  # of hits, misses and sets each, however slow the machine is


def main(endpoint: str, seed: int, seconds: float) -> int:
    rng = random.Random(seed)
    keys = make_keys(KEYS)
    namespace = make_namespace(BLOCK_BYTES, "soak")
    counts = {"hits": 0, "misses": 0, "sets": 0, "wrong": 0}
    right = {(key, version): b"" for key in keys for version in range(VERSIONS)}

    def check(key: bytes, block: bytes | memoryview | None) -> None:
        """Count a block as right if a process may have set it under this key."""
        if block is None:
            counts["misses"] += 1
            return
        counts["hits"] += 1
        for version in range(VERSIONS):
            known = right[key, version] = right[key, version] or block_of(key, BLOCK_BYTES, version)
            if block == known:
                return
        counts["wrong"] += 1

    out = np.zeros((32, BLOCK_BYTES), dtype=np.uint8)
    end = time.monotonic() + seconds
    with KVStoreClient(endpoint, namespace, timeout_s=20.0) as client:
        while time.monotonic() < end or min(counts[kind] for kind in ("hits", "misses", "sets")) < LEAST:
            first = rng.randrange(KEYS)
            chosen = [keys[(first + number) % KEYS] for number in range(rng.randrange(1, 33))]
            action = rng.randrange(10)
            if action < 4:
                version = rng.randrange(VERSIONS)
                blocks = [block_of(key, BLOCK_BYTES, version) for key in chosen]
                client.set(chosen, blocks, force=rng.random() < 0.5, deferred=rng.random() < 0.5)
                counts["sets"] += len(chosen)
            elif action < 6:
                for key, block in zip(chosen, client.get(chosen).blocks, strict=True):
                    check(key, block)
            elif action < 8:
                present = client.get_into(chosen, out)
                for number, key in enumerate(chosen):
                    check(key, out[number].tobytes() if present[number] else None)
            elif action == 8:
                for number, (position, block) in enumerate(client.stream_get(chosen)):
                    check(chosen[position], block)
                    if number == 20:
                        break
            elif rng.random() < 0.5:
                client.delete(chosen[:2])
            else:
                client.contains(chosen, refresh=rng.random() < 0.5, pin_s=rng.choice([0.0, 0.1]))
        counts["checksum_errors"] = client.stats.checksum_errors
        counts["failures"] = client.stats.failures
    print(json.dumps(counts))
    return 1 if counts["wrong"] or counts["checksum_errors"] else 0


def soak(server: Server, workers: int, seconds: float) -> list[dict[str, int]]:
    """Run several of these processes at once. Returns the counts of each. Fails if one of them fails."""

    def run(seed: int) -> dict[str, int]:
        arguments = (server.endpoint, str(seed), str(seconds))
        done = forked.run("tests.chaos.worker", *arguments, env=environment(), timeout=seconds + 90)
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(json.loads(done.stdout))

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, range(workers)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
