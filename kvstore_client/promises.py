"""Promises: blocks that a client has announced and will set."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.wire import PromiseOutcome
from kvstore_client import _arguments
from kvstore_client._calls.options import Options
from kvstore_client._calls.promising import UNASKED, Promiser, Told
from kvstore_client._links.view import Numbers
from kvstore_client.keys import KeyArray


class Promise:
    """Blocks that this client will set: see `KVStoreClient.promise`.

    Use it in a `with` or `async with` statement, or call `withdraw`. Its methods wait for the store; those of the
    `AsyncPromise` of an `AsyncKVStoreClient` are awaited. Thread-safe.

    * `mine`: An `(n,)` array of bool. It is True for each block that this client has promised, or whose shard did not
      answer. Compute these blocks and set them.
    * `present`: An `(n,)` array of bool. It is True for each block that is in the store.
    * `others`: An `(n,)` array of bool. It is True for each block that another client has promised.
      `get_into(…, wait_s=…)` waits for such blocks.
    """

    def __init__(
        self,
        promiser: Promiser,
        packed: KeyArray,
        unique: Numbers,
        first: npt.NDArray[np.intp],
        ttl_s: float,
        options: Options,
    ) -> None:
        """Make the promise.

        * `unique`: The positions of all first occurrences of keys.
        * `first`: For each key, the position of its first occurrence.
        """
        self._promiser = promiser
        self._packed = packed
        self._ttl_s = ttl_s
        self._options = options
        self._lock = threading.Lock()  # guards `_told`, because `withdraw` must reach every shard in it
        self._withdrawn = False
        self._told: list[Told] = []
        made = promiser.make(packed, unique, ttl_s, options)
        self._told = made.told
        self._mine = unique[made.answers[unique] == PromiseOutcome.MINE]
        answers = made.answers[first]
        self.mine: npt.NDArray[np.bool_] = (answers == PromiseOutcome.MINE) | (answers == UNASKED)
        self.present: npt.NDArray[np.bool_] = answers == PromiseOutcome.PRESENT
        self.others: npt.NDArray[np.bool_] = answers == PromiseOutcome.OTHERS

    def renew(self, ttl_s: float | None = None) -> None:
        """Promise the blocks again, for `ttl_s` from now, except blocks that an earlier renewal found in the store.

        The promise goes to the shards that own the blocks now. Some of them may have lost the earlier promise, because
        they were restarted or the connection was lost. After `withdraw`, this method does nothing.

        * `ttl_s`: How long the promise lasts from now, in seconds; above 0, at most 600. By default, the time given to
          `KVStoreClient.promise`.

        Raises: The errors of `KVStoreClient.promise`.
        """
        if ttl_s is None:
            ttl_s = self._ttl_s
        ttl_s = _arguments.seconds("ttl_s", ttl_s, wire.MAX_PROMISE_MS / 1000)
        with self._lock:
            if not self._withdrawn:
                before = self._told
                made = self._promiser.make(self._packed, self._mine, ttl_s, self._options)
                # A block that is in the store now will not be set again, even if a restarted or full store loses it.
                self._mine = self._mine[made.answers[self._mine] != PromiseOutcome.PRESENT]
                # A shard that has not answered yet may still do so. Until then, the promise that it has is kept.
                unanswered = [_without(each, made.told) for each in before if each.link in made.silent]
                self._promiser.hold(self._packed, unanswered)
                self._told = made.told + unanswered
                self._promiser.withdraw(self._packed, before)

    def withdraw(self) -> None:
        """End the promise for the blocks that were not set. Clients that wait for these blocks get a miss at once.

        No error is raised for a shard that is out of reach, because that shard ends the promise by itself.
        """
        with self._lock:
            self._withdrawn = True
            told, self._told = self._told, []
            self._promiser.withdraw(self._packed, told)

    def __del__(self) -> None:
        if self._told:
            self._promiser.drop(self._packed, self._told)

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`, because a promise cannot be pickled or copied."""
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied, because it belongs to its client's connections: "
            "make it in the process that computes the blocks"
        )

    def __enter__(self) -> Promise:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.withdraw()

    async def __aenter__(self) -> Promise:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio  # slow to import, and most users do not need it

        await asyncio.to_thread(self.withdraw)


def _without(told: Told, others: Sequence[Told]) -> Told:
    """Return `told` without the positions that `others` have for the same link."""
    known = [each.positions for each in others if each.link is told.link]
    return Told(told.link, np.setdiff1d(told.positions, np.concatenate(known)) if known else told.positions)
