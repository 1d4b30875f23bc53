"""Real clients read blocks with NIXL from real servers. UCX uses what this machine has: shared memory or TCP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.wire.transports.nixl import nixl_package, sharing
from kvstore_client import KVStoreClient, Namespace
from tests.support.harness import MakeNamespace, StartServer, blocks_of, make_keys, wait_until

pytestmark = pytest.mark.skipif(not nixl_package(), reason="NIXL is not installed")
BLOCK = 100_000


@pytest.mark.parametrize("size", [1, 4096, BLOCK, 12 << 20])
def test_every_call_reads_blocks_with_nixl(size: int, start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--nixl", memory="512MiB", segment="16MiB")
    keys = make_keys(200 if size <= BLOCK else 9)
    expected = np.frombuffer(b"".join(blocks_of(keys, size)), dtype=np.uint8).reshape(len(keys), size)
    with KVStoreClient(server.endpoint, new_namespace(size), nixl=True, timeout_s=20) as client:
        assert client.set(keys, expected).created == len(keys)
        out = np.zeros(expected.shape, dtype=np.uint8)
        assert client.get_into(keys, out).all() and (out == expected).all()
        assert client.stats.path == "nixl"
        assert client.get(keys).blocks == [row.tobytes() for row in expected]
        assert {at: bytes(block) for at, block in client.stream_get(keys)} == dict(enumerate(map(bytes, expected)))
        with client.borrow(keys[:5]) as blocks:
            assert [bytes(block) for block in blocks if block is not None] == [row.tobytes() for row in expected[:5]]
        out[:] = 0
        assert client.load_prefix(keys, out) == len(keys) and (out == expected).all()
        assert client.get([bytes(16)]).hit == 0
        assert client.delete(keys) == len(keys)
        assert client.info().shards[0].lent_blocks == 0 and client.info().shards[0].nixl
        assert client.stats.path == "nixl" and client.stats.checksum_errors == 0


def test_if_the_server_does_not_allow_it_blocks_come_in_band(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    server = start_server()
    keys = make_keys(20)
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), nixl=True) as client:
        client.set(keys, blocks_of(keys, BLOCK))
        assert client.get(keys).blocks == blocks_of(keys, BLOCK) and client.stats.path == "tcp"
    with KVStoreClient(start_server("--nixl").endpoint, new_namespace(BLOCK)) as client:
        client.set(keys, blocks_of(keys, BLOCK))
        assert client.get(keys).blocks == blocks_of(keys, BLOCK) and client.stats.path == "tcp"


READS = """
import sys
import numpy as np
from kvstore_client import KVStoreClient, Namespace
namespace = Namespace(model=sys.argv[2], dtype="uint8", block_tokens=1, block_bytes=100_000)
keys = [number.to_bytes(16, "big") for number in range(200)]
blocks = np.arange(200, dtype=np.uint8)[:, None].repeat(100_000, 1)
with KVStoreClient(sys.argv[1], namespace, nixl=True, timeout_s=60) as client:
    client.set(keys, blocks)
    out = np.zeros_like(blocks)
    assert client.get_into(keys, out).all() and (out == blocks).all()
    assert client.stats.path == "nixl", client.stats.path
