"""The kvstore client: `KVStoreClient`, `AsyncKVStoreClient`, and what they take and return."""

from kvstore_client.aio import AsyncKVStoreClient
from kvstore_client.client import KVStoreClient
from kvstore_client.errors import (
    BlockSizeMismatch,
    ConnectionLost,
    KVStoreError,
    NotAuthorized,
    OutOfMemory,
    ProtocolError,
    Timeout,
)
from kvstore_client.keys import Namespace, prefix_keys
from kvstore_client.results import GetResult, SetResult, StoreInfo

__all__ = [
    "AsyncKVStoreClient",
    "BlockSizeMismatch",
    "ConnectionLost",
    "GetResult",
    "KVStoreClient",
    "KVStoreError",
    "Namespace",
    "NotAuthorized",
    "OutOfMemory",
    "ProtocolError",
    "SetResult",
    "StoreInfo",
    "Timeout",
    "prefix_keys",
]
