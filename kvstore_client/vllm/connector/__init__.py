"""The package that holds vLLM's connector: module path `kvstore_client.vllm.connector`, class `KVStoreConnector`.

The class is imported on first access: it needs vLLM, and not all of the other modules do.
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
