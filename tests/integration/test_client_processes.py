"""The client processes of benchmarks, in small sizes: every operation in all processes, and the error if a process
fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.remote_kv_cache.bench_cores import SHARED_NAMES, TCP_NAMES
from benchmarks.remote_kv_cache.client_processes import LIMITS, Clients, client_processes, operation_of
from benchmarks.remote_kv_cache.plain import plain_peer
from benchmarks.remote_kv_cache.processes import free_port, kvstore_server
from benchmarks.remote_kv_cache.shapes import HEADLINE
from benchmarks.remote_kv_cache.transfers import connect

BLOCKS = 3
COUNT = 2


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with kvstore_server(4 * COUNT * BLOCKS * HEADLINE.block_bytes, shards=2) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def clients(endpoint: str) -> Iterator[Clients]:
    with ExitStack() as stack:
        ports = [stack.enter_context(plain_peer(BLOCKS, HEADLINE.block_bytes)) for _ in range(COUNT)]
        yield stack.enter_context(client_processes(endpoint, ports, BLOCKS, shared_memory=True))


def test_every_operation_runs_in_all_or_some_processes(clients: Clients, endpoint: str) -> None:
    names = (*TCP_NAMES, *SHARED_NAMES)
    assert set(names) == {*LIMITS, *LIMITS.values()}
    for count in (COUNT, 1):
        made = [operation_of(clients, name, count, count * BLOCKS * HEADLINE.block_bytes) for name in names]
        for operation in made:
            operation.before()
            seconds = operation.run()
            operation.after()
            assert seconds is not None and 0 < seconds < 60, operation.name
            assert not operation.limit or operation.limit in {other.name for other in made}
    with connect(endpoint, "clients", HEADLINE.block_bytes) as client:
        assert client.info().full_blocks == COUNT * BLOCKS


def test_a_failed_step_in_a_process_fails_here_with_the_reason(endpoint: str) -> None:
    with (
        plain_peer(BLOCKS, HEADLINE.block_bytes) as port,
        client_processes(endpoint, [port], BLOCKS) as clients,
        pytest.raises(RuntimeError, match=r"block 0: the bytes read differ from those written"),
    ):
        clients.do("before", "plain socket get", 1)
        clients.do("after", "plain socket get", 1)  # nothing was read


def test_a_process_that_cannot_start_gives_the_reason(endpoint: str) -> None:
    with (
        pytest.raises(RuntimeError, match="ConnectionRefusedError"),
        client_processes(endpoint, [free_port()], BLOCKS),
    ):
        pass
