"""A keeper of the persistent index, the part of a shard's loop that uses the keeper, and operations that follow from a
seed.

Run as a program, this is a shard that can be killed: it sends operations and prints which were sent and which
committed. Arguments: the shard's folder, the seed.
"""

from __future__ import annotations

import os
import random
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from kvstore.disk.entries import ENTRY
from kvstore.disk.format import lock_shard
from kvstore.disk.keeper import Keeper
from kvstore.disk.messages import Committed, Event, KeeperFailed, RecoveryDone
from tests.support.harness import make_keys

MAP_BYTES = 256 << 20
DEADLINE_S = 20.0
NAMESPACES = [(b'{"model":"a"}', 16), (b'{"model":"b"}', 8), (b'{"model":"' + b"c" * 7000 + b'"}', 64)]

KEYS = {key_bytes: make_keys(400, key_bytes=key_bytes) for _, key_bytes in NAMESPACES}

State = dict[tuple[bytes, bytes], int]  # canonical, key -> version
Kind = TypeVar("Kind", bound=Event)


def entries_of(canonical: bytes, keys: Sequence[bytes], version: int) -> np.ndarray:
    """Return the entries of these keys, which follow from the namespace, the key and the version."""
    entries = np.zeros(len(keys), ENTRY)
    sums = [xxhash.xxh3_64_intdigest(canonical + key, seed=version) for key in keys]
    entries["checksum"] = sums
    entries["segment"] = version
    entries["place"] = entries["checksum"] >> 40
    entries["tick"] = entries["checksum"] ^ version
    entries["expires"] = entries["checksum"] & 0xFFFFFFFF
    entries["priority"] = entries["checksum"] % 4
    return entries


class Loop:
    """The part of a shard's loop that uses a keeper."""

    def __init__(self, directory: Path, fresh: bool = False, map_bytes: int = MAP_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        lock_fd = lock_shard(directory)
        self.keeper = Keeper(directory, fresh=fresh, lock_fd=lock_fd, map_bytes=map_bytes)
        os.close(lock_fd)  # the keeper holds the lock
        self.events: list[Event] = []

    def turn(self, timeout_s: float) -> None:
        """Wait for the keeper once, up to the time-out, and process its messages."""
        poll = select.poll()
        poll.register(self.keeper, select.POLLIN | (select.POLLOUT if self.keeper.wants_write else 0))
        for _, ready in poll.poll(timeout_s * 1000):
            if ready & select.POLLOUT:
                self.keeper.on_writable()
            if ready & ~select.POLLOUT:
                self.events += self.keeper.on_readable()

    def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, self.events[-3:]
            self.turn(0.1)

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    def recovered(self) -> RecoveryDone:
        """Wait until the recovery has ended. Fails if it does not end."""
        self.until(lambda: self.ended() or not self.keeper.recovering)
        (done,) = self.all(RecoveryDone)
        return done

    def ended(self) -> KeeperFailed | None:
        failures = self.all(KeeperFailed)
        assert len(failures) <= 1
        return failures[0] if failures else None

    def committed(self, sequence: int) -> bool:
        return any(event.sequence >= sequence for event in self.all(Committed))

    def put(self, canonical: bytes, key_bytes: int, keys: Sequence[bytes], version: int) -> int:
        ordinal = self.keeper.open_namespace(canonical, key_bytes)
        return self.keeper.put(ordinal, b"".join(keys), entries_of(canonical, keys, version))

    def delete(self, canonical: bytes, key_bytes: int, keys: Sequence[bytes]) -> int:
        return self.keeper.delete(self.keeper.open_namespace(canonical, key_bytes), b"".join(keys))


def apply_operation(seed: int, number: int, state: State, loop: Loop | None = None) -> None:
    """Apply operation `number` of a run to `state` and, with a loop, to its keeper."""
    numbers = random.Random(seed * 1_000_003 + number)
    canonical, key_bytes = NAMESPACES[numbers.randrange(2)]
    keys = numbers.choices(KEYS[key_bytes], k=numbers.randrange(1, 30))
    if numbers.random() < 0.05:
        if loop is not None:
            assert loop.keeper.sync() == number
    elif numbers.random() < 0.7:
        state.update({(canonical, key): number for key in keys})
        if loop is not None:
            assert loop.put(canonical, key_bytes, keys, number) == number
    else:
        for key in keys:
            state.pop((canonical, key), None)
        if loop is not None:
            assert loop.delete(canonical, key_bytes, keys) == number


def run_operations(loop: Loop, seed: int, seconds: float, told: Callable[[str], object] = lambda _: None) -> int:
    """Send operations for this many seconds. Returns the number of operations sent."""
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end and not loop.ended():
        if loop.keeper.backlog_bytes < 64 << 10:
            number += 1
            told(f"sent {number}")
            apply_operation(seed, number, {}, loop)
        before = len(loop.events)
        loop.turn(0.001)
        for event in loop.events[before:]:
            if isinstance(event, Committed):
                told(f"committed {event.sequence}")
    return number


if __name__ == "__main__":
    run = Loop(Path(sys.argv[1]))
    print(run.keeper.pid, flush=True)
    run.recovered()
    print("recovered", flush=True)
    run_operations(run, int(sys.argv[2]), 3600, lambda line: print(line, flush=True))
