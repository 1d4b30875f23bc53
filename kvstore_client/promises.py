"""What a client has promised to set."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.wire import Promised
from kvstore_client import _arguments
from kvstore_client._calls.options import Options
from kvstore_client._calls.promising import UNASKED, Promiser, Told
from kvstore_client._links.view import Numbers
from kvstore_client.keys import KeyArray


class Promise:
    """Blocks that this client will set: see `KVStoreClient.promise`. Use it in a `with` or `async with` statement, or
    call `withdraw`. Its methods wait for the store.

    Each `(n,)` bool, by key:

    mine: this client has promised it, or its shard could not be asked: compute it, and set it.
    present: it is in the store.
    others: another client has promised it: `get_into(…, wait_s=…)` waits for it.

    Thread-safe.
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
        """Makes the promise. unique: the positions of the first occurrence of each key. first: for each key its first
        occurrence."""
        self._promiser = promiser
        self._packed = packed
        self._ttl_s = ttl_s
        self._options = options
        self._lock = threading.Lock()  # whoever withdraws must know all who were told
        self._withdrawn = False
        self._told: list[Told] = []
        made = promiser.make(packed, unique, ttl_s, options)
        self._told = made.told
        self._mine = unique[made.answers[unique] == Promised.MINE]
        answers = made.answers[first]
        self.mine: npt.NDArray[np.bool_] = (answers == Promised.MINE) | (answers == UNASKED)
        self.present: npt.NDArray[np.bool_] = answers == Promised.PRESENT
        self.others: npt.NDArray[np.bool_] = answers == Promised.OTHERS

    def renew(self, ttl_s: float | None = None) -> None:
        """Promise for `ttl_s` more from now, as long as at first if that is None, what is this client's and was not set
        when it was last renewed; at the shards that own it now, also if they have lost it, by a restart or with the
        connection. After `withdraw` it does nothing. Raises as `KVStoreClient.promise`."""
        if ttl_s is None:
            ttl_s = self._ttl_s
        ttl_s = _arguments.seconds("ttl_s", ttl_s, wire.MAX_PROMISE_MS / 1000)
        with self._lock:
            if not self._withdrawn:
                before = self._told
                made = self._promiser.make(self._packed, self._mine, ttl_s, self._options)
                # What is set now will not be set again, also if a store that is restarted or full loses it.
                self._mine = self._mine[made.answers[self._mine] != Promised.PRESENT]
                # A shard that has not answered may do so yet: what it was told before holds as long as it did.
                unanswered = [_without(each, made.told) for each in before if each.link in made.silent]
                self._promiser.hold(self._packed, unanswered)
                self._told = made.told + unanswered
                self._promiser.withdraw(self._packed, before)

    def withdraw(self) -> None:
        """Say that what was not set will not be: who waits for it misses at once. Does not raise for a shard that
        cannot be reached, because that ends the promise, too."""
        with self._lock:
            self._withdrawn = True
            told, self._told = self._told, []
            self._promiser.withdraw(self._packed, told)

    def __del__(self) -> None:
        if self._told:
            self._promiser.drop(self._packed, self._told)

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
    """The positions there that the others of its link do not have."""
    known = [each.positions for each in others if each.link is told.link]
    return Told(told.link, np.setdiff1d(told.positions, np.concatenate(known)) if known else told.positions)
