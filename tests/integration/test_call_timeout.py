"""The ``timeout_s`` of a single call: shorter or longer than the client's own, and no matter of anybody else's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore import wire
from kvstore_client import AsyncKVStoreClient, KVStoreClient, Timeout
from kvstore_client.results import SetResult
from tests.support.harness import MakeNamespace, Server, StartServer, blocks_of, make_keys, wait_until

BLOCK_BYTES = 4096
SHORT_S = 0.2
LONG_S = 30.0
SLACK_S = 1.0  # what a busy machine may add to a deadline

KEYS = make_keys(3)
CALLS: dict[str, Callable[..., Any]] = {
    "set": lambda client, **timeout: client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES), **timeout),
    "contains": lambda client, **timeout: client.contains(KEYS, **timeout),
    "match_prefix": lambda client, **timeout: client.match_prefix(KEYS, **timeout),
    "get_into": lambda client, **timeout: client.get_into(KEYS, np.empty((3, BLOCK_BYTES), np.uint8), **timeout),
}

calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.mark.exclusive
@calls
@pytest.mark.parametrize("shards", [1, 3])
def test_a_call_ends_in_the_time_it_was_given(
    start_server: StartServer, new_namespace: MakeNamespace, call: Callable[..., Any], shards: int
) -> None:
    server = start_server("--shards", str(shards))
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=LONG_S) as client:
        call(client)  # every shard is connected to
        with server.stopped():
            started = time.monotonic()
            with pytest.raises(Timeout):
                call(client, timeout_s=SHORT_S)
            assert SHORT_S * 0.9 < time.monotonic() - started < SHORT_S + SLACK_S
        call(client)


@calls
def test_a_call_may_take_longer_than_the_client_allows_others(
    start_server: StartServer, new_namespace: MakeNamespace, call: Callable[..., Any]
) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=SHORT_S) as client:
        call(client)
        with server.stopped():
            thawing = threading.Timer(4 * SHORT_S, lambda: [process.resume() for process in server.shards()])
            thawing.start()
            started = time.monotonic()
            call(client, timeout_s=LONG_S)
            assert time.monotonic() - started > 2 * SHORT_S
            thawing.join()


@pytest.mark.exclusive
@calls
def test_a_client_that_fails_open_misses_at_the_calls_deadline(
    start_server: StartServer, new_namespace: MakeNamespace, call: Callable[..., Any]
) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=LONG_S, fail_open=True) as client:
        with server.stopped():
            started = time.monotonic()
            missed = call(client, timeout_s=SHORT_S)
            assert time.monotonic() - started < SHORT_S + SLACK_S
        assert getattr(missed, "error", 3) == 3 and not np.any(getattr(missed, "created", missed))


@calls
@pytest.mark.parametrize("timeout_s", [0, -1, wire.MAX_DEADLINE_MS / 1000 + 1, float("nan")])
def test_a_time_that_cannot_be_is_an_error(
    server: Server, new_namespace: MakeNamespace, call: Callable[..., Any], timeout_s: float
) -> None:
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES)) as client:
        with pytest.raises(ValueError, match="timeout_s="):
            call(client, timeout_s=timeout_s)
        assert not client.contains(KEYS).any()


@pytest.mark.exclusive
@calls
def test_the_asynchronous_client_passes_it_on(
    start_server: StartServer, new_namespace: MakeNamespace, call: Callable[..., Any]
) -> None:
    server, namespace = start_server(), new_namespace(BLOCK_BYTES)

    async def run() -> float:
        async with AsyncKVStoreClient(server.endpoint, namespace, timeout_s=LONG_S) as client:
            await call(client)
            with pytest.raises(ValueError, match="timeout_s="):
                await call(client, timeout_s=0)
            with server.stopped():
                started = time.monotonic()
                with pytest.raises(Timeout):
                    await call(client, timeout_s=SHORT_S)
                return time.monotonic() - started

    assert asyncio.run(run()) < SHORT_S + SLACK_S


def test_a_call_that_gives_up_early_takes_nothing_from_one_that_waits(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    """A silence shorter than what the client allows says nothing about the shard."""
    server = start_server()
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=LONG_S) as client:
        client.set(KEYS, blocks_of(KEYS, BLOCK_BYTES), deferred=False)
        found: list[int] = []
        with server.stopped():
            patient = threading.Thread(target=lambda: found.append(client.match_prefix(KEYS)))
            patient.start()
            wait_until(lambda: client._core.links[0].pending)
            with pytest.raises(Timeout):
                client.contains(KEYS, timeout_s=SHORT_S)
        patient.join(10)
        assert found == [3] and client.stats.failures == 0


def test_a_call_that_never_had_its_turn_to_send_breaks_nothing(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    """Another call's blocks fill the connection to a shard that stands still for a moment."""
    server = start_server(memory="256MiB")
    keys = make_keys(64)
    with KVStoreClient(server.endpoint, new_namespace(1 << 20), timeout_s=LONG_S) as client:
        results: list[SetResult] = []
        with server.stopped():
            blocks = np.zeros((64, 1 << 20), dtype=np.uint8)
            sender = threading.Thread(target=lambda: results.append(client.set(keys, blocks)))
            sender.start()
            wait_until(lambda: client._core.links[0].sending.owner is not None)
            with pytest.raises(Timeout):
                client.contains(keys, timeout_s=SHORT_S)
        started = time.monotonic()
        sender.join(LONG_S)
        assert time.monotonic() - started < LONG_S / 2
        assert results and results[0].created == 64
        assert client.stats.failures == 0 and client.stats.reconnects == 0


def test_impatient_calls_beside_large_ones_cost_those_nothing(server: Server, new_namespace: MakeNamespace) -> None:
    keys = make_keys(64)
    blocks = np.zeros((64, 1 << 20), dtype=np.uint8)
    with KVStoreClient(server.endpoint, new_namespace(1 << 20), timeout_s=LONG_S) as client:
        results: list[SetResult] = []
        sender = threading.Thread(target=lambda: results.extend(client.set(keys, blocks, force=True) for _ in range(3)))
        sender.start()
        while sender.is_alive():
            with contextlib.suppress(Timeout):
                client.contains(keys, timeout_s=0.002)
        assert [result.error for result in results] == [0, 0, 0]
        assert client.stats.failures == 0 and client.stats.reconnects == 0


@pytest.mark.exclusive
def test_a_call_does_not_wait_for_another_ones_connecting_beyond_its_own_time(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server()
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES), timeout_s=5.0) as client:
        with server.stopped():
            client._core.links[0].close()  # as if the connection had been found dead
            patient = threading.Thread(target=lambda: client.contains(KEYS))
            patient.start()
            wait_until(lambda: client._core.links[0].connecting.owner is not None)
            started = time.monotonic()
            with pytest.raises(Timeout):
                client.contains(KEYS, timeout_s=SHORT_S)
            assert time.monotonic() - started < SHORT_S + SLACK_S
        patient.join(10)
        assert not patient.is_alive()
