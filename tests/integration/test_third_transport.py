"""A shard and a client whose blocks move by a third transport, neither in band nor through mapped memory."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.node.children import StartError
from kvstore.node.fitting import transport_misfits
from kvstore.node.supervisor import Supervisor
from kvstore.node.tls import NodeTLS
from kvstore.plugins import TRANSPORTS
from kvstore.shard.loop import Shard
from kvstore.shard.setup import ShardConfig
from kvstore.shard.turns import SLOW_TURN_S
from kvstore.wire import ShardAddress
from kvstore.wire.remote_memory import DESCRIPTORS, Sharing
from kvstore_client import ConnectionLost, KVStoreClient, KVStoreError
from kvstore_client._links.connector import Connector
from kvstore_client.memory import host_memory
from tests.support.certificates import Authority
from tests.support.fabric import Fabric
from tests.support.harness import MakeNamespace, blocks_of, make_keys, wait_until
from tests.support.packages import install
from tests.support.settings import load

BLOCK = 20_000
MEMORY = 32 << 20


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    fabric = Fabric()
    monkeypatch.setattr(Connector, "sharing", fabric)
    yield fabric
    fabric.broken = False
    fabric.close()


@contextmanager
def serving(local: socket.socket | None = None, sharing: Sharing = DESCRIPTORS, **more: Any) -> Iterator[str]:
    """Run a shard in this process. Gives its endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
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
            **more,
        )
        shard = Shard(config, listener, local, sharing)
        thread = threading.Thread(target=shard.run, name="shard")
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            shard.drain()
            thread.join()


@pytest.fixture
def endpoint(fabric: Fabric, tmp_path: Path) -> Iterator[str]:
    """A shard whose memory clients read through the fabric, and not through mapped memory."""
    path = str(tmp_path / "shard")
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(path)
        local.listen()
        local.setblocking(False)
        with serving(local, fabric, unix_path=path, unix_users=[os.getuid()]) as endpoint:
            yield endpoint


PLUGIN = """
from tests.support.fabric import Fabric
fabric = Fabric()
def sharing():
    return fabric
def missing():
    raise ImportError("there is no such card; expected another")
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    """The `fabric` transport of an installed third-party package, whose other transport cannot be used here."""
    points = {"kvstore.transports/fabric": "sharing", "kvstore.transports/no-card": "missing"}
    install(monkeypatch, tmp_path / "site", "fabric_of_others", PLUGIN, points)
    fabric = TRANSPORTS.find("fabric")()
    assert isinstance(fabric, Fabric)
    yield fabric
    fabric.close()
    sys.modules.pop("fabric_of_others")


def test_another_packages_transport_moves_the_blocks(installed: Fabric, new_namespace: MakeNamespace) -> None:
    keys, namespace = make_keys(300), new_namespace(BLOCK)
    expected = np.frombuffer(b"".join(blocks_of(keys, BLOCK)), dtype=np.uint8).reshape(300, BLOCK)
    with (
        serving(transport="fabric") as endpoint,
        KVStoreClient(endpoint, namespace, transport="fabric") as client,
        KVStoreClient(endpoint, namespace) as other,
    ):
        assert client.set(keys, expected).created == 300
        out = np.zeros((300, BLOCK), dtype=np.uint8)
        assert client.get_into(keys, out).all() and (out == expected).all()
        assert (client.stats.path, installed.reads) == ("fabric", 300)
        assert client.info().shards[0].transport == "fabric" and not client.info().shards[0].nixl
        assert other.get(keys).blocks == [row.tobytes() for row in expected]
        assert (other.stats.path, installed.reads) == ("tcp", 300)
        installed.broken = True
        assert client.get(keys).blocks == [row.tobytes() for row in expected] and client.stats.path == "tcp"
        installed.broken = False


def test_a_transport_that_needs_long_progress_is_a_slow_turn(installed: Fabric, new_namespace: MakeNamespace) -> None:
    keys, namespace = make_keys(20), new_namespace(BLOCK)
    with (
        serving(transport="fabric") as endpoint,
        KVStoreClient(endpoint, namespace, transport="fabric") as client,
        KVStoreClient(endpoint, namespace) as other,
    ):
        client.set(keys, blocks_of(keys, BLOCK))
        installed.progress_s = 2 * SLOW_TURN_S

        def helped_slowly() -> bool:
            assert client.get(keys).blocks == blocks_of(keys, BLOCK)
            return other.info().shards[0].slow_turns["transport"] > 0

        wait_until(helped_slowly, what="blocks were lent when the shard looked whether it has to help")
        installed.progress_s = 0.0
        assert client.stats.path == "fabric" and client.stats.failures == 0


def test_a_shard_with_another_transport_sends_blocks_in_band(installed: Fabric, new_namespace: MakeNamespace) -> None:
    keys = make_keys(20)
    with serving() as endpoint, KVStoreClient(endpoint, new_namespace(BLOCK), transport="fabric") as client:
        client.set(keys, blocks_of(keys, BLOCK))
        assert client.get(keys).blocks == blocks_of(keys, BLOCK) and client.stats.path == "tcp"


def test_an_unknown_transport_is_named_with_the_known_ones(
    installed: Fabric, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    known = "fabric, nixl, no-card"
    with pytest.raises(ValueError, match=f"transport 'none': expected one of {known}"):
        KVStoreClient("a:1", new_namespace(BLOCK), transport="none")
    with pytest.raises(ImportError, match="there is no such card; expected another"):
        KVStoreClient("a:1", new_namespace(BLOCK), transport="no-card")
    for given, problem in (("none", f"expected one of {known}"), ("no-card", "there is no such card"), ("fabric", "")):
        config = load(None, {}, {"transport": given})
        assert problem in "".join(map(str, transport_misfits(config)))
        assert bool(problem) == bool(list(transport_misfits(config)))
    with pytest.raises(StartError, match="--transport: transport 'none': expected one of"):
        Supervisor(load(None, {}, {"transport": "none", "port": 0}))
    issued = authority.issue("node")
    with pytest.raises(ValueError, match="transport 'fabric': expected none with TLS"):
        KVStoreClient("tls://a:1", new_namespace(BLOCK), transport="fabric", tls_ca=authority.file)
    with pytest.raises(StartError, match="--transport: clients would read blocks without TLS"):
        NodeTLS(
            load(None, {}, {"tls_cert": issued.cert, "tls_key": issued.key, "transport": "fabric"}),
            [],
            selectors.DefaultSelector(),
        )


def test_every_call_works_over_the_fabric(endpoint: str, fabric: Fabric, new_namespace: MakeNamespace) -> None:
    keys = make_keys(300)
    expected = np.frombuffer(b"".join(blocks_of(keys, BLOCK)), dtype=np.uint8).reshape(300, BLOCK)
    with KVStoreClient(endpoint, new_namespace(BLOCK), shared_memory=True, timeout_s=10) as client:
        assert client.set(keys[:150], expected[:150]).created == 150  # through the ring
        mine = host_memory(150, BLOCK)
        mine[:] = expected[150:]
        assert client.set(keys[150:], mine).created == 150  # read from the client's memory
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


def test_a_client_that_requires_shared_memory_gets_an_error(
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
