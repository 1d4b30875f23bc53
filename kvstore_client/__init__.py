"""The kvstore client: `KVStoreClient`, `AsyncKVStoreClient`, and the types that they take, return and raise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_client.client import KVStoreClient
from kvstore_client.errors import (
    BlockSizeMismatch,
    ConnectionLost,
    KeySizeMismatch,
    KVStoreError,
    NotAuthorized,
    OutOfMemory,
    ProtocolError,
    Timeout,
)
from kvstore_client.keys import Namespace, prefix_keys
from kvstore_client.promises import Promise
from kvstore_client.results import GetResult, Location, Lookup, SetResult, ShardStatus, StoreInfo

if TYPE_CHECKING:
    from kvstore_client.aio import AsyncKVStoreClient

__all__ = [
    "AsyncKVStoreClient",
    "BlockSizeMismatch",
    "ConnectionLost",
    "GetResult",
    "KVStoreClient",
    "KVStoreError",
    "KeySizeMismatch",
    "Location",
    "Lookup",
    "Namespace",
    "NotAuthorized",
    "OutOfMemory",
    "Promise",
    "ProtocolError",
    "SetResult",
    "ShardStatus",
    "StoreInfo",
    "Timeout",
    "prefix_keys",
]


def __getattr__(name: str) -> object:
    if name == "AsyncKVStoreClient":  # asyncio takes a third of the import time, and most users do not need it
        from kvstore_client.aio import AsyncKVStoreClient

        return AsyncKVStoreClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
