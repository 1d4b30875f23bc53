"""Dozens of concurrent loads while shards freeze, die and return. Every load ends exactly once, in time and with right
bytes, and no byte is written to its rows afterwards."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from kvstore_client import KVStoreClient, KVStoreError, Namespace
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import FetchJob, Within
from kvstore_client.engine.transfer_in import TransferIn
from tests.support.harness import Server, StartServer, blocks_of, make_keys, make_namespace, wait_until

SOAK_S = float(os.environ.get("KVSTORE_SOAK_S", "2"))
BLOCK = 16 << 10
TIMEOUT_S = 1.0
# By how much a load may exceed its time and the wait before it: on a busy machine a thread does not wake at once.
BOUND_S = 1.5
LOADS = 48  # at the same time
KEYS = make_keys(160)
PROMISED = make_keys(40)
BLOCKS = dict(zip(KEYS + PROMISED, blocks_of(KEYS + PROMISED, BLOCK), strict=True))
AFTERWARDS = 0xEE  # what the owner of the rows writes to them next


class Load:
    """One load, with rows that are its own until it is done."""

    def __init__(self, transfer: TransferIn, choose: random.Random, rows: npt.NDArray[np.uint8]) -> None:
        self.rows = rows
        self.waits = choose.random() < 0.3
        self.within_s = choose.choice((0.0, 0.01, 0.1, 0.5, 1.5))
        keys = choose.sample(KEYS, choose.randint(1, 24))
        self.keys = keys + (choose.sample(PROMISED, choose.randint(1, 8)) if self.waits else [])
        self.slots = choose.sample(range(len(rows)), len(self.keys))
        self.most_chunks = choose.choice((1, 3, 1000))
        self.chunks = 0
        self.hits = 0
        self.problems: list[str] = []
        self.done_at: list[float] = []
        self.started = time.monotonic()
        self.job: FetchJob = transfer.submit(
            self.keys,
            rows,
            self.slots,
            within=Within(self.within_s),
            arrived=self._arrived,
            done=self._done,
            waits=self.waits,
        )

    def _arrived(self, first: int, hits: npt.NDArray[np.bool_]) -> bool:
        if self.done_at:
            self.problems.append("told of blocks after it was done")
        self.chunks += 1
        for index in (np.flatnonzero(hits) + first).tolist():
            self.hits += 1
            if bytes(self.rows[self.slots[index]]) != BLOCKS[self.keys[index]]:
                self.problems.append(f"wrong bytes of block {index}")
        return self.chunks < self.most_chunks

    def _done(self) -> None:
        if self.done_at:
            self.problems.append("done twice")
        self.rows[:] = AFTERWARDS
        self.done_at.append(time.monotonic())

    @property
    def late(self) -> bool:
        """Whether it should have ended by now."""
        turn_s = 0.0 if self.waits else TIMEOUT_S
        return not self.done_at and time.monotonic() > self.started + turn_s + self.within_s + BOUND_S


def harm(servers: Sequence[Server], choose: random.Random, over: threading.Event) -> None:
    """Cause one fault of the stores after another."""

    def freeze(processes: Sequence[psutil.Process]) -> None:
        with contextlib.suppress(psutil.NoSuchProcess), contextlib.ExitStack() as frozen:
            for process in processes:
                process.suspend()
                frozen.callback(process.resume)
            over.wait(choose.choice((0.05, 0.3, 1.0, 3.0)))

    while not over.wait(choose.uniform(0, 0.3)):
        server = choose.choice(servers)
        what = choose.choice(("freeze one", "freeze one", "freeze all", "kill one", "kill all"))
        shards = server.shards()
        if what == "kill all":
            server.kill()
            over.wait(choose.uniform(0, 0.3))
            server.restart()
        elif what == "freeze all":
            freeze(shards)
        elif shards and what == "freeze one":
            freeze([choose.choice(shards)])
        elif shards:
            with contextlib.suppress(psutil.NoSuchProcess):
                choose.choice(shards).kill()


def produce(endpoints: Sequence[str], namespace: Namespace, choose: random.Random, over: threading.Event) -> None:
    """Set lost blocks again, and promise blocks, only some of which are set."""
    with KVStoreClient(endpoints, namespace, timeout_s=TIMEOUT_S, fail_open=True) as client:
        while not over.wait(0.02):
            with contextlib.suppress(KVStoreError):
                some = choose.sample(KEYS, 40)
                client.set(some, [BLOCKS[key] for key in some])
                with client.promise(PROMISED, ttl_s=5.0):
                    over.wait(choose.uniform(0, 0.3))
                    some = PROMISED[: choose.choice((0, 20, 40))]
                    client.set(some, [BLOCKS[key] for key in some])
                    over.wait(choose.uniform(0, 0.1))
                client.delete(PROMISED)


@pytest.fixture
def servers(start_server: StartServer, tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers: one is read over TCP, the other through shared memory."""
    sockets = "off", str(tmp_path / "near")
    yield [start_server("--shards", "2", "--unix-socket", each, memory="64MiB") for each in sockets]


