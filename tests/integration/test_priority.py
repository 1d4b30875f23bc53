"""Priorities of blocks: when room is needed, blocks of a higher priority stay."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvstore_client import AsyncKVStoreClient, KVStoreClient
from tests.support.harness import MakeNamespace, Server, StartServer, blocks_of, make_keys

BLOCK_BYTES = 65536


def test_higher_priority_blocks_outlive_newer_ones(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server(memory="8MiB", segment="1MiB")
    keys = make_keys(400)
    with KVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES)) as client:
        client.set(keys[:32], blocks_of(keys[:32], BLOCK_BYTES), priority=2)
        for at in range(32, 400, 16):
            client.set(keys[at : at + 16], blocks_of(keys[at : at + 16], BLOCK_BYTES))
        present = client.contains(keys)
    assert present[:32].all() and not present[32:].all()


def test_the_asyncio_client_sends_priorities_too(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server(memory="8MiB", segment="1MiB")
    keys = make_keys(400)

    async def run() -> Any:
        async with AsyncKVStoreClient(server.endpoint, new_namespace(BLOCK_BYTES)) as client:
            await client.set(keys[:32], blocks_of(keys[:32], BLOCK_BYTES), priority=1)
            for at in range(32, 400, 16):
                await client.set(keys[at : at + 16], blocks_of(keys[at : at + 16], BLOCK_BYTES))
            assert set((await client.scrub()).values()) == {0}  # there is no disk tier
            return await client.contains(keys[:32])

    assert asyncio.run(run()).all()


@pytest.mark.parametrize(
    ("priority", "error", "says"),
    [
        (-1, ValueError, "0 to 3"),
        (4, ValueError, "0 to 3"),
        ("high", TypeError, "whole number"),
        (1.5, TypeError, "whole number"),
        (None, TypeError, "whole number"),
    ],
)
def test_a_priority_out_of_range_is_refused(
    server: Server, new_namespace: MakeNamespace, priority: Any, error: type[Exception], says: str
) -> None:
    keys = make_keys(1)
    with KVStoreClient(server.endpoint, new_namespace(4096)) as client:
        with pytest.raises(error, match=f"priority={priority!r}.*{says}"):
            client.set(keys, blocks_of(keys, 4096), priority=priority)
        assert client.set(keys, blocks_of(keys, 4096), priority=np.int64(3)).created == 1  # type: ignore[arg-type]
