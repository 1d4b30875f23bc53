"""Transfers into an engine: right bytes or a miss by the deadline, and every job ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client import KVStoreClient, Namespace
from kvstore_client.engine import transfer_in as transfer_module
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import Within
from kvstore_client.engine.transfer_in import TransferIn
from tests.support.harness import (
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    block_of,
    blocks_of,
    make_keys,
    namespace_info,
    put_into,
    set_frames,
    stays,
    wait_until,
)
from tests.support.slow_link import SlowLink

TIMEOUT_S = 1.0
SLACK_S = 1.0  # what a busy machine may add to a deadline
BLOCK_BYTES = 64 << 10

Rows: TypeAlias = "npt.NDArray[np.uint8]"
StartIn: TypeAlias = Callable[..., TransferIn]


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def start_in(counters: Counters) -> Iterator[StartIn]:
    started: list[tuple[TransferIn, StoreGuard]] = []

    def start(server: Server | SlowLink, namespace: Namespace, timeout_s: float = TIMEOUT_S) -> TransferIn:
        guard = StoreGuard(server.endpoint, namespace, timeout_s=timeout_s, counters=counters)
        transfer = TransferIn(guard, counters=counters)
        started.append((transfer, guard))
        return transfer

    yield start
    for transfer, guard in started:
        transfer.close()
        assert transfer.waiting == 0
        guard.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit each round trip to this many blocks."""
    monkeypatch.setattr(transfer_module, "LOAD_CHUNK_BYTES", 4 * BLOCK_BYTES)
    return 4


class Job:
    """One job of a `TransferIn`, and the results that it has received."""

    def __init__(
        self,
        transfer: TransferIn,
        keys: Sequence[bytes],
        rows: Any,
        slots: Sequence[int] | None = None,
        *,
        left_s: float = 10.0,
        latest_s: float = math.inf,
        chunks: int = 1000,
        waits: bool = False,
    ) -> None:
        """left_s: the time limit from the job's beginning; latest_s: the time limit from now. chunks: the number of
        chunks to receive."""
        self.chunks: list[tuple[int, list[bool]]] = []
        self.done_at: list[float] = []
        self._asked_for = chunks
        self.started = time.monotonic()
        self.job = transfer.submit(
            keys,
            rows,
            list(range(len(keys))) if slots is None else slots,
            within=Within(left_s, self.started + latest_s),
            arrived=self._arrived,
            done=lambda: self.done_at.append(time.monotonic()),
            waits=waits,
        )

    def _arrived(self, first: int, hits: npt.NDArray[np.bool_]) -> bool:
        assert not self.done_at
        self.chunks.append((first, hits.tolist()))
        return len(self.chunks) < self._asked_for

    def wait(self, within_s: float = 10.0) -> list[bool]:
        """Wait until the job is done. Returns the hits of all chunks."""
        wait_until(lambda: self.done_at, within_s)
        return [hit for _, hits in self.chunks for hit in hits]

    @property
    def seconds(self) -> float:
        return self.done_at[0] - self.started


def put_damaged(server: Server, namespace: Namespace, key: bytes) -> None:
    """Set a block with a checksum that does not match its bytes."""
    with RawClient(server) as raw, KVStoreClient(server.endpoint, namespace) as client:
        raw.hello(namespace.canonical())
        raw.ask(*set_frames(1, [key], [block_of(key, namespace.block_bytes)], sums=bytes(8)))
        wait_until(lambda: client.contains([key]).all())


def empty_rows(count: int) -> Rows:
    return np.zeros((count, BLOCK_BYTES), dtype=np.uint8)


