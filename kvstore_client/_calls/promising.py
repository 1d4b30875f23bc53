"""Promises: telling the shards that blocks will be set, so that who asks for them meanwhile may wait.

The first owner of a key decides who has promised it; only then its other owners are told. A promise belongs to the
connection that it was made on: if that is lost, the shard ends it, and so there is nothing to withdraw.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
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

UNASKED: Final = max(wire.Promised) + 1  # the key's shard did not answer
WITHDRAW_S: Final = 1.0  # for a shard to answer that it was told

Answers = npt.NDArray[np.uint8]


@dataclass
class Told:
    """A shard that was told of a promise, on which of its connections, and of which positions."""

    link: Link
    connection: int
    positions: Numbers

    @property
    def alive(self) -> bool:
        return self.link.sock is not None and self.link.connections == self.connection


def no_longer(before: Sequence[Told], now: Sequence[Told]) -> list[Told]:
    """The shards that were told before of positions of which they were not told now, and those positions."""
    told: dict[int, list[Numbers]] = {}
    for each in now:
        told.setdefault(id(each.link), []).append(each.positions)
    return [
        Told(each.link, each.connection, np.setdiff1d(each.positions, np.concatenate(told[id(each.link)])))
        if id(each.link) in told
        else each
        for each in before
    ]


class Promiser:
    """Makes and withdraws promises. Thread-safe."""

    def __init__(self, exchange: Exchange, replicas: int) -> None:
        self._exchange = exchange
        self._core = exchange.core
        self._replicas = replicas

    def make(self, packed: KeyArray, positions: Numbers, ttl_s: float, options: Options) -> tuple[Answers, list[Told]]:
        """Promise the keys at these positions, or renew that. -> an answer by position, and who was told. Raises if a
        shard refuses, or without `fail_open` if one does not answer; then nothing is promised."""
        answers = np.full(len(packed), UNASKED, dtype=np.uint8)
        told: list[Told] = []
        deadline = time.monotonic() + options.timeout_s
        view = self._core.view
        if not view.links:
            if options.fail_open:
                return answers, told
            raise self._core.no_shards()
        owners = view.owners(packed, self._replicas)
        for column in range(owners.shape[1]):
            asked = positions if column == 0 else positions[answers[positions] == wire.Promised.MINE]
            calls = self._ask(packed, view.split(owners[asked, column], asked), ttl_s, options, deadline)
            error: KVStoreError | None = None
            for call in calls:
                reply = call.reply
                if call.error is None and isinstance(reply, wire.PromiseReply) and len(reply.answers) == call.count:
                    told.append(Told(call.link, call.connection, call.positions))
                    if column == 0:
                        answers[call.positions] = np.frombuffer(reply.answers, dtype=np.uint8)
                    continue
                failed = call.error or protocol_error(call.link, reply)
                if not (isinstance(failed, TRANSPORT_ERRORS) and (options.fail_open or column)):
                    error = failed
            if error is not None:
                self.withdraw(packed, told)
                raise error
        return answers, told

    def withdraw(self, packed: KeyArray, told: Sequence[Told]) -> None:
        """Tell the shards that these keys will not be set. A shard that cannot be told ends the promise by itself."""
        deadline_ms = int(WITHDRAW_S * 1000)

        def request(number: int, keys: int, key_bytes: int) -> wire.Withdraw:
            return wire.Withdraw(number, deadline_ms, keys, key_bytes)

        groups = [(each.link, each.positions) for each in told if each.alive]
        self._exchange.run(self._exchange.calls(packed, groups, request), time.monotonic() + WITHDRAW_S)

    def _ask(
        self,
        packed: KeyArray,
        groups: Sequence[tuple[Link, Numbers]],
        ttl_s: float,
        options: Options,
        deadline: float,
    ) -> list[Call]:
        ttl_ms, deadline_ms = max(1, int(ttl_s * 1000)), options.deadline_ms

        def request(number: int, keys: int, key_bytes: int) -> wire.Promise:
            return wire.Promise(number, deadline_ms, keys, key_bytes, ttl_ms)

        calls = self._exchange.calls(packed, groups, request)
        self._exchange.run(calls, deadline)
        return calls
