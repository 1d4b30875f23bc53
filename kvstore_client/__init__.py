"""The kvstore client: `KVStoreClient`, `AsyncKVStoreClient`, and the types that they take, return and raise.

Each name is imported from its module when it is first used. So a program that only catches `Timeout` does not import
NumPy. NumPy alone takes longer to import than this whole package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore_client._links.buffers import Blocks, Memory
    from kvstore_client.aio import AsyncKVStoreClient, AsyncPromise
    from kvstore_client.client import KVStoreClient
    from kvstore_client.errors import (
        BlockSizeMismatch,
        ConnectionLost,
        KeySizeMismatch,
        KVStoreError,
        NotAuthorized,
        OutOfMemory,
        ProtocolError,
        SettingRefused,
        Timeout,
    )
    from kvstore_client.keys import DTYPES, DType, Keys, Namespace, TokenIds, prefix_keys
    from kvstore_client.promises import Promise
    from kvstore_client.results import (
        ClientStats,
        ConnectedClient,
        DiskInfo,
        GetResult,
        Location,
        Lookup,
        NamespaceInfo,
        PurgeReply,
        RequestTimes,
        RunningSetting,
        SetResult,
        ShardInfo,
        ShardSettings,
        ShardStatus,
        SlowlogReply,
        SlowRequest,
        StoreInfo,
        TenantInfo,
    )

__all__ = [
    "DTYPES",
    "AsyncKVStoreClient",
    "AsyncPromise",
    "BlockSizeMismatch",
    "Blocks",
    "ClientStats",
    "ConnectedClient",
    "ConnectionLost",
    "DType",
    "DiskInfo",
    "GetResult",
    "KVStoreClient",
    "KVStoreError",
    "KeySizeMismatch",
    "Keys",
    "Location",
    "Lookup",
    "Memory",
    "Namespace",
    "NamespaceInfo",
    "NotAuthorized",
    "OutOfMemory",
    "Promise",
    "ProtocolError",
    "PurgeReply",
    "RequestTimes",
    "RunningSetting",
    "SetResult",
    "SettingRefused",
    "ShardInfo",
    "ShardSettings",
    "ShardStatus",
    "SlowRequest",
    "SlowlogReply",
    "StoreInfo",
    "TenantInfo",
    "Timeout",
    "TokenIds",
    "prefix_keys",
]

_MODULES: Final = {
    "aio": ("AsyncKVStoreClient", "AsyncPromise"),
    "client": ("KVStoreClient",),
    "errors": (
        "BlockSizeMismatch",
        "ConnectionLost",
        "KVStoreError",
        "KeySizeMismatch",
        "NotAuthorized",
        "OutOfMemory",
        "ProtocolError",
        "SettingRefused",
        "Timeout",
    ),
    "_links.buffers": ("Blocks", "Memory"),
    "keys": ("DTYPES", "DType", "Keys", "Namespace", "TokenIds", "prefix_keys"),
    "promises": ("Promise",),
    "results": (
        "ClientStats",
        "ConnectedClient",
        "DiskInfo",
        "GetResult",
        "Location",
        "Lookup",
        "NamespaceInfo",
        "PurgeReply",
        "RequestTimes",
        "RunningSetting",
        "SetResult",
        "ShardInfo",
        "ShardSettings",
        "ShardStatus",
        "SlowRequest",
        "SlowlogReply",
        "StoreInfo",
        "TenantInfo",
    ),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name == module:
            return importlib.import_module(f"{__name__}.{module}")
        if name in names:
            value: object = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value  # later uses find the name there and do not call this function
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
