"""A client that puts load on a cluster, in a process of its own: like an engine, it sets the chains of prompts and
reads them.

Argument: `Options` as JSON. Standard input: the commands `go` (begin, now that all first chains are set), `check` (read
all blocks that must be there) and `stop`. Standard output: one JSON object per line; first `Ready`, then a `Call` for
each call and a `Check` for each check, and at the end a `Summary`. Times are those of the monotonic clock, which all
processes of a machine share.

A chain is identified by a number, from which its keys and bytes follow. So every client checks every byte of every
chain.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore_client import KVStoreClient, KVStoreError
from tests.support.harness import block_of, blocks_of, make_keys, make_namespace

T = TypeVar("T")

CHAIN_BLOCKS: Final = 32
CHAINS_A_CLIENT: Final = 1 << 20
# The actions of a client, and their frequencies.
MIX: Final = {"set": 3, "get_into": 8, "stream_get": 3, "contains": 3, "match_prefix": 3}


class Options(msgspec.Struct, frozen=True):
    """The options of a client's load."""

    endpoint: str
    namespace: str
    number: int  # of this client
    clients: int
    replicas: int
    timeout_s: float
    block_bytes: int = 16 << 10
    first_chains: int = 16  # the number of chains that each client sets before it is ready; all clients read them
    calls_per_s: float = 20.0
    recompute: bool = True  # whether missed blocks are set again, as an engine does


class Miss(msgspec.Struct, frozen=True, array_like=True):
    """A block that had been stored and was not found."""

    chain: int
    position: int
    stored_at: float  # when the set that stored the block ended


class Ready(msgspec.Struct, frozen=True, tag=True):
    """This client has set its first chains."""

    at: float


class Call(msgspec.Struct, frozen=True, tag=True):
    """One call of the client."""

    op: str
    at: float
    took_s: float  # for a stream: the longest wait for a block
    limit_s: float
    keys: int  # requested keys whose blocks had been stored before
    hits: int = 0
    errors: int = 0  # for a set: the number of blocks that were not stored
    wrong: int = 0  # blocks with a wrong byte
    missed: list[Miss] = []
    raised: str = ""
    acknowledged: int | None = None  # for a set: its chain, if all copies of all its blocks are made

    @property
    def late_s(self) -> float:
        """Return how long after its deadline the call ended; negative if it ended earlier."""
        return self.took_s - self.limit_s


class Check(msgspec.Struct, frozen=True, tag=True):
    """The result of reading again all blocks that all replicas had acknowledged."""

    at: float
    acknowledged: int
    missing: list[Miss]
    wrong: int


class Summary(msgspec.Struct, frozen=True, tag=True):
    """The totals at the end."""

    calls: int
    stats: dict[str, int | str]


def keys_of(chain: int) -> list[bytes]:
    """Return the keys of a chain, head first."""
    return make_keys(CHAIN_BLOCKS, first=chain * CHAIN_BLOCKS)


