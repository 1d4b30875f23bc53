"""Clients that lie about chains: circles, parents that never existed, a common parent of everything."""

from __future__ import annotations

import contextlib
import random

import pytest

from kvstore_client import KVStoreClient
from tests.attack.scale import FULL
from tests.support.cluster import member_of
from tests.support.harness import (
    SET,
    SET_REPLY,
    MakeNamespace,
    RawClient,
    StartServer,
    blocks_of,
    make_keys,
    pack,
    sums_of,
)

SETS = 50_000 if FULL else 3_000
BLOCK = 4096
MEMORY = 16 << 20


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("policy", ["lru", "default"])
def test_after_any_lies_about_chains_every_block_can_be_evicted(
    start_server: StartServer, new_namespace: MakeNamespace, policy: str, shards: int
) -> None:
    """With two shards, false positions spread: if one shard evicts blocks because of them, it tells the other shard,
    which evicts blocks too."""
    rng = random.Random(7)
    namespace = new_namespace(BLOCK)
    server = start_server("--policy", policy, "--shards", str(shards), memory=str(shards * MEMORY))
    count = shards * MEMORY // BLOCK
    pool, fresh = make_keys(count + 2000), make_keys(count if shards == 1 else count * 9 // 10, first=100_000)
    popular = pool[0]
    with server.unharmed(), KVStoreClient(server.endpoint, namespace) as client, contextlib.ExitStack() as stack:
        raws = [stack.enter_context(RawClient(shard)) for shard in member_of(server).shards]
        for raw in raws:
            raw.hello(namespace.canonical())
        for number in range(SETS):
            keys = [rng.choice(pool) for _ in range(rng.randrange(1, 9))]
            parent = rng.choice((b"", popular, keys[-1], rng.choice(pool), rng.randbytes(16)))
            end = rng.choice((b"", parent, rng.choice(pool), rng.randbytes(16)))
            blocks = blocks_of(keys, BLOCK)
            offsets = b"".join(rng.choice((0, 7, 64, 2**32 - 1)).to_bytes(4, "little") for _ in keys)
            place = parent, end, rng.randrange(99), b"", number // 3, offsets
            header = pack(SET, number, 10_000, len(keys), 16, False, 0, False, 0.0, True, *place)
            reply = rng.choice(raws).ask(header, b"".join(keys), b"".join(blocks), sums_of(blocks))
            assert reply[:3] == [SET_REPLY, number, len(keys)]
            if number % 16 == 0:
                client.delete([rng.choice(pool) for _ in range(8)])
        for start in range(0, len(fresh), 256):
            some = fresh[start : start + 256]
            result = client.set(some, blocks_of(some, BLOCK), parent=fresh[start - 1] if start else None)
            assert result.created == len(some)
        assert client.match_prefix(fresh) == len(fresh)
        there = sum(each.blocks for shard in client.info().shards for each in shard.namespaces)
        assert there == len(fresh) if shards == 1 else len(fresh) <= there <= count


def test_a_chain_part_that_breaks_the_protocol_is_refused(
    start_server: StartServer, new_namespace: MakeNamespace
) -> None:
    with RawClient(start_server()) as raw:
        raw.hello(new_namespace(BLOCK).canonical())
        for fields, said in (
            ((b"short", b"", 0), "parent is a key of 5 bytes: expected 16"),
            ((b"", bytes(17), 0), "end is a key of 17 bytes: expected 16"),
            ((b"", b"", -1), "position of -1 in a chain: expected 0 to"),
            ((b"", b"", 1 << 31), "position of 2147483648 in a chain: expected 0 to"),
        ):
            reply = raw.ask(pack(SET, 5, 1000, 1, 16, False, 0, False, 0.0, True, *fields))
            assert reply[0] == 127 and reply[1] == 5 and said in reply[3], reply
