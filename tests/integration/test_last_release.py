"""The current code reads the last release's disk tier and answers its HELLO. The shard in test_interoperability.py
sends the last release's WELCOME. tests/upgrade/test_rolling.py runs both releases together."""

from __future__ import annotations

import tarfile
from pathlib import Path

from kvstore_client import KVStoreClient
from tests.support.disk import disk_flags, wait_until_on
from tests.support.harness import RawClient, StartServer, blocks_of, pack
from tests.support.last_release import DISK, DISK_FLAGS, DISK_SIZE, KEYS, NAMESPACE


def test_the_disk_tier_of_the_last_release_is_served(start_server: StartServer, tmp_path: Path) -> None:
    with tarfile.open(DISK) as packed:
        packed.extractall(tmp_path, filter="data")
    server = start_server(*DISK_FLAGS, *disk_flags(tmp_path / "disk", DISK_SIZE))
    with KVStoreClient(server.endpoint, NAMESPACE) as client:
        wait_until_on(client)
        assert [bytes(block or b"") for block in client.get(KEYS).blocks] == blocks_of(KEYS, NAMESPACE.block_bytes)


def test_a_client_of_the_last_release_is_answered_in_its_version(start_server: StartServer) -> None:
    server = start_server()
    with RawClient(server) as raw:
        # The HELLO of the last release: version 3, and none of the fields that came after `nixl`.
        fields = [1, 0, 3, NAMESPACE.canonical(), "kvstore-client/0.1.0 pid=7", b"", 1, "", True, False]
        tag, _, protocol, *_ = raw.ask(pack(*fields))
        assert (tag, protocol) == (65, 3)
        tag, _, protocol, *_ = raw.ask(pack(*fields, 4))
        assert (tag, protocol) == (65, 4)
