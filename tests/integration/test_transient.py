"""Transient blocks: each is dropped when it was read so often as its setter said, or when its time is over; it never
reaches a disk, and takes no memory beyond its limit."""

from __future__ import annotations

import numpy as np
import pytest
from collections.abc import Callable, Iterator
from typing import Any

from kvstore_client import KVStoreClient, Namespace
from tests.support.harness import MakeNamespace, Server, StartServer, blocks_of, make_keys, namespace_info

BLOCK_BYTES = 4096


def test_smoke(tmp_path, start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--unix-socket", str(tmp_path / "kv.sock"), memory="16MiB", segment="1MiB")
    ns = new_namespace(BLOCK_BYTES)
    for shm in (True, False):
        with KVStoreClient(server.endpoint, ns, shared_memory=shm) as client:
            keys = make_keys(8, first=100 * shm)
            blocks = blocks_of(keys, BLOCK_BYTES)
            result = client.set(keys, blocks, reads=2)
            assert result.created == 8, result
            assert namespace_info(client).transient_blocks == 8
            for _ in range(2):
                assert client.contains(keys).all()
                assert [bytes(b) for b in client.get(keys).blocks] == blocks
            assert not client.contains(keys).any()
            assert client.get(keys).hit == 0
            info = namespace_info(client)
            assert info.transient_blocks == 0 and info.blocks == 0
            assert client.set(keys, blocks, reads=1).created == 8
            with client.borrow(keys) as borrowed:
                assert [bytes(b) for b in borrowed] == blocks
                assert client.contains(keys).all() == shm
            assert not client.contains(keys).any()
            print(client.stats.path)
