"""The connector that vLLM loads: `kvstore_client.vllm.connector`, `KVStoreConnector`.

The class is imported when it is asked for: it needs vLLM, and the other modules do not all need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore_client.vllm.connector.kv_connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> object:
    if name == "KVStoreConnector":
        from kvstore_client.vllm.connector.kv_connector import KVStoreConnector

        return KVStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
