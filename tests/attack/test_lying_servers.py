"""Servers that lie to clients with a block secret: none of their blocks is taken.

The attacker has all that a server has: every block, and every checksum that came with it. It has a real server say what
it likes, by setting blocks with checksums of its own choice in the namespaces of the victims: a shard cannot check
MACs. So the lies come over each way that blocks come: a connection, and shared memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import pytest
import xxhash

from kvstore.wire.asking import Asking
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

TRIALS: Final = 100_000 if FULL else 1_000  # lies for each way of reading
BLOCK: Final = 4096
COUNT: Final = 250  # blocks, and lies at a time
SECRET: Final = b"the secret of the tenant"

Known = list[tuple[bytes, int]]  # of each key: a block, and its checksum


class Attacker:
    """What a server knows of one namespace, and what it makes of it."""

    def __init__(self, server: Server, namespace: Namespace) -> None:
        self.asking = Asking((server.host, server.port), 10.0, namespace.canonical())

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
    """Lies about the blocks of one namespace, from what an attacker knows of it and of others."""

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
    """Flips, swaps, and blocks of other keys, namespaces, tenants and secrets, with their sums and with this one's."""
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
    assert read(victim, keys) == blocks  # what is true is read
    with Attacker(server, victim.namespace) as attacker:
        mine = attacker.known(keys)
        lies = Lies(mine, known)
        for _ in range(0, TRIALS, COUNT):
            victim.delete(keys)
            attacker.say(keys, lies.about(COUNT))
            before = victim.stats.checksum_errors
            assert read(victim, keys) == [None] * COUNT
            assert victim.stats.checksum_errors - before == COUNT  # each of them came
        victim.delete(keys)
        attacker.say(keys, mine)
        assert read(victim, keys) == blocks  # and so it is when the server says it again


def test_a_lie_is_dropped_and_set_again(server: Server, victim: KVStoreClient) -> None:
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


def test_who_has_no_secret_cannot_have_blocks_deleted_as_damaged(server: Server, victim: KVStoreClient) -> None:
    """The shard cannot know, so it does not believe it."""
    keys = make_keys(8)
    victim.set(keys, blocks_of(keys, BLOCK))
    with RawClient(server) as raw:
        raw.hello(victim.namespace.canonical())
        assert raw.ask(pack(DELETE, 5, 1000, len(keys), 16, True), b"".join(keys)) == [DELETE_REPLY, 5, 0]
    assert victim.get(keys).hit == len(keys)