"""


def test_over_tcp_the_server_makes_progress_too(start_server: StartServer) -> None:
    server = start_server("--nixl", UCX_TLS="tcp,self")
    done = subprocess.run(
        [sys.executable, "-c", READS, server.endpoint, "over-tcp"],
        env={**os.environ, "UCX_TLS": "tcp,self"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


CRASHES = """
import os, signal, sys
if "kvstore.wire.transports.nixl" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_crashing_library_stops_neither_server_nor_client(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CRASHES)
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    server, sound = start_server("--nixl", PYTHONPATH=paths), start_server("--nixl")
    keys, namespace = make_keys(20), new_namespace(BLOCK)
    with KVStoreClient(server.endpoint, namespace, nixl=True) as client:
        client.set(keys, blocks_of(keys, BLOCK))
        assert client.get(keys).blocks == blocks_of(keys, BLOCK)
    assert "nixl is not used: a process that tried it crashed (SIGSEGV)" in server.log.read_text()
    for each in (server, sound):
        done = subprocess.run(
            [sys.executable, "-c", READS.replace('"nixl"', '"tcp"'), each.endpoint, "crashes"],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("nixl is not used: a process that tried it crashed (SIGSEGV)") == 1, done.stderr


def test_memory_that_changes_its_namespace_is_registered_again(start_server: StartServer) -> None:
    """Two namespaces take segments from each other, while clients hold NIXL's keys for that memory."""
    server = start_server("--nixl", "--policy", "lru", memory="8MiB", segment="1MiB")
    spaces = [Namespace(model=name, dtype="uint8", block_tokens=1, block_bytes=BLOCK) for name in ("one", "two")]
    with (
        KVStoreClient(server.endpoint, spaces[0], nixl=True) as one,
        KVStoreClient(server.endpoint, spaces[1], nixl=True) as two,
    ):
        for round_number in range(12):
            client = (one, two)[round_number % 2]
            keys = make_keys(60 * (round_number + 1))[-60:]
            client.set(keys, blocks_of(keys, BLOCK))
            there = client.contains(keys)
            result = client.get(keys)
            assert result.hit >= there.sum() > 40
            expected = blocks_of(keys, BLOCK)
            assert all(block in (None, want) for block, want in zip(result.blocks, expected, strict=True))
        for client in (one, two):
            assert client.stats.path == "nixl" and client.stats.checksum_errors == 0


def test_unreachable_memory_is_read_in_band(
    start_server: StartServer, new_namespace: MakeNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the shard ends between its greeting and the first read, its memory cannot be reached. This is not a protocol
    error."""

    def unreachable(*_: object) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    server = start_server("--nixl", memory="64MiB")
    keys, used = make_keys(20), sharing()
    assert used is not None
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), nixl=True) as client:
        monkeypatch.setattr(type(used.agent), "add_remote_agent", unreachable)
        client.set(keys, blocks_of(keys, BLOCK))
        assert client.get(keys).blocks == blocks_of(keys, BLOCK) and client.stats.path == "tcp"


def test_a_server_killed_during_a_read_is_a_miss(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--nixl", memory="256MiB")
    keys, namespace = make_keys(1000), new_namespace(BLOCK)
    expected = np.frombuffer(b"".join(blocks_of(keys, BLOCK)), dtype=np.uint8).reshape(1000, BLOCK)
    out = np.zeros(expected.shape, dtype=np.uint8)
    with KVStoreClient(server.endpoint, namespace, nixl=True, fail_open=True, timeout_s=5) as client:
        client.set(keys, expected)
        assert client.get_into(keys, out).all()
        killer = threading.Timer(0.05, server.kill)
        killer.start()
        longest, rounds = 0.0, 0
        while killer.is_alive() or rounds == 0:
            out[:] = 0
            began = time.monotonic()
            present = client.get_into(keys, out)
            longest, rounds = max(longest, time.monotonic() - began), rounds + 1
            assert (out[present] == expected[present]).all()
        assert longest < 7
        killer.join()
        assert not client.get_into(keys, out).any()
        server.restart()
        wait_until(lambda: client.set(keys, expected).error == 0)
        out[:] = 0
        assert client.get_into(keys, out).all() and (out == expected).all()


def test_memory_lent_to_a_killed_reader_is_returned(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--nixl", memory="128MiB")
    namespace = new_namespace(BLOCK)
    keys = make_keys(500)
    with KVStoreClient(server.endpoint, namespace, timeout_s=10) as client:
        client.set(keys, blocks_of(keys, BLOCK))
        child = os.fork()
        if child == 0:  # the clients and the NIXL agent of that process are separate
            try:
                reader = KVStoreClient(server.endpoint, namespace, nixl=True)
                while True:
                    reader.get(keys)
            finally:
                os._exit(1)
        wait_until(lambda: client.info().shards[0].lent_blocks > 0)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wait_until(lambda: client.info().shards[0].lent_blocks == 0)
        assert client.get(keys).blocks == blocks_of(keys, BLOCK)


def test_a_forked_child_reads_with_its_own_agent(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--nixl", memory="128MiB")
    keys = make_keys(50)
    with KVStoreClient(server.endpoint, new_namespace(BLOCK), nixl=True, timeout_s=10) as client:
        client.set(keys, blocks_of(keys, BLOCK))
        assert client.get(keys).hit == 50
        child = os.fork()
        if child == 0:
            try:
                right = client.get(keys).blocks == blocks_of(keys, BLOCK) and client.stats.path == "nixl"
                os._exit(0 if right else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.get(keys).blocks == blocks_of(keys, BLOCK) and client.stats.path == "nixl"
