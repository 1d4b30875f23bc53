"""Blocks that are not there yet: who promised to set them, and who waits for them.

A promise is a key without a block. It belongs to the client that made it. It ends when the block is set, by whomever;
when its client withdraws it or is gone; and when its time is over. A waiter is woken once, by its key: when a block is
there, when a write of it was given up, or when its promise has ended. Then it looks again, so nobody can miss anything
by being woken too often.

Used by the loop's thread only.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final

from kvstore.wire import Promised

PROMISE_BYTES: Final = 288  # that a promised key takes, at most
WAITER_BYTES: Final = 448  # that a key takes for which somebody waits, at most

STEP: Final = 16384  # keys whose promises end in one go, or a request's more; a shard must not stand still for long
SPARE: Final = 64  # promises that have ended and are not forgotten yet, at least


def split(keys: bytes, key_bytes: int) -> Iterator[bytes]:
    """The keys that are concatenated there."""
    return (keys[at : at + key_bytes] for at in range(0, len(keys), key_bytes))


class Waiters:
    """Who waits for which keys of a namespace."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, dict[Callable[[], None], None]] = {}

    def __len__(self) -> int:
        """Keys that somebody waits for."""
        return len(self._by_key)

    def add(self, key: bytes, wake: Callable[[], None]) -> None:
        """Have `wake()` called once, when there is news of the key."""
        self._by_key.setdefault(key, {})[wake] = None

    def discard(self, key: bytes, wake: Callable[[], None]) -> None:
        """It is not waited for any more."""
        waiting = self._by_key.get(key)
        if waiting is not None:
            waiting.pop(wake, None)
            if not waiting:
                del self._by_key[key]

    def tell(self, keys: Iterable[bytes]) -> None:
        """There is news of these keys."""
        if self._by_key:
            for key in keys:
                for wake in self._by_key.pop(key, ()):
                    wake()

    def tell_all(self) -> None:
        """There may be news of any key."""
        told, self._by_key = self._by_key, {}
        for wake in dict.fromkeys(itertools.chain.from_iterable(told.values())):
            wake()


def _nothing_changes(_: int) -> None:
    """Of a promise that has ended."""


class Promise:
    """The keys that one request has promised, as long as they are not set. One that has ended is kept for a while, so
    it lets go of its owner."""

    __slots__ = ("changed", "keys", "owner")

    def __init__(self, owner: Hashable, changed: Callable[[int], None]) -> None:
        self.owner = owner
        self.changed = changed
        self.keys: set[bytes] = set()


class Promises:
    """What was promised of a namespace."""

    def __init__(self, waiters: Waiters) -> None:
        self._waiters = waiters
        self._by_key: dict[bytes, Promise] = {}
        self._by_owner: dict[Hashable, set[Promise]] = {}
        self._expiring: list[tuple[float, int, Promise]] = []  # also some that have ended
        self._alive = 0  # promises that have not
        self._ending: deque[Promise] = deque()  # of owners that are gone
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def make(
        self, keys: Iterable[bytes], present: bytes, owner: Hashable, expires: float, changed: Callable[[int], None]
    ) -> bytes:
        """Promise those of the keys that are not there and that nobody else has promised; the owner's own promises are
        renewed. present: one byte a key, 1 if it is there. expires: when the promise ends, on the monotonic clock.
        changed: called with a number of keys when there are so many more of this promise, or, below 0, fewer.
        -> a `Promised` for each key."""
        promise = Promise(owner, changed)
        answers = bytearray(present)
        for number, key in enumerate(keys):
            if answers[number]:
                continue
            before = self._by_key.get(key)
            if before is not None and before is not promise:
                if before.owner != owner:
                    answers[number] = Promised.OTHERS
                    continue
                self._drop(before, [key])
            self._by_key[key] = promise
            promise.keys.add(key)
        if promise.keys:
            self._alive += 1
            self._by_owner.setdefault(owner, set()).add(promise)
            heapq.heappush(self._expiring, (expires, next(self._numbers), promise))
            if len(self._expiring) > 2 * self._alive + SPARE:  # who renews often leaves many that have ended
                self._expiring = [each for each in self._expiring if each[2].keys]
                heapq.heapify(self._expiring)
            changed(len(promise.keys))
        return bytes(answers)

    def held_by(self, owner: Hashable) -> bool:
        """The owner has promised something here."""
        return owner in self._by_owner

    def new_to(self, owner: Hashable, keys: Iterable[bytes]) -> int:
        """-> how many of the keys the owner has not promised yet."""
        return sum((promise := self._by_key.get(key)) is None or promise.owner != owner for key in keys)

    def fulfil(self, keys: Iterable[bytes]) -> None:
        """These keys were set. Nobody is woken: they may not be readable yet."""
        if self._by_key:
            self._end(keys)

    def withdraw(self, keys: Iterable[bytes], owner: Hashable) -> int:
        """The owner will not set these keys. -> of how many its promise ended."""
        by_key = self._by_key
        mine = {key for key in keys if (promise := by_key.get(key)) is not None and promise.owner == owner}
        self._end(mine)
        self._waiters.tell(mine)
        return len(mine)

    def withdraw_all(self, owner: Hashable) -> None:
        """The owner is gone. If it has promised very much, some of it ends with the next calls of `expire`."""
        self._ending.extend(self._by_owner.get(owner, ()))
        self._go_on()

    def end_all(self) -> None:
        """None of these blocks is to come. If they are very many, some promises end with the next calls of `expire`."""
        for owner in list(self._by_owner):
            self._ending.extend(self._by_owner.get(owner, ()))
        self._go_on()

    def expire(self, now: float) -> None:
        """End the promises whose time is over; if they are very many, some of them with the next calls. Those of owners
        that are gone wait for their own turn: however many there are, no other promise holds longer for it."""
        expiring, ended = self._expiring, 0
        while expiring and ended < STEP and (expiring[0][0] <= now or not expiring[0][2].keys):
            promise = heapq.heappop(expiring)[2]
            ended += len(promise.keys)
            self._give_up(promise)
        self._go_on()

    def _go_on(self) -> None:
        ended = 0
        while self._ending and ended < STEP:
            promise = self._ending.popleft()
            ended += len(promise.keys)
            self._give_up(promise)

    def _give_up(self, promise: Promise) -> None:
        keys = list(promise.keys)
        self._end(keys)
        self._waiters.tell(keys)

    def _end(self, keys: Iterable[bytes]) -> None:
        by_promise: dict[Promise, list[bytes]] = {}
        for key in keys:
            promise = self._by_key.pop(key, None)
            if promise is not None:
                by_promise.setdefault(promise, []).append(key)
        for promise, ended in by_promise.items():
            self._drop(promise, ended)

    def _drop(self, promise: Promise, keys: list[bytes]) -> None:
        promise.keys.difference_update(keys)
        promise.changed(-len(keys))
        if not promise.keys:
            self._alive -= 1
            owned = self._by_owner[promise.owner]
            owned.discard(promise)
            if not owned:
                del self._by_owner[promise.owner]
            promise.owner, promise.changed = None, _nothing_changes