def test_blocks_arrive_in_their_rows_chunk_by_chunk(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn, counters: Counters, small_chunks: int
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(10)
    put_into(server, namespace, keys)
    rows = empty_rows(20)
    slots = list(range(19, 9, -1))
    transfer = start_in(server, namespace)
    job = Job(transfer, keys, rows, slots)
    assert job.wait() == [True] * 10
    assert [first for first, _ in job.chunks] == [0, 1, 5, 9]  # the first one soon shows the store's pace
    assert [bytes(rows[slot]) for slot in slots] == blocks_of(keys, BLOCK_BYTES)
    assert not rows[:10].any()
    counted = counters.take()
    assert counted.pop("transfer_in_seconds") > 0
    assert counted == {"transfer_in_blocks": 10, "transfer_in_bytes": 10 * BLOCK_BYTES}
    job = Job(transfer, keys, rows, slots)
    assert job.wait() == [True] * 10
    assert [first for first, _ in job.chunks] == [0, 2, 6]  # later jobs begin with larger chunks


def test_a_reported_chunk_is_complete_in_its_rows(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn, small_chunks: int
) -> None:
    """The bytes of a chunk are in their rows when it is reported, and later chunks reuse the same rows."""
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(12)
    put_into(server, namespace, keys)
    rows = empty_rows(small_chunks)
    seen: list[bytes] = []
    done = threading.Event()

    slots = [0, 1, 2, 3] * 3

    def arrived(first: int, hits: npt.NDArray[np.bool_]) -> bool:
        seen.extend(bytes(rows[slot]) for slot in slots[first : first + len(hits)])
        return True

    start_in(server, namespace).submit(
        keys,
        lambda: rows,
        slots,
        within=Within(10),
        arrived=arrived,
        done=done.set,
    )
    assert done.wait(10)
    assert seen == blocks_of(keys, BLOCK_BYTES)


def test_blocks_that_the_store_lacks_miss_and_the_rest_hit(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn, counters: Counters
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(5)
    put_into(server, namespace, [*keys[:2], *keys[3:]])
    assert Job(start_in(server, namespace), keys, empty_rows(5)).wait() == [True, True, False, True, True]
    assert counters.take()["missed_blocks"] == 1


def test_a_job_ends_when_its_owner_has_seen_enough(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn, counters: Counters, small_chunks: int
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(12)
    put_into(server, namespace, keys)
    job = Job(start_in(server, namespace), keys, empty_rows(12), chunks=2)
    assert len(job.wait()) == 5
    assert counters.take()["transfer_in_blocks"] == 5


def test_a_damaged_block_is_a_miss_that_is_counted_once(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn, counters: Counters, small_chunks: int
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(10)
    put_into(server, namespace, [*keys[:2], *keys[3:]])
    put_damaged(server, namespace, keys[2])
    transfer = start_in(server, namespace)
    assert Job(transfer, keys, empty_rows(10)).wait() == [True, True, False, *[True] * 7]
    for _ in range(3):
        Job(transfer, keys, empty_rows(10)).wait()
    counted = counters.take()
    assert counted["checksum_errors"] == 1 and counted["missed_blocks"] == 4


def test_damaged_blocks_of_concurrent_jobs_are_each_counted_once(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn, counters: Counters
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(24)
    for key in keys:
        put_damaged(server, namespace, key)
    transfer = start_in(server, namespace)
    for job in [Job(transfer, [key], empty_rows(1)) for key in keys]:
        assert job.wait() == [False]
    assert counters.take()["checksum_errors"] == len(keys)


def test_a_late_total_is_not_counted_twice(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn, counters: Counters
) -> None:
    """Two threads read the client's total: first 1, then 2. The thread that read 2 counts first."""
    transfer = start_in(server, new_namespace(BLOCK_BYTES))
    for total in (2, 1, 2, 3):
        transfer._count_corrupt(total)
    assert counters.take()["checksum_errors"] == 3


@pytest.mark.exclusive
def test_a_frozen_store_is_given_up_at_the_deadline(
    start_server: StartServer, new_namespace: MakeNamespace, start_in: StartIn, counters: Counters, small_chunks: int
) -> None:
    """A job's time begins when the job itself begins, and only two jobs wait for a shard at a time."""
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)
    keys = make_keys(8)
    put_into(server, namespace, keys)
    transfer = start_in(server, namespace, timeout_s=30)
    with server.stopped():
        jobs = [Job(transfer, keys, empty_rows(8), left_s=0.5) for _ in range(5)]
        for number, job in enumerate(jobs):
            assert job.wait() == [False] * 8
            assert job.seconds < 0.5 * (number // 2 + 1) + SLACK_S
    assert counters.take()["missed_blocks"] == 40


def test_no_byte_arrives_after_a_job_is_done(
    start_server: StartServer, new_namespace: MakeNamespace, start_in: StartIn
) -> None:
    """After a job is done, its rows belong to another request."""
    server, namespace = start_server(memory="256MiB"), new_namespace(1 << 20)
    keys = make_keys(16)
    put_into(server, namespace, keys)
    transfer = start_in(server, namespace)
    rows = np.zeros((16, 1 << 20), dtype=np.uint8)
    for left_s in (0.001, 0.002, 0.004, 0.008, 0.016):
        job = Job(transfer, keys, rows, left_s=left_s)
        job.wait()
        rows[:] = 0xEE
        again = Job(transfer, keys[:1], np.zeros((1, 1 << 20), dtype=np.uint8))
        again.wait()
        assert (rows == 0xEE).all()
    wait_until(lambda: Job(transfer, keys, rows).wait() == [True] * 16)


def test_a_job_past_its_deadline_asks_nothing(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn, counters: Counters
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(3)
    put_into(server, namespace, keys)
    assert Job(start_in(server, namespace), keys, empty_rows(3), left_s=-1).wait() == [False] * 3
    assert counters.take() == {"missed_blocks": 3}


def test_a_job_without_blocks_is_done(server: Server, new_namespace: MakeNamespace, start_in: StartIn) -> None:
    """A job may have no blocks, for example because all of them are in host memory."""
    job = Job(start_in(server, new_namespace(BLOCK_BYTES)), [], empty_rows(0))
    assert job.wait() == [] and job.chunks == []


def test_a_store_killed_between_two_chunks_is_a_miss_for_the_rest(
    start_server: StartServer, new_namespace: MakeNamespace, start_in: StartIn, small_chunks: int
) -> None:
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)
    keys = make_keys(12)
    put_into(server, namespace, keys)
    hits: list[bool] = []
    done = threading.Event()

    def arrived(first: int, some: npt.NDArray[np.bool_]) -> bool:
        hits.extend(some.tolist())
        if first == 0:
            server.kill()
        return True

    transfer = start_in(server, namespace)
    transfer.submit(keys, empty_rows(12), range(12), within=Within(30), arrived=arrived, done=done.set)
    assert done.wait(3 * TIMEOUT_S + SLACK_S)
    assert hits == [True] + [False] * 11
    server.restart()
    put_into(server, namespace, keys)
    wait_until(lambda: Job(transfer, keys, empty_rows(12)).wait() == [True] * 12)


@pytest.mark.parametrize("broken", ["out", "arrived", "slots"])
def test_a_job_ends_whatever_goes_wrong(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn, counters: Counters, broken: str
) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(2)
    put_into(server, namespace, keys)
    done = threading.Event()

    def fail(*_: object) -> Any:
        raise ZeroDivisionError("the engine's")

    start_in(server, namespace).submit(
        keys,
        fail if broken == "out" else empty_rows(2),
        [7, 0] if broken == "slots" else [0, 1],
        within=Within(10),
        arrived=fail if broken == "arrived" else lambda first, hits: False,
        done=done.set,
    )
    assert done.wait(10)
    assert counters.take()["failed_calls"] == 1


def test_all_jobs_get_their_turn(server: Server, new_namespace: MakeNamespace, start_in: StartIn) -> None:
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(6)
    put_into(server, namespace, keys)
    transfer = start_in(server, namespace)
    jobs = [Job(transfer, keys, empty_rows(6)) for _ in range(20)]
    assert transfer.drain(10) and transfer.waiting == 0
    assert all(job.wait() == [True] * 6 for job in jobs)


def test_promised_blocks_are_waited_for_and_miss_when_the_promise_ends(
    server: Server, new_namespace: MakeNamespace, counters: Counters
) -> None:
    namespace, keys = new_namespace(BLOCK_BYTES), make_keys(6)
    guard = StoreGuard(server.endpoint, namespace, timeout_s=5.0, counters=counters)
    transfer = TransferIn(guard, counters=counters)
    rows = empty_rows(6)
    with KVStoreClient(server.endpoint, namespace) as producer:
        promise = producer.promise(keys)
        job = Job(transfer, keys, rows, left_s=30, waits=True)
        late = Job(transfer, keys, empty_rows(6), left_s=0.3, waits=True)
        assert late.wait() == [] or not any(late.wait())
        assert late.seconds < 5
        put_into(server, namespace, keys[:4])
        wait_until(lambda: namespace_info(producer).awaited == 2, what="the last two are awaited")
        assert not job.done_at
        promise.withdraw()
        hits = job.wait()
        assert hits[:4] == [True] * 4 and not any(hits[4:])
        assert [bytes(row) for row in rows[:4]] == blocks_of(keys[:4], BLOCK_BYTES)
        # A job that waits for promised blocks ends when the transfer is closed.
        with producer.promise(keys[4:]):
            job = Job(transfer, keys[4:], empty_rows(2), left_s=30, waits=True)
            wait_until(lambda: namespace_info(producer).awaited, what="it waits")
            guard.close()
            transfer.close()
            assert not any(job.wait()) and job.seconds < 10


def test_over_a_slow_link_promised_blocks_arrive_in_small_pieces(
    start_server: StartServer, new_namespace: MakeNamespace, start_in: StartIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "WAITED_CHUNK_BYTES", 16 * BLOCK_BYTES)
    server = start_server("--unix-socket", "off")
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(64)
    put_into(server, namespace, keys)
    with SlowLink(server.port) as link:
        transfer = start_in(link, namespace, timeout_s=20)

        def sizes() -> list[int]:
            job = Job(transfer, keys, empty_rows(64), left_s=20, waits=True)
            assert job.wait(20) == [True] * 64
            return [len(hits) for _, hits in job.chunks]

        link.bytes_per_s = 4e6  # 0.13 s for the first piece
        assert sizes() == [8] + [4] * 14
        link.bytes_per_s = None
        assert 16 in sizes()


def test_a_job_waits_nearly_its_whole_time_though_calls_may_take_longer(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn
) -> None:
    namespace, keys = new_namespace(BLOCK_BYTES), make_keys(6)
    transfer = start_in(server, namespace, timeout_s=8.0)
    with KVStoreClient(server.endpoint, namespace) as producer, producer.promise(keys):
        job = Job(transfer, keys, empty_rows(6), left_s=6.0, waits=True)
        stays(lambda: not job.done_at, 4.0, "it does not give up long before its time")
        put_into(server, namespace, keys)
        assert job.wait() == [True] * 6


def test_closing_ends_every_job_and_later_ones_at_once(
    start_server: StartServer, new_namespace: MakeNamespace, start_in: StartIn, small_chunks: int
) -> None:
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)
    keys = make_keys(8)
    put_into(server, namespace, keys)
    transfer = start_in(server, namespace)
    with server.stopped():
        jobs = [Job(transfer, keys, empty_rows(8), left_s=30) for _ in range(6)]
        assert not transfer.drain(0.05)
        started = time.monotonic()
        transfer.close()
        assert time.monotonic() - started < 2 * TIMEOUT_S + SLACK_S
    for job in jobs:
        assert job.done_at and not any(job.wait())
    late = Job(transfer, keys, empty_rows(8))
    assert late.done_at and late.chunks == []


def test_blocks_that_were_read_can_be_evicted_again(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn
) -> None:
    """A transfer leaves no pins on the blocks that it read."""
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(4)
    put_into(server, namespace, keys)
    Job(start_in(server, namespace), keys, empty_rows(4)).wait()
    with KVStoreClient(server.endpoint, namespace) as client:
        assert namespace_info(client).pinned == 0


def test_a_job_that_falls_behind_ends_early(
    start_server: StartServer, new_namespace: MakeNamespace, start_in: StartIn, small_chunks: int
) -> None:
    """A job that is too slow ends early, so that the engine can compute the blocks and need not wait for the whole
    limit."""
    server = start_server("--unix-socket", "off")
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(40)
    put_into(server, namespace, keys)
    with SlowLink(server.port) as link:
        transfer = start_in(link, namespace, timeout_s=20)
        link.bytes_per_s = 50_000  # 52 s for all
        job = Job(transfer, keys, empty_rows(40), left_s=4.0, chunks=1)
        assert job.wait().count(False) >= 1
        assert 0.4 < job.seconds < 2.0  # a fifth of 4 s, and a little more
        blocks, seconds = transfer.take_pace()
        assert blocks < 5 and seconds == pytest.approx(job.seconds, abs=0.2)
        assert transfer.take_pace() == (0, 0.0)


def test_a_hopelessly_slow_store_is_detected_by_its_first_block(
    start_server: StartServer, new_namespace: MakeNamespace, start_in: StartIn, small_chunks: int, counters: Counters
) -> None:
    server = start_server("--unix-socket", "off")
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(40)
    put_into(server, namespace, keys)
    with SlowLink(server.port) as link:
        transfer = start_in(link, namespace, timeout_s=20)
        link.bytes_per_s = 200_000  # 0.3 s for a block, 13 s for all
        job = Job(transfer, keys, empty_rows(40), left_s=5.0)
        assert job.wait() == [True]
        assert 0.2 < job.seconds < 0.6 + SLACK_S
        assert counters.take()["missed_blocks"] == 39
        link.bytes_per_s = None
        assert Job(transfer, keys, empty_rows(40), left_s=5.0).wait() == [True] * 40


def test_blocks_that_arrived_in_time_count_individually(
    start_server: StartServer, new_namespace: MakeNamespace, start_in: StartIn, small_chunks: int
) -> None:
    """If a chunk is late, the blocks of it that have arrived are still used, and show how fast the store is."""
    server = start_server("--unix-socket", "off")
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(40)
    put_into(server, namespace, keys)
    with SlowLink(server.port) as link:
        transfer = start_in(link, namespace, timeout_s=20)
        assert Job(transfer, keys[:1], empty_rows(1)).wait() == [True]
        transfer.take_pace()
        link.bytes_per_s = 200_000  # 0.33 s for a block
        rows = empty_rows(40)
        hits = Job(transfer, keys, rows, left_s=6.0, chunks=1).wait()  # 1.14 s for the first chunk
        came = hits.index(False)
        assert 1 <= came < small_chunks and not any(hits[came:])
        assert [row.tobytes() for row in rows[:came]] == [block_of(key, BLOCK_BYTES) for key in keys[:came]]
        assert transfer.take_pace()[0] == came


def test_a_large_load_is_not_abandoned_over_one_slow_block(
    start_server: StartServer, new_namespace: MakeNamespace, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the pace of its first block, the load would exceed its time many times. At the store's real pace, it exceeds
    its time only a few times."""
    monkeypatch.setattr("kvstore_client.engine.transfer_in.TRIED_S", 20.0)
    namespace = new_namespace(BLOCK_BYTES)
    keys = make_keys(100_000)
    server = start_server("--unix-socket", "off")
    put_into(server, namespace, keys[:7])
    guard = StoreGuard(server.endpoint, namespace, timeout_s=20, counters=Counters())
    transfer = TransferIn(guard, counters=Counters())
    job = Job(transfer, keys, empty_rows(12), [index % 12 for index in range(len(keys))], left_s=10.0, chunks=4)
    job.wait()
    found = [hit for _, hits in job.chunks for hit in hits]  # the size of the chunks depends on the store's pace
    assert found[:7] == [True] * 7 and not any(found[7:]) and len(found) < 20
    transfer.close()
    guard.close()


def test_a_useless_job_ends_whenever_its_turn_comes(
    server: Server, new_namespace: MakeNamespace, counters: Counters
) -> None:
    """Two jobs wait for a store that does not answer, and the other jobs wait to begin. All end at their latest
    time."""
    namespace, keys = new_namespace(BLOCK_BYTES), make_keys(4)
    put_into(server, namespace, keys)
    guard = StoreGuard(server.endpoint, namespace, timeout_s=20.0, counters=counters)
    transfer = TransferIn(guard, counters=counters)
    assert Job(transfer, keys, empty_rows(4)).wait() == [True] * 4
    with server.stopped():
        jobs = [Job(transfer, keys, empty_rows(4), left_s=20.0, latest_s=1.0) for _ in range(6)]
        for job in jobs:
            assert not any(job.wait()) and job.seconds < 5.0
    assert counters.take()["missed_blocks"] == 24
    transfer.close()
    guard.close()


# ---- many jobs at a time -----------------------------------------------------------------------------------------


def keys_of(server: Server, endpoints: Sequence[str], namespace: Namespace, count: int) -> list[bytes]:
    """Return keys that this server owns, of several servers."""
    with KVStoreClient(endpoints, namespace) as client:
        mine = [key for key in make_keys(8 * count) if client.locate(key, ask=False)[0].endpoint == server.endpoint]
    return mine[:count]


@pytest.mark.exclusive
def test_a_slow_shard_delays_only_the_jobs_that_need_it(
    start_server: StartServer, new_namespace: MakeNamespace, counters: Counters, small_chunks: int
) -> None:
    """Two jobs wait for the slow shard, others wait behind them, and some jobs need another shard."""
    servers, namespace = [start_server(), start_server()], new_namespace(BLOCK_BYTES)
    endpoints = [server.endpoint for server in servers]
    slow, fast = [keys_of(server, endpoints, namespace, 6) for server in servers]
    with KVStoreClient(endpoints, namespace) as client:
        client.set(slow + fast, blocks_of(slow + fast, BLOCK_BYTES), deferred=False)
    guard = StoreGuard(endpoints, namespace, timeout_s=2.0, counters=counters)
    transfer = TransferIn(guard, counters=counters)
    assert Job(transfer, slow + fast, empty_rows(12)).wait() == [True] * 12
    with servers[0].stopped():
        held_up = [Job(transfer, slow, empty_rows(6), left_s=4.0) for _ in range(12)]
        others = [Job(transfer, fast, empty_rows(6)) for _ in range(12)]
        wait_until(lambda: all(job.done_at for job in others))
        assert all(job.wait() == [True] * 6 for job in others)
        assert not any(job.done_at for job in held_up)
        assert [bool(job.job.began) for job in held_up] == [True] * 2 + [False] * 10
        assert not any(any(job.wait(20.0)) for job in held_up)
    transfer.close()
    guard.close()


def test_jobs_that_wait_for_promised_blocks_delay_no_others(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn
) -> None:
    namespace, keys = new_namespace(BLOCK_BYTES), make_keys(40)
    put_into(server, namespace, keys[:4])
    transfer = start_in(server, namespace)
    before = set(threading.enumerate())
    with KVStoreClient(server.endpoint, namespace) as producer, producer.promise(keys[4:]):
        waiting = [Job(transfer, [key], empty_rows(1), left_s=30, waits=True) for key in keys[4:]]
        wait_until(lambda: namespace_info(producer).awaited == len(waiting), what="all wait at a time")
        assert len(set(threading.enumerate()) - before) == 2
        assert Job(transfer, keys[:4], empty_rows(4)).wait(5.0) == [True] * 4
        put_into(server, namespace, keys[4:])
        assert all(job.wait() == [True] for job in waiting)
    assert transfer.take_pace()[0] == 4, "what was waited for says nothing of the store's pace"


def test_a_cancelled_job_ends_in_any_state(
    start_server: StartServer, new_namespace: MakeNamespace, start_in: StartIn, counters: Counters, small_chunks: int
) -> None:
    """The cancelled job may be on the wire, queued, or waiting for promised blocks. After its end, its rows belong to
    the caller again."""
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)
    keys = make_keys(8)
    put_into(server, namespace, keys)
    transfer = start_in(server, namespace, timeout_s=30)
    rows = [empty_rows(8) for _ in range(7)]
    with server.stopped():
        jobs = [Job(transfer, keys, some, left_s=30, waits=some is rows[6]) for some in rows]
        wait_until(lambda: sum(bool(job.job.began) for job in jobs) == 3)
        for job in jobs:
            transfer.cancel(job.job)
        for job, some in zip(jobs, rows, strict=True):
            assert job.wait(5.0) == []
            some[:] = 0xEE
    again = Job(transfer, keys, empty_rows(8))
    assert again.wait() == [True] * 8
    assert all((some == 0xEE).all() for some in rows)
    transfer.cancel(again.job)  # too late: it has no effect
    assert len(again.done_at) == 1 and not counters.take().get("missed_blocks")


def test_a_job_whose_turn_never_comes_still_ends(
    server: Server, new_namespace: MakeNamespace, start_in: StartIn, counters: Counters
) -> None:
    """A job may never begin, for example because its caller has no free rows."""
    transfer = start_in(server, new_namespace(BLOCK_BYTES), timeout_s=0.3)
    job = Job(transfer, make_keys(3), lambda: None)
    assert job.wait() == [False] * 3 and 0.3 <= job.seconds < 0.3 + SLACK_S
    assert counters.take() == {"missed_blocks": 3}
