"""The protocol between a shard and its keeper: the messages and their framing.

A message is a size, followed by a struct in msgpack. Both ends run the same build on the same machine, so the protocol
has no version and does not guard against a hostile peer. This is a pure codec, without sockets and clocks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

_SIZE: Final = struct.Struct("<I")


class KeeperMessage(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A message that either side sends."""


class IndexedNamespace(KeeperMessage, frozen=True):
    """To the keeper: add this namespace to the index, or raise its number of copies. From the keeper: the old index has
    this namespace. It is sent before the namespace's `Recovered`."""

    ordinal: int
    canonical: bytes
    key_bytes: int
    replicas: int  # the number of copies of each block


# ---- to the keeper -----------------------------------------------------------------------------------------------


class ForgetNamespace(KeeperMessage, frozen=True):
    """Remove this namespace from the index."""

    ordinal: int


class Sequenced(KeeperMessage, frozen=True):
    """An operation that will be committed. `Committed` names its sequence number."""

    sequence: int


class Put(Sequenced, frozen=True):
    """Record that blocks lie at these places."""

    ordinal: int
    keys: bytes
    entries: bytes  # of dtype `ENTRY`, one per key


class DropEntries(Sequenced, frozen=True):
    """Remove the entries of blocks that are gone."""

    ordinal: int
    keys: bytes


class CommitNow(Sequenced, frozen=True):
    """Commit now."""


class Stop(KeeperMessage, frozen=True):
    """Commit, and then end."""


# ---- from the keeper: events for the shard -----------------------------------------------------------------------


class NamespacesKnown(KeeperMessage, frozen=True):
    """Every `IndexedNamespace` of the old index has been sent."""


class Recovered(KeeperMessage, frozen=True):
    """Entries of the old index whose guards are right, in key order."""

    ordinal: int
    keys: bytes
    entries: bytes  # of dtype `ENTRY`, one per key


class RecoveryDone(KeeperMessage, frozen=True):
    """Reading the old index has ended. `damage` says what prevented reading it to its end. It is empty if the index was
    read completely."""

    entries: int
    bad_entries: int
    damage: str


class Committed(KeeperMessage, frozen=True):
    """Every operation up to this sequence number survives a crash."""

    sequence: int


class KeeperFailed(KeeperMessage, frozen=True):
    """The keeper has ended, and `message` says why. This is the last event. All events before it remain valid."""

    message: str
    no_space: bool = False  # because the file system is full


Operation: TypeAlias = IndexedNamespace | ForgetNamespace | Put | DropEntries | CommitNow | Stop
Event: TypeAlias = IndexedNamespace | NamespacesKnown | Recovered | RecoveryDone | Committed | KeeperFailed
MessageT = TypeVar("MessageT", Operation, Event)

_encoder = msgspec.msgpack.Encoder()
OPERATIONS: Final[msgspec.msgpack.Decoder[Operation]] = msgspec.msgpack.Decoder(Operation)
EVENTS: Final[msgspec.msgpack.Decoder[Event]] = msgspec.msgpack.Decoder(Event)


def frame(message: KeeperMessage) -> bytearray:
    """Return the bytes of a message."""
    data = bytearray(_SIZE.size)
    _encoder.encode_into(message, data, _SIZE.size)
    _SIZE.pack_into(data, 0, len(data) - _SIZE.size)
    return data


class Inbox(Generic[MessageT]):
    """Assembles messages from the pieces of a byte stream. `decoder`: the decoder of the other side's messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._decode: Callable[[memoryview], MessageT] = decoder.decode
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """Add a piece, and yield the messages that it completes. Exhaust the iterator before adding the next piece."""
        buffer = self._data
        buffer += data
        at = 0
        while len(buffer) - at >= _SIZE.size:
            start = at + _SIZE.size
            end = start + _SIZE.unpack_from(buffer, at)[0]
            if len(buffer) < end:
                break
            yield self._decode(memoryview(buffer)[start:end])
            at = end
        del buffer[:at]
