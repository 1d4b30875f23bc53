"""What a shard and its keeper say to each other: framing, kinds, and the events a shard is given.

A message is a fixed header and a payload of raw arrays. Both ends are of one build and one machine: there is no
version, and nothing here guards against a hostile peer. A pure codec: no sockets, no clocks.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from kvstore.disk.entries import ENTRY, Entries

HEADER: Final = struct.Struct("<IBBHQ")  # payload bytes, kind, key bytes, ordinal, number
RECOVERY_COUNTS: Final = struct.Struct("<QQ")  # entries, bad entries
RECOVERED_MAX: Final = 8192  # entries in one `Recovered`


class Kind(enum.IntEnum):
    """What a message is."""

    # to the keeper
    OPEN_NAMESPACE = 1  # ordinal, key bytes; canonical
    FORGET_NAMESPACE = 2  # ordinal
    PUT = 3  # ordinal, key bytes, number; keys, entries
    DELETE = 4  # ordinal, key bytes, number; keys
    SYNC = 5  # number
    STOP = 6
    # from the keeper
    NAMESPACE_FOUND = 65  # ordinal, key bytes; canonical
    NAMESPACES_KNOWN = 66  # all that were found have been told
    RECOVERED = 67  # ordinal, key bytes, number of entries; keys, entries
    RECOVERY_DONE = 68  # counts, damage
    COMMITTED = 69  # number
    FAILED = 70  # a sentence


class Message(NamedTuple):
    """A message, as it was framed."""

    kind: Kind
    key_bytes: int
    ordinal: int
    number: int
    payload: bytes


def frame(kind: Kind, *payload: bytes, key_bytes: int = 0, ordinal: int = 0, number: int = 0) -> bytes:
    """A message's bytes."""
    size = sum(map(len, payload))
    return b"".join((HEADER.pack(size, kind, key_bytes, ordinal, number), *payload))


class Inbox:
    """Makes messages of the pieces a stream arrives in."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take a piece. -> the messages it completed. Exhaust the iterator before the next piece."""
        buffer = self._data
        buffer += data
        at = 0
        while len(buffer) - at >= HEADER.size:
            size, kind, key_bytes, ordinal, number = HEADER.unpack_from(buffer, at)
            end = at + HEADER.size + size
            if len(buffer) < end:
                break
            payload = bytes(memoryview(buffer)[at + HEADER.size : end])
            yield Message(Kind(kind), key_bytes, ordinal, number, payload)
            at = end
        del buffer[:at]


# ---- what a shard is told ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamespaceFound:
    """The old index knows a namespace. Comes before its `Recovered`."""

    ordinal: int
    canonical: bytes
    key_bytes: int


@dataclass(frozen=True, eq=False)
class Recovered:
    """Entries of the old index whose guards are right, at most `RECOVERED_MAX`, in the order of their keys."""

    ordinal: int
    keys: bytes
    entries: Entries


@dataclass(frozen=True)
class RecoveryDone:
    """The old index was read; `damage` says what kept it from being read to its end, if anything did."""

    entries: int
    bad_entries: int
    damage: str


@dataclass(frozen=True)
class Committed:
    """Every operation up to this sequence number will be found after a crash."""

    sequence: int


@dataclass(frozen=True)
class KeeperFailed:
    """The keeper has ended, and says why. Nothing comes after this; what was told before is true."""

    message: str


Event: TypeAlias = NamespaceFound | Recovered | RecoveryDone | Committed | KeeperFailed


def event_of(message: Message) -> Event:
    """What a message of the keeper's tells."""
    kind, key_bytes, ordinal, number, payload = message
    if kind == Kind.RECOVERED:
        keys = payload[: number * key_bytes]
        return Recovered(ordinal, keys, np.frombuffer(payload, ENTRY, offset=len(keys)))
    if kind == Kind.COMMITTED:
        return Committed(number)
    if kind == Kind.NAMESPACE_FOUND:
        return NamespaceFound(ordinal, payload, key_bytes)
    if kind == Kind.RECOVERY_DONE:
        entries, bad_entries = RECOVERY_COUNTS.unpack_from(payload)
        return RecoveryDone(entries, bad_entries, payload[RECOVERY_COUNTS.size :].decode())
    assert kind == Kind.FAILED, kind
    return KeeperFailed(payload.decode())
