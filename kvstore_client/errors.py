"""The client's own exceptions, all derived from `KVStoreError`."""

from __future__ import annotations

from typing import Final

from kvstore.wire import ErrorCode

MOST_TEXT: Final = 1000  # characters that another program has said


class KVStoreError(Exception):
    """Base of all errors of kvstore."""


class ConnectionLost(KVStoreError):
    """The server cannot be reached, or went away during the call."""


class Timeout(KVStoreError):
    """The call's deadline passed."""


class BlockSizeMismatch(KVStoreError, ValueError):
    """A block's size is not the namespace's `block_bytes`."""


class KeySizeMismatch(KVStoreError, ValueError):
    """A key's length is outside 8 to 64 bytes, or differs from the other keys of the batch or the namespace."""


class NotAuthorized(KVStoreError):
    """The server refuses these credentials."""


class OutOfMemory(KVStoreError):
    """The server can never place a block of this size."""


class ProtocolError(KVStoreError):
    """The two sides do not understand each other, or a request breaks a rule of the protocol."""


_BY_CODE: dict[int, type[KVStoreError]] = {
    ErrorCode.BLOCK_SIZE: BlockSizeMismatch,
    ErrorCode.KEY_SIZE: KeySizeMismatch,
    ErrorCode.NOT_AUTHORIZED: NotAuthorized,
    ErrorCode.OUT_OF_MEMORY: OutOfMemory,
    ErrorCode.SHUTTING_DOWN: ConnectionLost,
    ErrorCode.NO_PLACE: ConnectionLost,
}


def readable(text: str) -> str:
    """-> what another program has said, for messages and logs: one line, the first `MOST_TEXT` characters of it."""
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text[:MOST_TEXT])[:MOST_TEXT]
    return shown if len(text) <= MOST_TEXT else f"{shown}… ({len(text)} characters)"


def from_wire(code: int, message: str) -> KVStoreError:
    """The exception for an ERROR reply."""
    return _BY_CODE.get(code, ProtocolError)(readable(message))


TRANSPORT_ERRORS = (ConnectionLost, Timeout)
