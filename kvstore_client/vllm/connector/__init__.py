"""The package of vLLM's connector. The module path is `kvstore_client.vllm.connector`, and the class is
`KVStoreConnector`.

The class is imported on first access, because it needs vLLM, while some of the other modules do not.
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
