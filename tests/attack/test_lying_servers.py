"""Servers that lie to clients with a block secret: the clients accept none of their blocks.

The attacker has everything that a server has: every block, and every checksum that came with it. It makes a real server
lie: it sets blocks with checksums of its own choice in the victims' namespaces, because a shard cannot check MACs. So
the lies arrive in both ways that blocks arrive: over a connection, and through shared memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import pytest
import xxhash

from kvstore.wire.queries import ShardQueries
from kvstore_client import KVStoreClient, Namespace
from tests.attack.scale import FULL
from tests.support.harness import (
    DELETE,
    DELETE_REPLY,
    MakeNamespace,
    RawClient,
    Server,
    blocks_of,
    make_keys,
    make_namespace,
    pack,
)

TRIALS: Final = 100_000 if FULL else 1_000  # the number of lies for each way of reading
BLOCK: Final = 4096
COUNT: Final = 250  # the number of blocks, and of lies in each set
SECRET: Final = b"the secret of the tenant"

Known = list[tuple[bytes, int]]  # for each key: a block, and its checksum


class Attacker:
    """An attacker with everything that a server knows of one namespace: it reads blocks with their checksums, and sets
    lies."""

    def __init__(self, server: Server, namespace: Namespace) -> None:
        self.asking = ShardQueries((server.host, server.port), 10.0, namespace.canonical())

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *_: object) -> None:
        self.asking.close()

    def known(self, keys: Sequence[bytes]) -> Known:
        found: dict[int, tuple[bytes, int]] = {}
        for positions, sums, _, memory in self.asking.get(matrix(keys)):
            for row, position in enumerate(positions.tolist()):
                found[position] = bytes(memory[row * BLOCK : (row + 1) * BLOCK]), int(sums[row])
        assert len(found) == len(keys)
        return [found[position] for position in range(len(keys))]

    def say(self, keys: Sequence[bytes], lies: Known) -> None:
        sums = np.array([mac for _, mac in lies], dtype=np.uint64)
        reply = self.asking.set(matrix(keys), [memoryview(block) for block, _ in lies], sums)
        assert reply.created == len(keys)


def matrix(keys: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)


def read_get(client: KVStoreClient, keys: Sequence[bytes]) -> list[bytes | None]:
    return [None if block is None else bytes(block) for block in client.get(keys).blocks]


def read_get_into(client: KVStoreClient, keys: Sequence[bytes]) -> list[bytes | None]:
    out = np.zeros((len(keys), BLOCK), dtype=np.uint8)
    present = client.get_into(keys, out)
    return [row.tobytes() if there else None for row, there in zip(out, present, strict=True)]


def read_stream(client: KVStoreClient, keys: Sequence[bytes]) -> list[bytes | None]:
    found: list[bytes | None] = [None] * len(keys)
    for position, block in client.stream_get(keys):
        found[position] = bytes(block)
    return found


def read_borrow(client: KVStoreClient, keys: Sequence[bytes]) -> list[bytes | None]:
    with client.borrow(keys) as blocks:
        return [None if block is None else bytes(block) for block in blocks]


def read_prefix(client: KVStoreClient, keys: Sequence[bytes]) -> list[bytes | None]:
    out = np.zeros((len(keys), BLOCK), dtype=np.uint8)
    length = client.load_prefix(keys, out)
    return [out[row].tobytes() if row < length else None for row in range(len(keys))]


def flipped(block: bytes, at: int) -> bytes:
    changed = bytearray(block)
    changed[at // 8 % len(block)] ^= 1 << at % 8
    return bytes(changed)


class Lies:
    """Lies about the blocks of one namespace, made from an attacker's knowledge of it and of others."""

    def __init__(self, mine: Known, others: Sequence[Known]) -> None:
        self._mine = mine
        self._others = others
        self._random = random.Random(7)
        self._kinds: list[Callable[[int], tuple[bytes, int]]] = [
            self._flip,
            self._flip_sum,
            self._swap,
            self._swap_block,
            self._of_another_namespace,
            self._bytes_of_another_namespace,
            self._own_sum,
            self._empty,
        ]

    def about(self, count: int) -> Known:
        return [self._kinds[row % len(self._kinds)](row) for row in range(count)]

    def _flip(self, row: int) -> tuple[bytes, int]:
        block, mac = self._mine[row]
        return flipped(block, self._random.randrange(8 * BLOCK)), mac

    def _flip_sum(self, row: int) -> tuple[bytes, int]:
        block, mac = self._mine[row]
        return block, mac ^ (1 << self._random.randrange(64))

    def _swap(self, row: int) -> tuple[bytes, int]:
        return self._mine[self._another(row)]

    def _swap_block(self, row: int) -> tuple[bytes, int]:
        return self._mine[self._another(row)][0], self._mine[row][1]

    def _of_another_namespace(self, row: int) -> tuple[bytes, int]:
        return self._random.choice(self._others)[row]

    def _bytes_of_another_namespace(self, row: int) -> tuple[bytes, int]:
        return self._random.choice(self._others)[row][0], self._mine[row][1]

    def _own_sum(self, row: int) -> tuple[bytes, int]:
        block = self._random.randbytes(BLOCK)
        return block, xxhash.xxh3_64_intdigest(block)

    def _empty(self, row: int) -> tuple[bytes, int]:
        return bytes(BLOCK), self._random.choice((0, self._mine[row][1], xxhash.xxh3_64_intdigest(bytes(BLOCK))))

    def _another(self, row: int) -> int:
        return (row + self._random.randrange(1, COUNT)) % COUNT


