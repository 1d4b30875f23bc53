"""The protocol between a shard and its keeper: what they tell each other, and how messages are framed.

A message is its size and a struct as msgpack. Both ends run the same build on the same machine, so the protocol has no
version and does not guard against a hostile peer. A pure codec: no sockets, no clocks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

_SIZE: Final = struct.Struct("<I")


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What either side sends."""


class IndexedNamespace(Message, frozen=True):
    """To the keeper: the index has this namespace from now on, or with more copies. From the keeper: the old index has
    it, which comes before the namespace's `Recovered`."""

    ordinal: int
    canonical: bytes
    key_bytes: int
    replicas: int  # copies of each block


# ---- to the keeper -----------------------------------------------------------------------------------------------


class ForgetNamespace(Message, frozen=True):
    """The index has this namespace no more."""

    ordinal: int


class Sequenced(Message, frozen=True):
    """An operation that is committed at some time; `Committed` names its number."""

    sequence: int


class Put(Sequenced, frozen=True):
    """Blocks lie at these places."""

    ordinal: int
    keys: bytes
    entries: bytes  # of dtype `ENTRY`, one a key


class Delete(Sequenced, frozen=True):
    """Blocks are gone."""

    ordinal: int
    keys: bytes


class Sync(Sequenced, frozen=True):
    """Commit now."""


class Stop(Message, frozen=True):
    """Commit, and end."""


# ---- from the keeper: events for the shard -----------------------------------------------------------------------


class NamespacesKnown(Message, frozen=True):
    """Every `IndexedNamespace` of the old index has been sent."""


class Recovered(Message, frozen=True):
    """Entries of the old index whose guards are right, in key order."""

    ordinal: int
    keys: bytes
    entries: bytes  # of dtype `ENTRY`, one a key


class RecoveryDone(Message, frozen=True):
    """Reading the old index has ended. `damage` says what prevented reading it to its end; empty: nothing did."""

    entries: int
    bad_entries: int
    damage: str


class Committed(Message, frozen=True):
    """Every operation up to this sequence number survives a crash."""

    sequence: int


class KeeperFailed(Message, frozen=True):
    """The keeper has ended; `message` says why. This is the last event; all events before it remain valid."""

    message: str


Operation: TypeAlias = IndexedNamespace | ForgetNamespace | Put | Delete | Sync | Stop
Event: TypeAlias = IndexedNamespace | NamespacesKnown | Recovered | RecoveryDone | Committed | KeeperFailed
MessageT = TypeVar("MessageT", Operation, Event)

_encoder = msgspec.msgpack.Encoder()
OPERATIONS: Final[msgspec.msgpack.Decoder[Operation]] = msgspec.msgpack.Decoder(Operation)
EVENTS: Final[msgspec.msgpack.Decoder[Event]] = msgspec.msgpack.Decoder(Event)


def frame(message: Message) -> bytearray:
    """-> the bytes of a message."""
    data = bytearray(_SIZE.size)
    _encoder.encode_into(message, data, _SIZE.size)
    _SIZE.pack_into(data, 0, len(data) - _SIZE.size)
    return data


class Inbox(Generic[MessageT]):
    """Assembles messages from the pieces in which a byte stream arrives. `decoder`: of what the other side sends."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._decode: Callable[[memoryview], MessageT] = decoder.decode
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """Add a piece. -> the messages that it completes. Exhaust the iterator before adding the next piece."""
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
