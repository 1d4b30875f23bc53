"""Blocks that are not there yet: promises to set them, and clients that wait for them.

A promise is a key without a block. It belongs to the client that made it. It ends when any client sets the block, when
its own client withdraws it or is gone, or when its time is over. A waiter is registered for a key and woken once: when
the block is there, when a write of the block was given up, or when the promise has ended. The waiter then looks up the
key again, so an unnecessary call does no harm.

Used by the loop's thread only.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final

from kvstore.wire import PromiseOutcome

PROMISE_BYTES: Final = 288  # the most memory that a promised key takes
WAITER_BYTES: Final = 448  # the most memory that a waiter for one key takes

STEP: Final = 16384  # a call ends at most this many promises and the rest of one request, so a shard does not stall
SPARE: Final = 64  # at least this many ended promises may be kept


def split(keys: bytes, key_bytes: int) -> Iterator[bytes]:
    """Yield the concatenated keys one by one."""
    return (keys[at : at + key_bytes] for at in range(0, len(keys), key_bytes))


class Waiters:
    """The callbacks of clients that wait for keys of a namespace."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, dict[Callable[[], None], None]] = {}

    def __len__(self) -> int:
        """The number of keys for which a client waits."""
        return len(self._by_key)

    def add(self, key: bytes, wake: Callable[[], None]) -> None:
        """Call `wake()` once, when the state of the key has changed."""
        self._by_key.setdefault(key, {})[wake] = None

    def discard(self, key: bytes, wake: Callable[[], None]) -> None:
        """Remove a waiter of a key."""
        waiting = self._by_key.get(key)
        if waiting is not None:
            waiting.pop(wake, None)
            if not waiting:
                del self._by_key[key]

    def tell(self, keys: Iterable[bytes]) -> None:
        """Wake the waiters of these keys."""
        if self._by_key:
            for key in keys:
                for wake in self._by_key.pop(key, ()):
                    wake()

    def tell_all(self) -> None:
        """Wake all waiters, because any key may have changed."""
        told, self._by_key = self._by_key, {}
        for wake in dict.fromkeys(itertools.chain.from_iterable(told.values())):
            wake()


def _nothing_changes(_: int) -> None:
    """Do nothing. This is the callback of a promise that has ended."""


class PromisedKeys:
    """The keys that one request has promised and that are not set yet. The object is kept for a while after its
    promises have ended. So it drops its reference to their owner when they end."""

    __slots__ = ("changed", "keys", "owner")

    def __init__(self, owner: Hashable, changed: Callable[[int], None]) -> None:
        self.owner = owner
        self.changed = changed
        self.keys: set[bytes] = set()


class Promises:
    """The promised keys of a namespace."""

    def __init__(self, waiters: Waiters) -> None:
        self._waiters = waiters
        self._by_key: dict[bytes, PromisedKeys] = {}
        self._by_owner: dict[Hashable, set[PromisedKeys]] = {}
        self._expiring: list[tuple[float, int, PromisedKeys]] = []  # including some that have ended
        self._alive = 0  # promises that have not ended
        self._ending: deque[PromisedKeys] = deque()  # promises of owners that are gone
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def make(
        self, keys: Iterable[bytes], present: bytes, owner: Hashable, expires: float, changed: Callable[[int], None]
    ) -> bytes:
        """Promise the keys whose blocks are not there and that no other owner has promised. The owner's own promises
        are renewed.

        present: one byte per key, 1 if its block is there.
        expires: the time on the monotonic clock when the promises end.
        changed: a function that is called with each change in the number of promised keys, which may be negative.

        Return a `PromiseOutcome` for each key.
        """
        promise = PromisedKeys(owner, changed)
        answers = bytearray(present)
        for number, key in enumerate(keys):
            if answers[number]:
                continue
            before = self._by_key.get(key)
            if before is not None and before is not promise:
                if before.owner != owner:
                    answers[number] = PromiseOutcome.OTHERS
                    continue
                self._drop(before, [key])
            self._by_key[key] = promise
            promise.keys.add(key)
        if promise.keys:
            self._alive += 1
            self._by_owner.setdefault(owner, set()).add(promise)
            heapq.heappush(self._expiring, (expires, next(self._numbers), promise))
            if len(self._expiring) > 2 * self._alive + SPARE:  # an owner that renews often leaves many ended promises
                self._expiring = [each for each in self._expiring if each[2].keys]
                heapq.heapify(self._expiring)
            changed(len(promise.keys))
        return bytes(answers)

    def held_by(self, owner: Hashable) -> bool:
        """Return whether the owner has promised a key of this namespace."""
        return owner in self._by_owner

    def new_to(self, owner: Hashable, keys: Iterable[bytes]) -> int:
        """Return how many of the keys the owner has not promised yet."""
        return sum((promise := self._by_key.get(key)) is None or promise.owner != owner for key in keys)

    def fulfil(self, keys: Iterable[bytes]) -> None:
        """End the promises of keys that were set. No waiter is woken, because the blocks may not be readable yet."""
        if self._by_key:
            self._end(keys)

    def withdraw(self, keys: Iterable[bytes], owner: Hashable) -> int:
        """End the owner's promises of these keys. Return how many ended."""
        by_key = self._by_key
        mine = {key for key in keys if (promise := by_key.get(key)) is not None and promise.owner == owner}
        self._end(mine)
        self._waiters.tell(mine)
        return len(mine)

    def withdraw_all(self, owner: Hashable) -> None:
        """End all promises of an owner that is gone. If there are very many, some end only in the next calls of
        `expire`."""
        self._ending.extend(self._by_owner.get(owner, ()))
        self._go_on()

    def end_all(self) -> None:
        """End all promises of the namespace. If there are very many, some end only in the next calls of `expire`."""
        for owner in list(self._by_owner):
            self._ending.extend(self._by_owner.get(owner, ()))
        self._go_on()

    def expire(self, now: float) -> None:
        """End the promises whose time is over. If there are very many, some end only in the next calls. Promises of
        owners that are gone have a queue of their own, so that they do not delay the end of other promises."""
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

    def _give_up(self, promise: PromisedKeys) -> None:
        keys = list(promise.keys)
        self._end(keys)
        self._waiters.tell(keys)

    def _end(self, keys: Iterable[bytes]) -> None:
        by_promise: dict[PromisedKeys, list[bytes]] = {}
        for key in keys:
            promise = self._by_key.pop(key, None)
            if promise is not None:
                by_promise.setdefault(promise, []).append(key)
        for promise, ended in by_promise.items():
            self._drop(promise, ended)

    def _drop(self, promise: PromisedKeys, keys: list[bytes]) -> None:
        promise.keys.difference_update(keys)
        promise.changed(-len(keys))
        if not promise.keys:
            self._alive -= 1
            owned = self._by_owner[promise.owner]
            owned.discard(promise)
            if not owned:
                del self._by_owner[promise.owner]
            promise.owner, promise.changed = None, _nothing_changes
