"""A herd: many engines get one prompt at the same time. Each block is computed only once, even if some engines fail."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from kvstore_client import KVStoreClient, Namespace
from tests.support.harness import Server, StartServer, block_of, make_keys, shard_info, wait_until

BLOCK_BYTES = 4096
ENGINES = 16
CHUNK = 8  # blocks that an engine computes in a step


class Herd:
    """Engines that share prompts as the README describes: each engine first computes the blocks that it promised, and
    then waits for the rest."""

    def __init__(self, server: Server, namespace: Namespace, keys: list[bytes], fails: frozenset[int]) -> None:
        """fails: the engines that disconnect in the middle of their computation."""
        self.computed: list[bytes] = []
        self.wrong: list[str] = []
        self._keys = keys
        self._fails = fails
        self._gate = threading.Barrier(ENGINES)
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number, server.endpoint, namespace)) for number in range(ENGINES)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            assert not thread.is_alive(), "an engine waits for ever"

    def _run(self, number: int, endpoint: str, namespace: Namespace) -> None:
        with KVStoreClient(endpoint, namespace, timeout_s=10, fail_open=True) as client:
            self._gate.wait(10)
            if number in self._fails:
                self._vanish(client)
            else:
                self._answer(client)

    def _vanish(self, client: KVStoreClient) -> None:
        promise = client.promise(self._keys)
        self._compute(client, np.flatnonzero(promise.mine)[:CHUNK].tolist())

    def _answer(self, client: KVStoreClient) -> None:
        left = list(range(len(self._keys)))
        while left:
            keys = [self._keys[at] for at in left]
            rows = np.zeros((len(left), BLOCK_BYTES), dtype=np.uint8)
            with client.promise(keys) as promise:
                self._compute(client, [at for at, mine in zip(left, promise.mine, strict=True) if mine])
                found = client.get_into(keys, rows, wait_s=20)
            for at, row, there in zip(left, rows, found, strict=True):
                if there and row.tobytes() != block_of(self._keys[at], BLOCK_BYTES):
                    self.wrong.append(self._keys[at].hex())
            left = [at for at, there in zip(left, found, strict=True) if not there]  # their promise has failed

    def _compute(self, client: KVStoreClient, positions: list[int]) -> None:
        for first in range(0, len(positions), CHUNK):
            time.sleep(random.uniform(0.0, 0.02))
            keys = [self._keys[at] for at in positions[first : first + CHUNK]]
            with self._lock:
                self.computed += keys
            assert client.set(keys, [block_of(key, BLOCK_BYTES) for key in keys]).error == 0


@pytest.mark.parametrize("shards", [1, 2])
def test_a_herd_computes_each_block_once(start_server: StartServer, namespace: Namespace, shards: int) -> None:
    server, keys = start_server("--shards", str(shards)), make_keys(100)
    herd = Herd(server, namespace, keys, frozenset())
    herd.join(20)
    assert not herd.wrong
    assert sorted(herd.computed) == sorted(keys)


def test_other_engines_compute_the_blocks_of_failed_ones(start_server: StartServer, namespace: Namespace) -> None:
    server, keys = start_server(), make_keys(100)
    fails = frozenset(random.sample(range(ENGINES), ENGINES // 2))
    herd = Herd(server, namespace, keys, fails)
    herd.join(20)
    assert not herd.wrong
    assert set(herd.computed) == set(keys)
    assert len(herd.computed) <= len(keys) + CHUNK * len(fails), "what nobody had to compute was computed again"
    with KVStoreClient(server.endpoint, namespace) as client:
        assert client.contains(keys).all()
        wait_until(lambda: shard_info(client).streams == 0)
        [known] = shard_info(client).namespaces
        assert (known.promised, known.awaited) == (0, 0)