@pytest.fixture
def victim(server: Server, new_namespace: MakeNamespace) -> Iterator[KVStoreClient]:
    with KVStoreClient(server.endpoint, new_namespace(BLOCK, tenant="a"), block_secret=SECRET) as client:
        yield client


@pytest.mark.parametrize("read", [read_get, read_get_into, read_stream, read_borrow, read_prefix])
def test_no_lie_is_accepted(
    server: Server,
    victim: KVStoreClient,
    new_namespace: MakeNamespace,
    read: Callable[[KVStoreClient, Sequence[bytes]], list[bytes | None]],
) -> None:
    """The lies are flipped bits, swapped blocks, and blocks of other keys, namespaces, tenants and secrets, with their
    own checksums and with those of the right blocks."""
    keys, model = make_keys(COUNT), victim.namespace.model
    others: list[tuple[Namespace, bytes | None]] = [
        (make_namespace(BLOCK, model, tenant="b"), SECRET),
        (make_namespace(BLOCK, model, tenant="a", rank=1, world=2), SECRET),
        (make_namespace(BLOCK, model, tenant="a"), b"the secret of another"),
        (make_namespace(BLOCK, model, tenant="a"), None),
    ]
    known = []
    for number, (namespace, secret) in enumerate(others):
        with KVStoreClient(server.endpoint, namespace, block_secret=secret) as client:
            client.set(keys, blocks_of(keys, BLOCK, number + 1))
            with Attacker(server, client.namespace) as attacker:
                known.append(attacker.known(keys))
            client.purge()
    blocks = blocks_of(keys, BLOCK)
    victim.set(keys, blocks)
    assert read(victim, keys) == blocks  # the truth is accepted
    with Attacker(server, victim.namespace) as attacker:
        mine = attacker.known(keys)
        lies = Lies(mine, known)
        for _ in range(0, TRIALS, COUNT):
            victim.delete(keys)
            attacker.say(keys, lies.about(COUNT))
            before = victim.stats.checksum_errors
            assert read(victim, keys) == [None] * COUNT
            assert victim.stats.checksum_errors - before == COUNT  # each lie arrived
        victim.delete(keys)
        attacker.say(keys, mine)
        assert read(victim, keys) == blocks  # and accepted again when the server returns it after the lies


def test_a_lie_is_dropped_and_the_block_set_again(server: Server, victim: KVStoreClient) -> None:
    keys = make_keys(8)
    victim.set(keys, blocks_of(keys, BLOCK))
    with Attacker(server, victim.namespace) as attacker:
        known = attacker.known(keys)
        victim.delete(keys)
        attacker.say(keys, [(flipped(block, 9), mac) for block, mac in known])
    assert victim.get(keys).hit == 0
    assert not victim.contains(keys).any()
    assert victim.set(keys, blocks_of(keys, BLOCK)).created == len(keys)
    assert victim.get(keys).hit == len(keys)


def test_a_client_without_the_secret_cannot_delete_blocks_as_damaged(server: Server, victim: KVStoreClient) -> None:
    """The client claims that blocks are damaged. The shard cannot check that claim, so it ignores it."""
    keys = make_keys(8)
    victim.set(keys, blocks_of(keys, BLOCK))
    with RawClient(server) as raw:
        raw.hello(victim.namespace.canonical())
        assert raw.ask(pack(DELETE, 5, 1000, len(keys), 16, True), b"".join(keys)) == [DELETE_REPLY, 5, 0]
    assert victim.get(keys).hit == len(keys)