@pytest.mark.soak
@pytest.mark.exclusive
@pytest.mark.timeout(SOAK_S + 120)
@pytest.mark.parametrize("local", [False, True] if "KVSTORE_SOAK_S" in os.environ else [True])
def test_every_load_ends_once_in_time_and_right(
    servers: list[Server], start_server: StartServer, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    monkeypatch.setattr("kvstore_client.engine.transfer_in.LOAD_CHUNK_BYTES", 8 * BLOCK)
    monkeypatch.setattr("kvstore_client.engine.transfer_in.WAITED_CHUNK_BYTES", 8 * BLOCK)
    namespace = make_namespace(BLOCK, "storm")
    near = start_server(memory="16MiB") if local else None
    endpoints = [server.endpoint for server in servers]
    counters = Counters()
    guard = StoreGuard(
        endpoints, namespace, timeout_s=TIMEOUT_S, counters=counters, local=near.endpoint if near is not None else ""
    )
    over = threading.Event()
    threads = [
        threading.Thread(target=harm, args=[[*servers, *([near] if near else [])], random.Random(seed + 1), over]),
        threading.Thread(target=produce, args=[endpoints, namespace, random.Random(seed + 2), over]),
    ]
    for thread in threads:
        thread.start()
    loads: list[Load] = []
    free = [np.zeros((64, BLOCK), dtype=np.uint8) for _ in range(LOADS)]
    ended = hits = cancelled = 0
    transfer = TransferIn(guard, counters=counters)
    closes_at = time.monotonic() + choose.uniform(0.5, 2)
    ends_at = time.monotonic() + SOAK_S
    try:
        while time.monotonic() < ends_at:
            while free:
                loads.append(Load(transfer, choose, free.pop()))
            if choose.random() < 0.5:
                transfer.cancel(choose.choice(loads).job)
                cancelled += 1
            if time.monotonic() > closes_at:
                transfer.close()
                assert not transfer.waiting and all(load.done_at for load in loads)
                transfer = TransferIn(guard, counters=counters)
                closes_at = time.monotonic() + choose.uniform(0.5, 2)
            time.sleep(0.01)
            if late := [vars(load.job) for load in loads if load.late]:
                faulthandler.dump_traceback()
                pytest.fail(f"{len(late)} loads should have ended: {late[:3]}")
            for load in [load for load in loads if load.done_at and time.monotonic() > load.done_at[0] + 0.1]:
                assert not load.problems and len(load.done_at) == 1
                assert (load.rows == AFTERWARDS).all(), "bytes were written to rows that were given back"
                loads.remove(load)
                free.append(load.rows)
                ended += 1
                hits += load.hits
    finally:
        over.set()
        for thread in threads:
            thread.join()
    try:
        wait_until(lambda: all(load.done_at for load in loads), TIMEOUT_S + 1.5 + BOUND_S)
        assert transfer.drain(1.0) and not [load.problems for load in loads if load.problems]
        print(f"{ended} loads, {cancelled} cancelled, {hits} blocks")
        assert ended > 10 * SOAK_S and hits > ended / 20

        def all_come() -> bool:
            with KVStoreClient(endpoints, namespace, fail_open=True) as client:
                client.set(KEYS, [BLOCKS[key] for key in KEYS])
            rows = np.zeros((len(KEYS), BLOCK), dtype=np.uint8)
            came: list[bool] = []
            transfer.submit(
                KEYS,
                rows,
                range(len(KEYS)),
                within=Within(5.0),
                arrived=lambda first, some: came.extend(some.tolist()) or True,  # type: ignore[func-returns-value]
                done=lambda: None,
            )
            return transfer.drain(10.0) and all(came) and [bytes(row) for row in rows] == list(map(BLOCKS.get, KEYS))

        wait_until(all_come, what="the store is as before")
        assert not counters.take().get("defects")
    finally:
        transfer.close()
        guard.close()
