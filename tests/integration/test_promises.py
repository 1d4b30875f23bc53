"""Promises: a client that waits for a promised block gets it when it is set, and misses at once if it will not be
set."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import wire
from kvstore_client import AsyncKVStoreClient, AsyncPromise, KVStoreClient, KVStoreError, Lookup, Namespace
from kvstore_client._links.call import Call
from kvstore_client.engine.flights import Flights
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.errors import Timeout
from tests.support.harness import (
    ERROR,
    GET,
    PROMISE,
    PROMISE_REPLY,
    WITHDRAW,
    WITHDRAW_REPLY,
    MakeNamespace,
    RawClient,
    Server,
    StartServer,
    blocks_of,
    make_keys,
    namespace_info,
    pack,
    shard_info,
    stays,
    wait_until,
)
from tests.support.slow_link import SlowLink

BLOCK_BYTES = 4096
SOON_S = 1.0  # the time for immediate events, on a busy machine
LONG_S = 20.0  # longer than any test waits


Connect = Callable[..., KVStoreClient]


@pytest.fixture
def connect(server: Server, namespace: Namespace) -> Iterator[Connect]:
    clients: list[KVStoreClient] = []

    def connect(**options: Any) -> KVStoreClient:
        clients.append(KVStoreClient(server.endpoint, namespace, timeout_s=5, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


class Reading:
    """A `get_into` with `wait_s`, on a thread of its own."""

    def __init__(self, client: KVStoreClient, keys: list[bytes], wait_s: float = LONG_S, **options: Any) -> None:
        self.rows = np.zeros((len(keys), BLOCK_BYTES), dtype=np.uint8)
        self.keys = keys
        self.seconds = 0.0
        self._error: Exception | None = None
        self._present: Any = None
        self._thread = threading.Thread(target=self._run, args=(client, wait_s, options))
        self._began = time.monotonic()
        self._thread.start()

    def _run(self, client: KVStoreClient, wait_s: float, options: dict[str, Any]) -> None:
        try:
            self._present = client.get_into(self.keys, self.rows, wait_s=wait_s, **options)
        except Exception as error:
            self._error = error
        self.seconds = time.monotonic() - self._began

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def present(self, within_s: float = SOON_S) -> list[bool]:
        """Return which blocks have arrived, and check their bytes."""
        self._thread.join(within_s)
        assert not self.waits, f"it still waits after {within_s} s"
        if self._error is not None:
            raise self._error
        found: list[bool] = self._present.tolist()
        for there, row, block in zip(found, self.rows, blocks_of(self.keys, BLOCK_BYTES), strict=True):
            assert not there or row.tobytes() == block, "wrong bytes"
        return found


def awaited(client: KVStoreClient, count: int) -> None:
    wait_until(lambda: namespace_info(client).awaited == count, what=f"{count} blocks are awaited")


def test_a_promised_block_is_waited_for_until_it_is_set(connect: Connect) -> None:
    producer, consumer, keys = connect(), connect(), make_keys(4)
    producer.set(keys[:1], blocks_of(keys[:1], BLOCK_BYTES))
    with producer.promise(keys) as promise:
        assert promise.mine.tolist() == [False, True, True, True]
        assert promise.present.tolist() == [True, False, False, False]
        assert not promise.others.any()
        reading = Reading(consumer, keys)
        awaited(producer, 3)
        producer.set(keys[1:3], blocks_of(keys[1:3], BLOCK_BYTES))
        awaited(producer, 1)
        assert reading.waits
        producer.set(keys[3:], blocks_of(keys[3:], BLOCK_BYTES))
        assert reading.present() == [True] * 4
    assert namespace_info(producer).promised == 0


def test_a_wait_for_promised_blocks_is_not_part_of_the_time_of_a_request(connect: Connect) -> None:
    producer, consumer, keys = connect(), connect(), make_keys(2)

    def counted() -> tuple[int, float]:
        rows = [each for each in shard_info(consumer).requests if each.verb == "get"]
        return sum(sum(each.counts) for each in rows), sum(each.seconds for each in rows)

    requests, seconds = counted()
    with producer.promise(keys):
        reading = Reading(consumer, keys[:1])
        stays(lambda: reading.waits, 0.5)
        producer.set(keys[:1], blocks_of(keys[:1], BLOCK_BYTES))
        assert reading.present() == [True]
        assert Reading(consumer, keys[1:], wait_s=0.5).present() == [False], "its time ends the wait, too"
    assert counted()[0] == requests + 2 and counted()[1] < seconds + 0.3


def test_blocks_without_a_promise_are_missing_at_once(connect: Connect) -> None:
    consumer, keys = connect(), make_keys(4)
    assert Reading(consumer, keys).present() == [False] * 4
    consumer.set(keys[:1], blocks_of(keys[:1], BLOCK_BYTES))
    assert Reading(consumer, keys).present() == [True, False, False, False]


def test_a_fruitless_wait_is_not_repeated(connect: Connect) -> None:
    """After a wait without a block, the client does not ask the store again, however long the wait took."""
    producer, consumer, keys = connect(), connect(), make_keys(3)
    promise = producer.promise(keys)
    before = shard_info(producer).gets
    reading = Reading(consumer, keys)
    awaited(producer, 3)
    stays(lambda: reading.waits, 0.3)
    promise.withdraw()
    assert reading.present() == [False] * 3
    assert shard_info(producer).gets == before + 1


def test_without_wait_s_a_promised_block_is_missing_at_once(connect: Connect) -> None:
    producer, consumer, keys = connect(), connect(), make_keys(2)
    with producer.promise(keys):
        assert Reading(consumer, keys, wait_s=0).present() == [False, False]


def test_a_promises_end_ends_the_wait(connect: Connect) -> None:
    producer, consumer, keys = connect(), connect(), make_keys(3)
    promise = producer.promise(keys)
    reading = Reading(consumer, keys)
    awaited(producer, 3)
    promise.withdraw()
    assert reading.present() == [False] * 3
    promise.withdraw()  # again: nothing happens
    promise.renew()  # as by a thread that does not know of the withdrawal yet
    assert namespace_info(producer).promised == 0

    with pytest.raises(RuntimeError, match="the prefill failed"), producer.promise(keys):
        reading = Reading(consumer, keys)
        awaited(producer, 3)
        raise RuntimeError("the prefill failed")
    assert reading.present() == [False] * 3


def test_a_promise_expires_unless_it_is_renewed(connect: Connect) -> None:
    producer, consumer, keys = connect(), connect(), make_keys(2)
    promise = producer.promise(keys, ttl_s=0.6)
    reading = Reading(consumer, keys)
    for _ in range(3):
        stays(lambda: reading.waits, 0.4)
        promise.renew()
    assert reading.present(0.6 + SOON_S) == [False, False]
    assert reading.seconds >= 1.7
    assert producer.promise(keys).mine.all(), "what has ended can be promised again"


def test_a_wait_ends_at_its_own_timeout(connect: Connect) -> None:
    producer, consumer, keys = connect(), connect(), make_keys(40)  # more keys than the client waits for at a time
    producer.set(keys[30:], blocks_of(keys[30:], BLOCK_BYTES))
    with producer.promise(keys):
        reading = Reading(consumer, keys, wait_s=0.5)
        assert reading.present(0.5 + SOON_S) == [False] * 30 + [True] * 10
        assert reading.seconds >= 0.5


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_vanished_producers_promises_end(server: Server, connect: Connect, namespace: Namespace, end: str) -> None:
    consumer, keys = connect(), make_keys(3)
    code = (
        "import sys; from kvstore_client import KVStoreClient, Namespace\n"
        f"client = KVStoreClient(sys.argv[1], {namespace!r})\n"
        "promise = client.promise([bytes.fromhex(key) for key in sys.argv[2:]])\n"
        "print('promised', flush=True); sys.stdin.read(); client.close()\n"
    )
    command = [sys.executable, "-c", code, server.endpoint, *(key.hex() for key in keys)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "promised\n"
        reading = Reading(consumer, keys)
        awaited(consumer, 3)
        if end == "kill":
            os.kill(process.pid, signal.SIGKILL)
        else:
            process.stdin.close()
        assert reading.present() == [False] * 3
        process.stdin.close()
    assert all((each.promised, each.awaited) == (0, 0) for each in shard_info(consumer).namespaces)


def test_only_one_of_two_clients_promises_a_block(connect: Connect) -> None:
    first, second, keys = connect(), connect(), make_keys(4)
    one = first.promise(keys[:3])
    two = second.promise(keys[1:])
    assert one.mine.tolist() == [True] * 3
    assert two.mine.tolist() == [False, False, True] and two.others.tolist() == [True, True, False]
    one.withdraw()
    assert second.promise(keys).mine.all()
    two.withdraw()


def test_a_block_set_by_another_client_fulfils_the_promise(connect: Connect) -> None:
    producer, other, consumer, keys = connect(), connect(), connect(), make_keys(2)
    with producer.promise(keys):
        reading = Reading(consumer, keys)
        awaited(producer, 2)
        other.set(keys, blocks_of(keys, BLOCK_BYTES))
        assert reading.present() == [True, True]
        assert namespace_info(producer).promised == 0


def test_repeated_keys_are_one_promise(connect: Connect) -> None:
    producer, keys = connect(), make_keys(2)
    promise = producer.promise([keys[0], keys[1], keys[0]])
    assert promise.mine.tolist() == [True] * 3
    assert namespace_info(producer).promised == 2
    promise.withdraw()
    assert producer.promise([]).mine.tolist() == []


def test_a_lookup_reports_present_and_promised_blocks(connect: Connect) -> None:
    producer, consumer, keys = connect(), connect(), make_keys(6)
    assert consumer.lookup(keys) == Lookup(0, 0)
    producer.set(keys[:2] + keys[3:4], blocks_of(keys[:2] + keys[3:4], BLOCK_BYTES))
    assert consumer.lookup(keys) == Lookup(present=2, promised=2)
    with producer.promise(keys[:5]):
        assert consumer.lookup(keys) == Lookup(present=2, promised=5)
        assert consumer.contains(keys).tolist() == [True, True, False, True, False, False]
        assert consumer.match_prefix(keys) == 2
    assert consumer.lookup(keys) == Lookup(present=2, promised=2)
    assert consumer.lookup([]) == Lookup(0, 0)


def test_each_of_many_waiters_gets_its_own_block(connect: Connect) -> None:
    producer, keys = connect(), make_keys(12)
    consumers = [connect() for _ in range(3)]
    with producer.promise(keys):
        readings = [Reading(consumers[number % 3], [key]) for number, key in enumerate(keys)]
        awaited(producer, 12)
        for number in (7, 0, 11):
            producer.set([keys[number]], blocks_of([keys[number]], BLOCK_BYTES))
            assert readings[number].present() == [True]
        assert sum(reading.waits for reading in readings) == 9
    for number in {*range(12)} - {7, 0, 11}:
        assert readings[number].present() == [False]


def test_a_long_chain_is_read_while_it_is_set(connect: Connect) -> None:
    producer, consumer, keys = connect(), connect(), make_keys(300)
    with producer.promise(keys):
        reading = Reading(consumer, keys)
        for first in range(0, 300, 7):
            part = keys[first : first + 7]
            producer.set(part, blocks_of(part, BLOCK_BYTES), parent=keys[first - 1] if first else None)
        assert reading.present(10) == [True] * 300


def test_other_requests_are_served_on_a_waiting_connection(connect: Connect) -> None:
    """A client reads and sets blocks while another of its reads waits."""
    client, keys = connect(), make_keys(8)
    producer = connect()
    with producer.promise(keys[:4]):
        reading = Reading(client, keys[:4])
        awaited(producer, 4)
        client.set(keys[4:], blocks_of(keys[4:], BLOCK_BYTES))
        assert Reading(client, keys[4:], wait_s=0).present() == [True] * 4
        assert reading.waits
    assert reading.present() == [False] * 4


def test_a_client_may_wait_for_its_own_promise(connect: Connect) -> None:
    client, keys = connect(), make_keys(2)
    with client.promise(keys):
        reading = Reading(client, keys)
        awaited(client, 2)
        client.set(keys, blocks_of(keys, BLOCK_BYTES))
        assert reading.present() == [True, True]


def test_waiters_of_a_stopping_server_miss(start_server: StartServer, namespace: Namespace) -> None:
    server, keys = start_server(), make_keys(2)
    with (
        KVStoreClient(server.endpoint, namespace, timeout_s=2, fail_open=True) as producer,
        KVStoreClient(server.endpoint, namespace, timeout_s=2, fail_open=True) as consumer,
    ):
        promise = producer.promise(keys)
        assert promise.mine.all()
        reading = Reading(consumer, keys)
        awaited(producer, 2)
        began = time.monotonic()
        server.stop()
        assert reading.present(5) == [False, False]
        assert time.monotonic() - began < 5, "the end of the server did not wait for the waiters"
        assert producer.promise(keys).mine.all(), "without a store everybody computes for himself"
        promise.withdraw()
        server.restart()
        wait_until(lambda: not consumer.get_into(keys, reading.rows).any())
        assert producer.promise(keys).mine.all()


def test_renewing_after_a_store_restart_restores_a_promise(start_server: StartServer, namespace: Namespace) -> None:
    """The producer computes on while the store restarts. Clients that wait when the store dies miss at once. After the
    renewal, clients wait again for the remaining blocks."""
    server, keys = start_server(), make_keys(6)
    blocks = blocks_of(keys, BLOCK_BYTES)
    with (
        KVStoreClient(server.endpoint, namespace, timeout_s=2, fail_open=True) as producer,
        KVStoreClient(server.endpoint, namespace, timeout_s=2, fail_open=True) as other,
        KVStoreClient(server.endpoint, namespace, timeout_s=2, fail_open=True) as consumer,
    ):
        promise = producer.promise(keys, ttl_s=LONG_S)
        producer.set(keys[:2], blocks[:2])
        promise.renew()
        for meanwhile in (True, False):  # whether the promise is also renewed while the store is down
            reading = Reading(consumer, keys[2:])
            awaited(producer, 4)
            server.kill()
            assert reading.present(5) == [False] * 4
            if meanwhile:
                promise.renew()
            server.restart()
            for client in (other, consumer, producer):
                wait_until(lambda client=client: client.info().shards, what="the store answers")
            with other.promise(keys[5:]) as taken:
                assert taken.mine.all()
                promise.renew()
                assert consumer.lookup(keys[2:]) == Lookup(0, 4)
                assert other.promise(keys[2:5]).others.all()
            assert consumer.lookup(keys[2:]) == Lookup(0, 3), "the last block was promised by the other client alone"
            promise.renew()
            assert consumer.lookup(keys[2:]) == Lookup(0, 4)
            assert Reading(consumer, keys[:2]).present() == [False] * 2, "they were set, and nobody will set them again"
        reading = Reading(consumer, keys[2:])
        awaited(producer, 4)
        producer.set(keys[2:4], blocks[2:4])
        awaited(producer, 2)
        promise.renew(0.5)
        began = time.monotonic()
        assert reading.present() == [True, True, False, False], "nobody has renewed it any more"
        assert time.monotonic() - began <= 0.5 + 1.5
        assert (namespace_info(producer).promised, namespace_info(producer).awaited) == (0, 0)
        promise.withdraw()
        assert not producer._promiser._held and not other._promiser._held


def test_an_unreachable_store_raises(start_server: StartServer, namespace: Namespace) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, namespace, timeout_s=1) as client:
        server.kill()
        with pytest.raises(KVStoreError):
            client.promise(make_keys(2))


def test_wrong_arguments_are_refused(connect: Connect) -> None:
    client, keys = connect(), make_keys(2)
    rows = np.zeros((2, BLOCK_BYTES), dtype=np.uint8)
    for ttl_s in (0, -1, 601, float("nan")):
        with pytest.raises(ValueError, match="ttl_s"):
            client.promise(keys, ttl_s=ttl_s)
        with pytest.raises(ValueError, match="ttl_s"), client.promise(keys) as promise:
            promise.renew(ttl_s)
    for wait_s in (-1, 601, float("nan")):
        with pytest.raises(ValueError, match="wait_s"):
            client.get_into(keys, rows, wait_s=wait_s)
    with pytest.raises(ValueError, match="a sum of at most 600 s"):
        client.get_into(keys, rows, wait_s=599, timeout_s=2)


def test_requests_beyond_the_limits_are_refused(server: Server, namespace: Namespace) -> None:
    keys = b"".join(make_keys(2))
    with RawClient(server) as raw:
        raw.hello(namespace.canonical())
        for ttl_ms in (0, -5, 600_001):
            assert raw.ask(pack(PROMISE, 9, 1000, 2, 16, ttl_ms), keys)[:3] == [ERROR, 9, int(wire.ErrorCode.LIMIT)]
        for wait_ms in (-1, 1001):
            get = pack(GET, 9, 1000, 2, 16, 0, True, False, False, False, wait_ms)
            assert raw.ask(get, keys)[:3] == [ERROR, 9, int(wire.ErrorCode.LIMIT)]
        assert raw.ask(pack(PROMISE, 9, 1000, 2, 16, 1000), keys) == [PROMISE_REPLY, 9, bytes(2)]
        assert raw.ask(pack(WITHDRAW, 9, 1000, 2, 16), keys) == [WITHDRAW_REPLY, 9, 2]
        assert raw.ask(pack(WITHDRAW, 9, 1000, 2, 16), keys) == [WITHDRAW_REPLY, 9, 0]


def test_an_account_bounds_the_promises(server: Server, namespace: Namespace) -> None:
    """One connection promises blocks until it is refused, with a reason. When it ends, everything is released."""
    with KVStoreClient(server.endpoint, namespace, timeout_s=10) as other:
        assert shard_info(other).held_bytes["promises"] == 0
        with RawClient(server) as raw:
            raw.hello(namespace.canonical())
            count = 0
            while True:
                keys = b"".join(make_keys(8192, count))
                answer = raw.ask(pack(PROMISE, 9, 1000, 8192, 16, 600_000), keys)
                if answer[0] == ERROR:
                    break
                count += 8192
            assert "there is no room for" in answer[3] or "at once" in answer[3]
            info = shard_info(other)
            assert info.held_bytes["promises"] >= count * 200 and sum(info.held_bytes.values()) <= info.held_limit_bytes
            assert count >= 100_000
            for _ in range(3):  # a renewal takes no more memory
                keys = b"".join(make_keys(8192))
                assert raw.ask(pack(PROMISE, 9, 1000, 8192, 16, 600_000), keys) == [PROMISE_REPLY, 9, bytes(8192)]
        wait_until(lambda: shard_info(other).held_bytes["promises"] == 0)


def test_each_promise_of_a_client_holds_until_it_is_withdrawn(connect: Connect) -> None:
    """A client has several promises of the same blocks, like two requests of an engine with a common prefix. Ending one
    promise does not end the others."""
    producer, other = connect(), connect()
    keys = make_keys(6)
    with producer.promise(keys[:4]) as first:
        with producer.promise(keys) as second:
            assert first.mine.all() and second.mine.all()
            second.renew()
        assert other.lookup(keys) == Lookup(0, 4)
        with producer.promise(keys[:2]):
            first.withdraw()
            first.withdraw()
            assert other.lookup(keys) == Lookup(0, 2)
        assert other.lookup(keys) == Lookup(0, 0)
    assert not producer._promiser._held


def test_an_unreferenced_promise_ends_with_its_time(connect: Connect) -> None:
    producer, other = connect(), connect()
    keys = make_keys(4)
    dropped = producer.promise(keys, ttl_s=60)
    del dropped
    gc.collect()
    assert other.lookup(keys) == Lookup(0, 4)
    with producer.promise(keys):
        pass
    assert other.lookup(keys) == Lookup(0, 0)
    assert not producer._promiser._held


def test_an_unanswered_renewal_ends_nothing(server: Server, connect: Connect) -> None:
    producer, other = connect(fail_open=True), connect()
    keys = make_keys(4)
    promise = producer.promise(keys, ttl_s=60, timeout_s=0.3)
    for _ in range(2):
        with server.stopped():
            promise.renew()
        assert other.lookup(keys) == Lookup(0, 4)
    promise.renew()
    promise.withdraw()
    assert other.lookup(keys) == Lookup(0, 0)
    assert not producer._promiser._held


def test_a_renewal_refused_by_one_shard_ends_nothing_on_others(
    start_server: StartServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server("--shards", "2")
    keys = make_keys(200)
    with (
        KVStoreClient(server.endpoint, namespace, timeout_s=5) as producer,
        KVStoreClient(server.endpoint, namespace, timeout_s=5) as other,
        producer.promise(keys) as promise,
    ):
        ask = producer._promiser._ask

        def one_refuses(*arguments: Any) -> list[Call]:
            calls = ask(*arguments)
            assert len(calls) == 2
            calls[0].answer.reply = wire.Error(calls[0].id, int(wire.ErrorCode.LIMIT), "it has no room")
            return calls

        with monkeypatch.context() as patch, pytest.raises(KVStoreError, match="no room"):
            patch.setattr(producer._promiser, "_ask", one_refuses)
            promise.renew()
        assert other.lookup(keys) == Lookup(0, len(keys))
        promise.withdraw()
        assert other.lookup(keys) == Lookup(0, 0)


def test_a_promise_not_answered_in_time_is_withdrawn(server: Server, namespace: Namespace) -> None:
    """The shard was stopped, and makes the promise when it continues. The client then withdraws that promise, and keeps
    its earlier ones."""
    keys = make_keys(3)
    with (
        KVStoreClient(server.endpoint, namespace, timeout_s=5) as producer,
        KVStoreClient(server.endpoint, namespace) as other,
    ):
        before = producer.promise(keys[:1])
        with server.stopped(), pytest.raises(Timeout):
            producer.promise(keys, ttl_s=600, timeout_s=0.2)
        assert not producer.contains(keys).any()  # on the same connection, so the shard has read all of it
        assert other.lookup(keys) == Lookup(0, 1)
        assert other.lookup(keys[1:]) == Lookup(0, 0)
        before.withdraw()
        assert other.lookup(keys) == Lookup(0, 0)


async def _cancelled(server: Server, namespace: Namespace, keys: list[bytes]) -> None:
    async with AsyncKVStoreClient(server.endpoint, namespace, timeout_s=5) as producer:
        assert not (await producer.contains(keys)).any()
        with server.stopped():
            making = asyncio.ensure_future(producer.promise(keys, ttl_s=600))
            await asyncio.sleep(0.1)
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making
        assert not (await producer.contains(keys)).any()  # on the same connection, so the promise is made
        while await producer.lookup(keys) != Lookup(0, 0):
            await asyncio.sleep(0.01)


def test_a_promise_of_a_cancelled_call_is_withdrawn(server: Server, namespace: Namespace) -> None:
    asyncio.run(asyncio.wait_for(_cancelled(server, namespace, make_keys(3)), SOON_S + 4))


async def _together(endpoint: str, namespace: Namespace, keys: list[bytes]) -> list[bool]:
    rows = np.zeros((len(keys), BLOCK_BYTES), dtype=np.uint8)
    async with (
        AsyncKVStoreClient(endpoint, namespace, timeout_s=5) as producer,
        AsyncKVStoreClient(endpoint, namespace, timeout_s=5) as consumer,
    ):
        async with await producer.promise(keys) as promise:
            assert promise.mine.all()
            reading = asyncio.ensure_future(consumer.get_into(keys, rows, wait_s=LONG_S))
            assert await consumer.lookup(keys) == Lookup(0, len(keys))
            await producer.set(keys, blocks_of(keys, BLOCK_BYTES))
            found: list[bool] = (await reading).tolist()
        return found


def test_the_asynchronous_client_behaves_the_same(server: Server, namespace: Namespace) -> None:
    assert asyncio.run(_together(server.endpoint, namespace, make_keys(3))) == [True] * 3


async def _awaited(server: Server, namespace: Namespace, keys: list[bytes]) -> None:
    async with (
        AsyncKVStoreClient(server.endpoint, namespace, timeout_s=5, concurrency=1) as producer,
        AsyncKVStoreClient(server.endpoint, namespace, timeout_s=5) as other,
    ):
        promise = await producer.promise(keys, ttl_s=600, timeout_s=0.5)
        for call in (promise.renew, promise.withdraw):
            with server.stopped():
                calling = asyncio.ensure_future(call())
                turns = 0
                while not calling.done():
                    await asyncio.sleep(0.01)
                    turns += 1
            assert turns > 20, "the event loop went on while the store was silent"
            assert isinstance(calling.exception(), Timeout) == (call == promise.renew)
        assert await other.lookup(keys) == Lookup(0, 0)
        async with await producer.promise(keys, ttl_s=600) as promise:
            rows = np.zeros((len(keys), BLOCK_BYTES), dtype=np.uint8)
            waiting = asyncio.ensure_future(producer.get_into(keys, rows, wait_s=LONG_S))  # on the client's only thread
            while not any(
                each.awaited for each in (await other.info()).shards[0].namespaces if each.id == namespace.id
            ):
                await asyncio.sleep(0.01)
            await promise.renew(ttl_s=300)
            leaving = asyncio.ensure_future(promise.withdraw())
            await asyncio.sleep(0)
            leaving.cancel()
        assert not (await waiting).any()


def test_an_asynchronous_promise_is_renewed_and_withdrawn_without_stopping_the_loop(
    server: Server, namespace: Namespace
) -> None:
    asyncio.run(asyncio.wait_for(_awaited(server, namespace, make_keys(3)), LONG_S))


def test_a_promise_cannot_be_pickled_or_copied(connect: Connect) -> None:
    with connect().promise(make_keys(1)) as promise:
        for refused, article in ((promise, "a Promise"), (AsyncPromise(promise), "an AsyncPromise")):
            for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match=f"^{article} cannot be pickled or copied, because it belongs to"):
                    copied(refused)


def test_a_waiter_gets_its_answer_in_time_from_a_frozen_store(server: Server, namespace: Namespace) -> None:
    """Each of several waiters gets its answer in time, although one thread asks for all of them and a lookup may take
    longer than the remaining time."""
    counters = Counters()
    guard = StoreGuard(server.endpoint, namespace, timeout_s=5, counters=counters)
    flights = Flights([guard], timeout_s=2.0, counters=counters)
    began = time.monotonic()
    expected = [flights.expect([key], 1, within_s=0.5) for key in make_keys(4)]
    time.sleep(0.3)
    with server.stopped():
        wait_until(lambda: [flights.poll(each) for each in expected] == [0] * 4, what="all are told")
        assert 0.5 <= time.monotonic() - began <= 0.5 + 1.5
    for each in expected:
        flights.end(each)
    flights.close()
    guard.close()


def test_over_a_slow_link_a_sets_first_blocks_arrive_early(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    """The client splits the SET to suit the speed of the link, which it has measured in an earlier set."""
    server, namespace = start_server("--unix-socket", "off"), new_namespace(64 << 10)
    keys = make_keys(64)
    blocks = blocks_of(keys, 64 << 10)
    with (
        SlowLink(server.port) as link,
        KVStoreClient(link.endpoint, namespace) as producer,
        KVStoreClient(server.endpoint, namespace) as consumer,
    ):
        link.bytes_per_s = 4e6  # the link takes a second for all blocks
        producer.set(keys[:16], blocks[:16])
        promise = producer.promise(keys)
        setting = threading.Thread(target=lambda: producer.set(keys[16:], blocks[16:]))
        setting.start()
        out = np.zeros((1, 64 << 10), dtype=np.uint8)
        assert consumer.get_into(keys[16:17], out, wait_s=10).all() and out.tobytes() == blocks[16]
        assert setting.is_alive() and not consumer.contains(keys[-8:]).any()
        setting.join()
        assert consumer.contains(keys).all()
        promise.withdraw()
