"""What a client writes into its release ring harms only that client."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore._cext import IdRing
from kvstore.wire import remote_memory
from kvstore_client import KVStoreClient
from tests.attack.scale import FULL
from tests.support.harness import MakeNamespace, StartServer, blocks_of, make_keys, shard_info, wait_until

BLOCK = 16 << 10


def test_nonsense_in_a_release_ring_releases_nothing_of_others(
    start_server: StartServer, tmp_path: Path, new_namespace: MakeNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client's ring is overwritten repeatedly while that client reads. Another client holds blocks all the time."""
    server = start_server("--unix-socket", str(tmp_path / "s"))
    namespace, keys, rng = new_namespace(BLOCK), make_keys(64), random.Random(5)
    blocks = blocks_of(keys, BLOCK)
    rings: list[memoryview] = []

    class Kept:
        NBYTES = IdRing.NBYTES

        def __new__(cls, memory: memoryview) -> IdRing:  # type: ignore[misc] # a stand-in that makes the real thing
            rings.append(memory)
            return IdRing(memory)

    monkeypatch.setattr(remote_memory, "IdRing", Kept)
    with (
        server.unharmed(),
        KVStoreClient(server.endpoint, namespace, shared_memory=True) as honest,
        KVStoreClient(server.endpoint, namespace, shared_memory=True) as hostile,
    ):
        honest.set(keys, blocks)
        with honest.borrow(keys) as held, honest.borrow(keys[:8]) as other:
            (honest_ring,) = rings
            for _ in range(2000 if FULL else 200):
                assert hostile.get(keys).blocks == blocks
                ring = rings[-1]
                assert ring is not honest_ring
                junk = [rng.randbytes(IdRing.NBYTES), rng.randbytes(8), rng.randrange(500).to_bytes(8, "little")]
                data = rng.choice(junk)
                ring[: len(data)] = data
            assert shard_info(honest).lent_blocks >= 72
            assert [bytes(block) for block in held if block is not None] == blocks
            assert [bytes(block) for block in other if block is not None] == blocks[:8]
        hostile.close()
        wait_until(lambda: shard_info(honest).lent_blocks == 0, what="nothing is lent any more")
