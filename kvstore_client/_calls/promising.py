"""Promises: the client announces to shards that it will set blocks, so that readers of these blocks may wait.

The first owner of a key decides which client has promised it. The client informs the key's other owners only after
that. A promise belongs to the connection on which it was made. If that connection is lost, the shard ends the
promise, so the client need not withdraw it. A shard keeps only one promise for each key of a client. So the client
counts its own promises of a key, and withdraws the shard's promise when the last of them ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore_client._calls.exchange import Exchange
from kvstore_client._calls.options import Options
from kvstore_client._links.call import Call, protocol_error
from kvstore_client._links.link import Link
from kvstore_client._links.view import Numbers
from kvstore_client.errors import TRANSPORT_ERRORS, KVStoreError
from kvstore_client.keys import KeyArray

UNASKED: Final = max(wire.PromiseOutcome) + 1  # the key's shard did not answer
WITHDRAW_S: Final = 1.0  # how long a shard may take to confirm a withdrawal
SEND_S: Final = 0.05  # the time for sending a withdrawal to a shard that has not answered; no reply is awaited

Answers = npt.NDArray[np.uint8]


@dataclass
class Told:
    """A shard to which a promise was sent, and the positions of the promised keys."""

    link: Link
    positions: Numbers


@dataclass
class Made:
    """The outcome of a promise: one answer for each key's position, the shards that have the promise, and the shards
    that did not answer."""

    answers: Answers
    told: list[Told] = field(default_factory=list)
    silent: set[Link] = field(default_factory=set)


class Promiser:
    """Makes and withdraws promises. Thread-safe."""

    def __init__(self, exchange: Exchange, replicas: int) -> None:
        self._exchange = exchange
        self._pool = exchange.pool
        self._replicas = replicas
        self._lock = threading.Lock()  # guards `_held`
        self._held: dict[Link, Counter[bytes]] = {}  # by shard: how many promises this client has of each key
        self._dropped: deque[tuple[KeyArray, list[Told]]] = deque()

    def make(self, packed: KeyArray, positions: Numbers, ttl_s: float, options: Options) -> Made:
        """Promise the keys at these positions.

        Raises if a shard refuses. Without `fail_open`, it also raises if a shard does not answer. After an error, only
        keys that were promised earlier are still promised.
        """
        made = Made(np.full(len(packed), UNASKED, dtype=np.uint8))
        deadline = time.monotonic() + options.timeout_s
        view = self._pool.view
        if not view.links:
            if options.fail_open:
                return made
            raise self._pool.no_shards()
        owners = view.owners(packed, self._replicas)
        for column in range(owners.shape[1]):
            asked = positions if column == 0 else positions[made.answers[positions] == wire.PromiseOutcome.MINE]
            groups = view.split(owners[asked, column], asked)
            # The keys are counted before they are promised, so that a withdrawal of these keys by another thread does
            # not end this promise.
            self.hold(packed, [Told(*group) for group in groups])
            error: KVStoreError | None = None
            unanswered: list[Told] = []
            for call in self._ask(packed, groups, ttl_s, options, deadline):
                reply, mine = call.reply, call.positions
                if call.error is None and isinstance(reply, wire.PromiseReply) and len(reply.answers) == call.count:
                    if column == 0:
                        made.answers[call.positions] = np.frombuffer(reply.answers, dtype=np.uint8)
                        mine = mine[made.answers[mine] == wire.PromiseOutcome.MINE]
                    made.told.append(Told(call.link, mine))
                    self._let_go(packed, [Told(call.link, np.setdiff1d(call.positions, mine))])
                    continue
                ended = self._let_go(packed, [Told(call.link, call.positions)])
                failed = call.error or protocol_error(call.link, reply)
                if isinstance(failed, TRANSPORT_ERRORS):
                    unanswered += ended
                made.silent.add(call.link)
                if not (isinstance(failed, TRANSPORT_ERRORS) and (options.fail_open or column)):
                    error = failed
            # A shard that hangs makes the promise when it continues. It then receives this withdrawal too.
            if unanswered:
                self._tell(packed, unanswered, SEND_S, enough=lambda: True)
            if error is not None:
                self.withdraw(packed, made.told)
                raise error
        return made

    def withdraw(self, packed: KeyArray, told: Sequence[Told]) -> None:
        """Withdraw the promise of these keys, except keys that are also in another promise of this client. A shard that
        is out of reach ends the promise by itself."""
        self._tell(packed, self._let_go(packed, told), WITHDRAW_S)

    def _tell(
        self, packed: KeyArray, ended: Sequence[Told], within_s: float, enough: Callable[[], bool] | None = None
    ) -> None:
        """Withdraw these promises at their shards. `enough`: see `Exchange.steps`."""
        deadline_ms = int(WITHDRAW_S * 1000)

        def request(number: int, keys: int, key_bytes: int) -> wire.Withdraw:
            return wire.Withdraw(number, deadline_ms, keys, key_bytes)

        groups = [(each.link, each.positions) for each in ended if each.link.sock is not None]
        self._exchange.run(self._exchange.calls(packed, groups, request), time.monotonic() + within_s, enough=enough)

    def drop(self, packed: KeyArray, told: list[Told]) -> None:
        """Forget a promise that was freed without `withdraw`. At the shards, it ends after its `ttl_s`. The garbage
        collector calls this, perhaps while the lock is held. So only the next call reduces the counts of the keys."""
        self._dropped.append((packed, told))

    def hold(self, packed: KeyArray, told: Sequence[Told]) -> None:
        """Raise the count of each of these keys by one. `withdraw` reduces it by one."""
        with self._lock:
            for each in told:
                self._held.setdefault(each.link, Counter()).update(_keys(packed, each.positions))

    def _let_go(self, packed: KeyArray, told: Sequence[Told]) -> list[Told]:
        """Reduce the count of each of these keys by one. Return the keys that this client does not promise any more."""
        while self._dropped:
            with contextlib.suppress(IndexError):  # another thread has just taken it
                packed_then, told_then = self._dropped.popleft()
                self._count_less(packed_then, told_then)
        return self._count_less(packed, told)

    def _count_less(self, packed: KeyArray, told: Sequence[Told]) -> list[Told]:
        ended = []
        with self._lock:
            for each in told:
                held, last = self._held.get(each.link, Counter()), []
                for position, key in zip(each.positions.tolist(), _keys(packed, each.positions), strict=True):
                    held[key] -= 1
                    if held[key] <= 0:
                        del held[key]
                        last.append(position)
                if not held:
                    self._held.pop(each.link, None)
                if last:
                    ended.append(Told(each.link, np.array(last, dtype=each.positions.dtype)))
        return ended

    def _ask(
        self,
        packed: KeyArray,
        groups: Sequence[tuple[Link, Numbers]],
        ttl_s: float,
        options: Options,
        deadline: float,
    ) -> list[Call]:
        ttl_ms, deadline_ms = max(1, int(ttl_s * 1000)), options.deadline_ms

        def request(number: int, keys: int, key_bytes: int) -> wire.MakePromise:
            return wire.MakePromise(number, deadline_ms, keys, key_bytes, ttl_ms)

        calls = self._exchange.calls(packed, groups, request)
        self._exchange.run(calls, deadline)
        return calls


def _keys(packed: KeyArray, positions: Numbers) -> Iterator[bytes]:
    key_bytes = packed.shape[1]
    named = packed[positions].tobytes()
    return (named[at : at + key_bytes] for at in range(0, len(named), key_bytes))