class Load:
    """One client, with a record of the blocks that it expects to be stored."""

    def __init__(self, options: Options, client: KVStoreClient) -> None:
        self.options = options
        self.client = client
        self.calls = 0
        self._random = random.Random(options.number)
        self._own = options.number * CHAINS_A_CLIENT  # the next chain
        self._stored: dict[int, dict[int, float]] = {}  # chain -> position -> when it was stored
        self._acknowledged: dict[int, float] = {}  # chain -> when all replicas had acknowledged all of its blocks
        self._to_set: list[int] = []  # chains with blocks that were missed, or not stored
        self._out = np.zeros((CHAIN_BLOCKS, options.block_bytes), dtype=np.uint8)

    def fill(self) -> None:
        """Set the first chains."""
        for _ in range(self.options.first_chains):
            self._set_next(deferred=False)
        while self._to_set:
            self._set(self._to_set.pop(), deferred=False)

    def know_all_first_chains(self) -> None:
        """Expect the first chains of all clients to be stored. Call this after every client has set its own."""
        now = time.monotonic()
        for number in range(self.options.clients):
            first = number * CHAINS_A_CLIENT
            for chain in range(first, first + self.options.first_chains):
                self._stored.setdefault(chain, dict.fromkeys(range(CHAIN_BLOCKS), now))

    def step(self) -> None:
        """Make one random call."""
        if self._to_set and self._random.random() < 0.5:
            self._set(self._to_set.pop(0), deferred=False)
            return
        (op,) = self._random.choices(list(MIX), list(MIX.values()))
        if op == "set":
            self._set_next(deferred=self._random.random() < 0.3)
        else:
            self._look_for(self._random.choice(list(self._stored)), op)

    def check(self) -> None:
        """Read all blocks that were acknowledged."""
        missing, wrong = [], 0
        for chain, stored_at in self._acknowledged.items():
            found = self._compare(chain, self.client.get_into(keys_of(chain), self._out))
            missing += [Miss(chain, at, stored_at) for at, right in enumerate(found) if right is None]
            wrong += found.count(False)
        say(Check(time.monotonic(), len(self._acknowledged) * CHAIN_BLOCKS, missing, wrong))

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _set_next(self, deferred: bool) -> None:
        self._own += 1
        self._set(self._own - 1, deferred)

    def _set(self, chain: int, deferred: bool) -> None:
        keys = keys_of(chain)
        blocks = blocks_of(keys, self.options.block_bytes)
        start = time.monotonic()
        try:
            result, raised = self.client.set(keys, blocks, deferred=deferred), ""
        except KVStoreError as error:
            result, raised = None, repr(error)
        now = time.monotonic()
        errors = result.error if result is not None else len(keys)
        acknowledged = None
        if result is not None and not errors:
            self._stored[chain] = dict.fromkeys(range(CHAIN_BLOCKS), now)
            if not deferred and result.copies >= self.options.replicas:
                self._acknowledged[chain] = now
                acknowledged = chain
        else:
            self._to_set.append(chain)
        self._say_call("set", start, now - start, len(keys), errors=errors, raised=raised, acknowledged=acknowledged)

    def _look_for(self, chain: int, op: str) -> None:
        stored = self._stored[chain]
        start = time.monotonic()
        raised = ""
        found: list[bool | None] = [None] * CHAIN_BLOCKS
        took_s = 0.0
        try:
            if op == "stream_get":
                found, took_s = self._stream(chain)
            elif op == "get_into":
                present, took_s = timed(lambda: self.client.get_into(keys_of(chain), self._out))
                found = self._compare(chain, present)
            elif op == "contains":
                present, took_s = timed(lambda: self.client.contains(keys_of(chain), refresh=True))
                found = [bool(there) or None for there in present]
            else:
                length, took_s = timed(lambda: self.client.match_prefix(keys_of(chain)))
                # The result says nothing about blocks after the first missing one, so those count as found.
                found = [position != length or None for position in range(CHAIN_BLOCKS)]
        except KVStoreError as error:
            raised, took_s = repr(error), time.monotonic() - start
        missed = [Miss(chain, at, stored[at]) for at, right in enumerate(found) if right is None and at in stored]
        keys = len(stored)
        if self.options.recompute and missed:
            for miss in missed:
                del stored[miss.position]
            if chain not in self._to_set:
                self._to_set.append(chain)
        wrong = found.count(False)
        self._say_call(op, start, took_s, keys, hits=keys - len(missed), wrong=wrong, missed=missed, raised=raised)

    def _compare(self, chain: int, present: npt.NDArray[np.bool_]) -> list[bool | None]:
        """Return for each position whether the block in `_out` is right; None for a miss."""
        size = self.options.block_bytes
        return [
            self._out[at].tobytes() == block_of(key, size) if present[at] else None
            for at, key in enumerate(keys_of(chain))
        ]

    def _stream(self, chain: int) -> tuple[list[bool | None], float]:
        """Return the same as `_compare`, and the longest wait for a block."""
        found: list[bool | None] = [None] * CHAIN_BLOCKS
        keys = keys_of(chain)
        longest_s, before = 0.0, time.monotonic()
        for position, block in self.client.stream_get(keys):
            longest_s = max(longest_s, time.monotonic() - before)
            found[position] = block == block_of(keys[position], self.options.block_bytes)
            before = time.monotonic()
        return found, max(longest_s, time.monotonic() - before)

    def _say_call(self, op: str, start: float, took_s: float, keys: int, **more: Any) -> None:
        self.calls += 1
        say(Call(op, start, took_s, self.options.timeout_s, keys, **more))


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call, and how long it took."""
    start = time.monotonic()
    result = call()
    return result, time.monotonic() - start


def say(record: msgspec.Struct) -> None:
    """Print a line for the process that started this one."""
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
    sys.stdout.buffer.flush()


def main(options: Options) -> None:
    commands: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            commands.put(line.strip())
        commands.put("stop")

    threading.Thread(target=listen, daemon=True).start()
    namespace = make_namespace(options.block_bytes, options.namespace)
    with KVStoreClient(
        options.endpoint, namespace, timeout_s=options.timeout_s, fail_open=True, replicas=options.replicas
    ) as client:
        load = Load(options, client)
        load.fill()
        say(Ready(time.monotonic()))
        if commands.get() != "go":
            return
        load.know_all_first_chains()
        next_at = time.monotonic()
        while True:
            next_at = max(next_at + 1 / options.calls_per_s, time.monotonic())
            try:
                command = commands.get(timeout=max(0.0, next_at - time.monotonic()))
            except queue.Empty:
                load.step()
                continue
            if command == "stop":
                break
            load.check()
        say(Summary(load.calls, asdict(client.stats)))


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Options))
