"""The protocol between a shard and its keeper: framing, message kinds, and the events that the shard receives.

A message is a fixed header and a payload of raw arrays. Both ends run the same build on the same machine, so the
protocol has no version and does not guard against a hostile peer. A pure codec: no sockets, no clocks.
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
    """The kind of a message. The comments name the header fields that are in use, then the payload."""

    # to the keeper
    OPEN_NAMESPACE = 1  # ordinal, key bytes; copies of each block (u8), canonical
    FORGET_NAMESPACE = 2  # ordinal
    PUT = 3  # ordinal, key bytes, number; keys, entries
    DELETE = 4  # ordinal, key bytes, number; keys
    SYNC = 5  # number
    STOP = 6
    # from the keeper
    NAMESPACE_FOUND = 65  # ordinal, key bytes; copies of each block (u8), canonical
    NAMESPACES_KNOWN = 66  # every NAMESPACE_FOUND has been sent
    RECOVERED = 67  # ordinal, key bytes, number of entries; keys, entries
    RECOVERY_DONE = 68  # counts, damage
    COMMITTED = 69  # number
    FAILED = 70  # the reason, a sentence


class Message(NamedTuple):
    """One message: its header fields and its payload."""

    kind: Kind
    key_bytes: int
    ordinal: int
    number: int
    payload: bytes


def frame(kind: Kind, *payload: bytes, key_bytes: int = 0, ordinal: int = 0, number: int = 0) -> bytes:
    """-> the bytes of a message."""
    size = sum(map(len, payload))
    return b"".join((HEADER.pack(size, kind, key_bytes, ordinal, number), *payload))


class Inbox:
    """Assembles messages from the pieces in which a byte stream arrives."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add a piece. -> the messages that it completes. Exhaust the iterator before adding the next piece."""
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


# ---- events for the shard ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamespaceFound:
    """The old index has this namespace. This event comes before the namespace's `Recovered` events."""

    ordinal: int
    canonical: bytes
    key_bytes: int
    replicas: int  # copies of each block


@dataclass(frozen=True, eq=False)
class Recovered:
    """Entries of the old index whose guards are right: at most `RECOVERED_MAX`, in key order."""

    ordinal: int
    keys: bytes
    entries: Entries


@dataclass(frozen=True)
class RecoveryDone:
    """Reading the old index has ended. `damage` says what prevented reading it to its end; empty: nothing did."""

    entries: int
    bad_entries: int
    damage: str


@dataclass(frozen=True)
class Committed:
    """Every operation up to this sequence number survives a crash."""

    sequence: int


@dataclass(frozen=True)
class KeeperFailed:
    """The keeper has ended; `message` says why. This is the last event; all events before it remain valid."""

    message: str


Event: TypeAlias = NamespaceFound | Recovered | RecoveryDone | Committed | KeeperFailed


def event_of(message: Message) -> Event:
    """-> the event that a message from the keeper carries."""
    kind, key_bytes, ordinal, number, payload = message
    if kind == Kind.RECOVERED:
        keys = payload[: number * key_bytes]
        return Recovered(ordinal, keys, np.frombuffer(payload, ENTRY, offset=len(keys)))
    if kind == Kind.COMMITTED:
        return Committed(number)
    if kind == Kind.NAMESPACE_FOUND:
        return NamespaceFound(ordinal, payload[1:], key_bytes, payload[0])
    if kind == Kind.RECOVERY_DONE:
        entries, bad_entries = RECOVERY_COUNTS.unpack_from(payload)
        return RecoveryDone(entries, bad_entries, payload[RECOVERY_COUNTS.size :].decode())
    assert kind == Kind.FAILED, kind
    return KeeperFailed(payload.decode())
