"""A shard and a client whose blocks move in a third way, neither in band nor through mapped memory."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.shard.loop import Shard
from kvstore.shard.setup import ShardConfig
from kvstore.wire import ShardAddress
from kvstore_client import ConnectionLost, KVStoreClient, KVStoreError
from kvstore_client._links.link import Link
from kvstore_client.memory import host_memory
from tests.support.fabric import Fabric
from tests.support.harness import MakeNamespace, blocks_of, make_keys

BLOCK = 20_000
MEMORY = 32 << 20


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    fabric = Fabric()
    monkeypatch.setattr(Link, "sharing", fabric)
    yield fabric
    fabric.broken = False
    fabric.close()


@pytest.fixture
def endpoint(fabric: Fabric, tmp_path: Path) -> Iterator[str]:
    """A shard of this process, whose memory the fabric reads."""
    path = str(tmp_path / "shard")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as local:
        local.bind(path)
        local.listen()
        listener.setblocking(False)
        local.setblocking(False)
        port = listener.getsockname()[1]
        config = ShardConfig(
            node="fabric",
            shard=0,
            listen_fd=-1,
            ready_fd=-1,
            memory_bytes=MEMORY,
            segment_bytes=1 << 20,
            shards=[ShardAddress(f"fabric-{secrets.token_hex(4)}", "", port, 1.0)],
            log_level="warning",
            drain_s=1.0,
            policy="default",
            rules=[],
            disk=None,
            unix_path=path,
            unix_users=[os.getuid()],
        )
        shard = Shard(config, listener, local, sharing=fabric)
        thread = threading.Thread(target=shard.run, name="shard")
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            shard.drain()
            thread.join()


def test_every_call_works_when_the_fabric_moves_the_blocks(
    endpoint: str, fabric: Fabric, new_namespace: MakeNamespace
) -> None:
    keys = make_keys(300)
    expected = np.frombuffer(b"".join(blocks_of(keys, BLOCK)), dtype=np.uint8).reshape(300, BLOCK)
    with KVStoreClient(endpoint, new_namespace(BLOCK), shared_memory=True, timeout_s=10) as client:
        assert client.set(keys[:150], expected[:150]).created == 150  # through the ring
        mine = host_memory(150, BLOCK)
        mine[:] = expected[150:]
        assert client.set(keys[150:], mine).created == 150  # from where it is
        assert fabric.reads == 300
        out = np.zeros((300, BLOCK), dtype=np.uint8)
        assert client.get_into(keys, out).all() and (out == expected).all()
        assert fabric.reads == 600
        assert client.get(keys).blocks == [row.tobytes() for row in expected]
        assert {at: bytes(block) for at, block in client.stream_get(keys)} == dict(enumerate(map(bytes, expected)))
        with client.borrow(keys[:10], verify=True) as blocks:
            assert [bytes(block) for block in blocks if block is not None] == [row.tobytes() for row in expected[:10]]
        assert client.load_prefix(keys, out) == 300
        assert client.delete(keys) == 300 and not client.contains(keys).any()


def test_when_the_fabric_fails_blocks_come_in_band(endpoint: str, fabric: Fabric, new_namespace: MakeNamespace) -> None:
    keys, more = make_keys(25)[:20], make_keys(25)[20:]
    expected = blocks_of(keys, BLOCK)
    with KVStoreClient(endpoint, new_namespace(BLOCK), timeout_s=10) as client:
        client.set(keys, expected)
        assert client.get(keys).blocks == expected and client.stats.path == "shared memory"
        fabric.broken = True
        assert client.get(keys).blocks == expected and client.stats.path == "tcp"
        assert client.set(more, blocks_of(more, BLOCK)).created == 5
        assert client.info().shards[0].lent_blocks == 0


def test_who_insists_on_shared_memory_is_told_that_it_cannot_be_read(
    endpoint: str, fabric: Fabric, new_namespace: MakeNamespace
) -> None:
    keys, more = make_keys(25)[:20], make_keys(25)[20:]
    with KVStoreClient(endpoint, new_namespace(BLOCK), shared_memory=True, timeout_s=10) as client:
        client.set(keys, blocks_of(keys, BLOCK))
        fabric.broken = True
        with pytest.raises(KVStoreError, match="the fabric is broken"):
            client.set(more, blocks_of(more, BLOCK))
        assert not client.contains(more).any()
        out = np.zeros((20, BLOCK), dtype=np.uint8)
        with pytest.raises(ConnectionLost, match="the fabric is broken"):
            client.get_into(keys, out)
        assert not out.any()
    with KVStoreClient(endpoint, new_namespace(BLOCK), shared_memory=True, fail_open=True) as client:
        fabric.broken = False
        client.set(keys, blocks_of(keys, BLOCK))
        fabric.broken = True
        assert client.get(keys).hit == 0
