"""kill -9 of readers, writers and the server at random instants while they share memory.

A worker is a process that sets, reads and borrows blocks over shared memory, and checks every byte. The blocks of the
two namespaces do not all fit the server. No worker may see a wrong byte or crash (SIGBUS, SIGSEGV). When all workers
are gone, the server lends no block, has no unfinished write, and has no more descriptors than before.

KVSTORE_KILLS is the number of kills: 10 000 under `make torture`, a few in the usual tests.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client import KVStoreClient, Namespace
from kvstore_client.errors import TRANSPORT_ERRORS
from kvstore_client.memory import host_memory
from tests.support.harness import OVERHEAD_BYTES, Server, StartServer, make_keys, make_namespace, rss_bytes, wait_until

KILLS = int(os.environ.get("KVSTORE_KILLS", "45"))
# With this seed, two of the first 45 kills hit the server.
SEED = int(os.environ.get("KVSTORE_TORTURE_SEED", "2"))
WORKERS = 3
CHECK_EVERY = 100  # kills
BLOCK = 64 << 10
KEYS = 400  # in each of two namespaces: 50 MiB altogether, in a server of 32 MiB
MEMORY = 32 << 20
WRONG = 3  # a worker's exit status when it has seen a wrong byte

Rows = npt.NDArray[np.uint8]


def work(endpoint: str, namespace: Namespace, keys: Sequence[bytes], expected: Rows, seed: int) -> None:
    """Set, read, borrow and delete blocks until killed."""
    gc.disable()  # a garbage collection would write to, and so copy, all memory of the tests' process
    rng = random.Random(seed)
    rows = host_memory(16, BLOCK)
    out = np.zeros((16, BLOCK), dtype=np.uint8)
    with KVStoreClient(endpoint, namespace, shared_memory="auto", fail_open=True, timeout_s=2.0) as client:
        while True:
            some = rng.sample(range(KEYS), rng.randrange(1, 17))
            names, wanted = [keys[at] for at in some], expected[some]
            turn = rng.random()
            try:
                if turn < 0.3:
                    client.set(names, wanted, force=rng.random() < 0.2)
                elif turn < 0.5:
                    rows[: len(some)] = wanted
                    client.set(names, rows[: len(some)], force=rng.random() < 0.2)
                elif turn < 0.75:
                    present = client.get_into(names, out)
                    if not (out[: len(some)][present] == wanted[present]).all():
                        os._exit(WRONG)
                elif turn < 0.95:
                    with client.borrow(names) as blocks:
                        for block, right in zip(blocks, wanted, strict=True):
                            if block is not None and not (np.frombuffer(block, dtype=np.uint8) == right).all():
                                os._exit(WRONG)
                elif turn < 0.98:
                    client.delete(names)
                else:
                    client.purge()
            except TRANSPORT_ERRORS:
                time.sleep(0.001)


class Workers:
    """All workers; each uses one of the two namespaces."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self.namespaces = [make_namespace(BLOCK, f"kills-{number}") for number in range(2)]
        self._keys = [make_keys(KEYS, first=10_000 * number) for number in range(2)]
        generator = np.random.Generator(np.random.SFC64(SEED))
        self._expected = [generator.integers(0, 256, (KEYS, BLOCK), dtype=np.uint8) for _ in range(2)]
        self._server = server
        self._rng = rng
        self.alive: list[BaseProcess] = []

    def fill(self) -> None:
        while len(self.alive) < WORKERS:
            which = self._rng.randrange(2)
            process = multiprocessing.get_context("fork").Process(
                target=work,
                args=(
                    self._server.endpoint,
                    self.namespaces[which],
                    self._keys[which],
                    self._expected[which],
                    self._rng.getrandbits(32),
                ),
            )
            process.start()
            self.alive.append(process)

    def kill(self, process: BaseProcess) -> None:
        """Kill a worker, which must not have ended by itself before."""
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"a worker ended by itself: {process.exitcode}"
        process.close()
        self.alive.remove(process)

    def kill_all(self) -> None:
        for process in list(self.alive):
            self.kill(process)


def settled(server: Server, namespace: Namespace, descriptors: int) -> None:
    """Check that the server has released everything that the workers used."""
    with KVStoreClient(server.endpoint, namespace, shared_memory=False) as client:

        def nothing_left() -> bool:
            (shard,) = client.info().shards
            return not (shard.lent_blocks or any(each.writing for each in shard.namespaces) or shard.connections > 1)

        wait_until(nothing_left, what="nothing is lent, nothing is being written")
        (process,) = server.shards()
        # One descriptor for this client, and one for each segment.
        wait_until(lambda: process.num_fds() <= descriptors + 1 + MEMORY // (1 << 20), what="its descriptors")
        assert rss_bytes(process.pid) < MEMORY + OVERHEAD_BYTES


def restarted_after(server: Server, pid: int) -> None:
    wait_until(lambda: [each.pid for each in server.shards()] not in ([], [pid]), what="another shard process")


@pytest.mark.timeout(120 + KILLS // 4)
def test_kills_at_random_instants_leave_nothing_and_cause_no_wrong_byte(
    start_server: StartServer, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    server = start_server("--unix-socket", str(tmp_path / "kv.sock"), memory=f"{MEMORY}", segment="1MiB")
    workers = Workers(server, rng)
    (process,) = server.shards()
    descriptors, killed, shards_killed = process.num_fds(), 0, 0
    try:
        while killed < KILLS:
            workers.fill()
            time.sleep(rng.random() ** 2 * 0.05)
            if rng.random() < 0.02:
                (process,) = server.shards()
                process.kill()
                shards_killed += 1
                restarted_after(server, process.pid)
            elif rng.random() < 0.05:  # sleep for a while, with loans
                sleeper = rng.choice(workers.alive)
                assert sleeper.pid is not None
                os.kill(sleeper.pid, signal.SIGSTOP)
                time.sleep(rng.random() * 0.1)
                os.kill(sleeper.pid, signal.SIGCONT)
            else:
                workers.kill(rng.choice(workers.alive))
            killed += 1
            if killed % CHECK_EVERY == 0 or killed == KILLS:
                workers.kill_all()
                settled(server, workers.namespaces[0], descriptors)
                print(f"{killed} kills, {shards_killed} of them of the server", flush=True)
    finally:
        for worker in workers.alive:
            worker.kill()
            worker.join()
