"""The client's own exceptions, all derived from `KVStoreError`."""

from __future__ import annotations

from typing import Final

from kvstore.wire import ErrorCode

MAX_QUOTED: Final = 1000  # the most characters of another program's text that are quoted


class KVStoreError(Exception):
    """The base class of all errors of kvstore."""


class ConnectionLost(KVStoreError):
    """The server cannot be reached, or the connection to it was lost during the call."""


class Timeout(KVStoreError):
    """The call's deadline passed."""


class BlockSizeMismatch(KVStoreError, ValueError):
    """A block's size is not the namespace's `block_bytes`."""


class KeySizeMismatch(KVStoreError, ValueError):
    """A key is not 8 to 64 bytes long, or has another length than the other keys of the batch or the namespace."""


class NotAuthorized(KVStoreError):
    """The server refuses the client's credentials, or these credentials do not allow the call."""


class OutOfMemory(KVStoreError):
    """A server can never store a block of the namespace's size, because its segments are smaller."""


class SettingRefused(KVStoreError, ValueError):
    """A setting cannot be changed while the server runs, or a value of it is not allowed."""


class ProtocolError(KVStoreError):
    """Client and server do not understand each other, or a request breaks a rule of the protocol."""


_BY_CODE: dict[int, type[KVStoreError]] = {
    ErrorCode.BLOCK_SIZE: BlockSizeMismatch,
    ErrorCode.KEY_SIZE: KeySizeMismatch,
    ErrorCode.NOT_AUTHORIZED: NotAuthorized,
    ErrorCode.OUT_OF_MEMORY: OutOfMemory,
    ErrorCode.SHUTTING_DOWN: ConnectionLost,
    ErrorCode.NO_PLACE: ConnectionLost,
    ErrorCode.SETTING: SettingRefused,
}


def readable(text: str) -> str:
    """Return the text of another program for messages and logs: one line with its first `MAX_QUOTED` characters."""
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text[:MAX_QUOTED])[:MAX_QUOTED]
    return shown if len(text) <= MAX_QUOTED else f"{shown}… ({len(text)} characters)"


def from_wire(code: int, message: str) -> KVStoreError:
    """Return the exception for an ERROR reply."""
    return _BY_CODE.get(code, ProtocolError)(readable(message))


TRANSPORT_ERRORS = (ConnectionLost, Timeout)
