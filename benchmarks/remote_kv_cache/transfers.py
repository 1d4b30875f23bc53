"""The operations that move a batch of blocks: over memcpy, the plain socket, kvstore and Redis.

All of them share one `Blocks`: the bytes to send, the memory to read into, and the keys. This memory is cleared before
an operation that reads and compared after it; neither is timed. Of operations that return new memory (`get`, `mget`),
only the blocks of the last call are compared, because those of earlier calls no longer exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.remote_kv_cache.harness import Operation, nothing
from benchmarks.remote_kv_cache.plain import PlainSocket
from benchmarks.remote_kv_cache.shapes import BLOCK_TOKENS, Batch, random_keys, random_rows
from kvstore_client import KVStoreClient, Namespace, SetResult
from kvstore_client.client import DEFAULT_CONNECTIONS

if TYPE_CHECKING:
    from redis import Redis

MEMCPY: Final = "memcpy"
PLAIN_SET: Final = "plain socket set"
PLAIN_GET: Final = "plain socket get"
REDIS_SETS: Final = ("redis set", "redis pipeline set", "redis mset")
REDIS_GETS: Final = ("redis get", "redis mget")
TIMEOUT_S: Final = 60.0

Call = Callable[[int, int], object]


class Blocks:
    """`batch.blocks` blocks of `block_bytes` bytes: `source` has the bytes to send, `out` is the memory to read into,
    and `keys` are the keys."""

    def __init__(self, batch: Batch, block_bytes: int, seed: int = 0) -> None:
        self.batch = batch
        self.block_bytes = block_bytes
        self.source = random_rows(batch.blocks, block_bytes, seed)
        self.out = np.zeros_like(self.source)
        self.keys = random_keys(batch.blocks, seed + 1000)

    @property
    def total_bytes(self) -> int:
        """The bytes of all blocks together."""
        return self.batch.blocks * self.block_bytes

    def clear(self) -> None:
        """Clear the memory of earlier reads."""
        self.out.fill(0)

    def verify(self) -> None:
        """Raise an error unless all bytes that were read are right."""
        for number, (row, expected) in enumerate(zip(self.out, self.source, strict=True)):
            if not np.array_equal(row, expected):
                raise AssertionError(f"block {number}: the bytes read differ from those written")

    def verify_last(self, blocks: Any) -> None:
        """Raise an error unless `blocks` are those of the last call."""
        expected = self.source[-len(blocks) :]
        for block, row in zip(blocks, expected, strict=True):
            if block is None or not np.array_equal(np.frombuffer(block, dtype=np.uint8), row):
                raise AssertionError("the bytes read differ from those written")

    def each_call(self, call: Call) -> Callable[[], None]:
        """Return a function that runs `call(first, last)` for every call of the batch."""

        def run() -> None:
            for start, end in self.batch.calls():
                call(start, end)

        return run

    def writing(self, name: str, call: Call, limit: str, before: Callable[[], object]) -> Operation:
        """Return an operation that sends the blocks."""
        return Operation(name, self.each_call(call), self.total_bytes, limit, before=before)

    def reading(self, name: str, call: Call, limit: str = "", before: Callable[[], object] = nothing) -> Operation:
        """Return an operation that fills `out`."""

        def clear() -> None:
            self.clear()
            before()

        return Operation(name, self.each_call(call), self.total_bytes, limit, before=clear, after=self.verify)

    def fetching(
        self, name: str, call: Callable[[int, int], Any], limit: str, before: Callable[[], object] = nothing
    ) -> Operation:
        """Return an operation whose calls return blocks."""
        last: list[Any] = []

        def keep(start: int, end: int) -> None:
            last.clear()  # as a caller does that no longer needs the blocks, so that their memory can be reused
            last.append(call(start, end))

        def check() -> None:
            self.verify_last(last.pop())

        return Operation(name, self.each_call(keep), self.total_bytes, limit, before=before, after=check)


def namespace(model: str, block_bytes: int) -> Namespace:
    """Return the namespace of a benchmark's blocks."""
    return Namespace(model=model, dtype="bfloat16", block_tokens=BLOCK_TOKENS, block_bytes=block_bytes)


def connect(
    endpoint: str,
    model: str,
    block_bytes: int,
    shared_memory: bool = False,
    connections: int = DEFAULT_CONNECTIONS,
    nixl: bool = False,
    token: str | None = None,
    secret: bytes | None = None,
    tls_ca: str | None = None,
) -> KVStoreClient:
    """Return a client over TCP or shared memory. It has the library's defaults, except for a longer deadline, which a
    slow machine can meet."""
    return KVStoreClient(
        endpoint,
        namespace(model, block_bytes),
        timeout_s=TIMEOUT_S,
        shared_memory=shared_memory,
        connections=connections,
        nixl=nixl,
        token=token,
        block_secret=secret,
        tls_ca=tls_ca,
    )


def memcpy_operation(blocks: Blocks) -> Operation:
    """Return the operation that copies the same bytes once, block by block."""

    def copy(start: int, end: int) -> None:
        for number in range(start, end):
            blocks.out[number] = blocks.source[number]

    return blocks.reading(MEMCPY, copy)


def plain_operations(plain: PlainSocket, blocks: Blocks) -> list[Operation]:
    """Return the physical limits. `get` fetches the bytes that `set` has sent to the peer."""

    def send(start: int, end: int) -> None:
        plain.set(blocks.source, start, end)

    def fetch(start: int, end: int) -> None:
        plain.get_into(blocks.out, start, end)

    return [
        Operation(PLAIN_SET, blocks.each_call(send), blocks.total_bytes),
        blocks.reading(PLAIN_GET, fetch),
    ]


def set_operation(client: KVStoreClient, blocks: Blocks, name: str, limit: str, deferred: bool = True) -> Operation:
    """Return the operation that sets absent keys. The keys are deleted before each round. With one copy of each block,
    a deferred set should take as long as one that is not deferred, because both are acknowledged when the server has
    the bytes."""
    results: list[SetResult] = []

    def call(start: int, end: int) -> None:
        results.append(client.set(blocks.keys[start:end], blocks.source[start:end], deferred=deferred))

    def before() -> None:
        client.sync()
        client.delete(blocks.keys)
        results.clear()

    def after() -> None:
        client.sync()
        created = sum(result.created for result in results)
        if created != blocks.batch.blocks:
            raise AssertionError(f"{name}: {created} of {blocks.batch.blocks} blocks were created: {results}")

    return Operation(name, blocks.each_call(call), blocks.total_bytes, limit, before=before, after=after)


def get_into_operation(client: KVStoreClient, blocks: Blocks, name: str, limit: str) -> Operation:
    """Return the operation that reads the blocks into their rows with `get_into`."""

    def call(start: int, end: int) -> None:
        client.get_into(blocks.keys[start:end], blocks.out[start:end])

    return blocks.reading(name, call, limit)


def stream_get_operation(client: KVStoreClient, blocks: Blocks, name: str, limit: str) -> Operation:
    """Return the operation that puts each block into its row as it arrives, with `stream_get`."""

    def stream(start: int, end: int) -> None:
        rows = blocks.out[start:end]
        for position, block in client.stream_get(blocks.keys[start:end]):
            rows[position] = np.frombuffer(block, dtype=np.uint8)

    return blocks.reading(name, stream, limit)


def kvstore_operations(client: KVStoreClient, blocks: Blocks) -> list[Operation]:
    """Return the calls of the published design's table, and `get_into`."""
    return [
        set_operation(client, blocks, "set", PLAIN_SET),
        blocks.fetching("get", lambda start, end: client.get(blocks.keys[start:end]).blocks, PLAIN_GET),
        stream_get_operation(client, blocks, "stream_get", PLAIN_GET),
        get_into_operation(client, blocks, "get_into", PLAIN_GET),
    ]


def redis_operations(redis: Redis, blocks: Blocks) -> list[Operation]:
    """Return the operations of Redis through redis-py: many keys in a command, a pipeline, and one command for each
    key, which is the fastest way for blocks of this size. `get` puts each block into its row, as stream_get does;
    `mget` only returns bytes objects. Each operation uses a new connection in every round, because a connection stays
    at half its speed after a large MGET."""
    keys = [key.tobytes() for key in blocks.keys]
    views = [memoryview(row) for row in blocks.source]

    def set_each(start: int, end: int) -> None:
        for number in range(start, end):
            redis.set(keys[number], views[number])

    def get_each(start: int, end: int) -> None:
        for number in range(start, end):
            value: Any = redis.get(keys[number])
            blocks.out[number] = np.frombuffer(value, dtype=np.uint8)

    def pipeline(start: int, end: int) -> None:
        commands = redis.pipeline(transaction=False)
        for number in range(start, end):
            commands.set(keys[number], views[number])
        commands.execute()

    def mset(start: int, end: int) -> None:
        redis.mset(dict(zip(keys[start:end], views[start:end], strict=True)))

    def reconnect() -> None:
        redis.connection_pool.disconnect()
        redis.ping()

    def empty() -> None:
        redis.flushall()
        reconnect()

    return [
        *(
            blocks.writing(name, call, PLAIN_SET, before=empty)
            for name, call in zip(REDIS_SETS, (set_each, pipeline, mset), strict=True)
        ),
        blocks.reading(REDIS_GETS[0], get_each, PLAIN_GET, before=reconnect),
        blocks.fetching(REDIS_GETS[1], lambda start, end: redis.mget(keys[start:end]), PLAIN_GET, before=reconnect),
    ]
