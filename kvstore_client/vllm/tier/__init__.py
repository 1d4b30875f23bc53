"""The tier for vLLM's tiered offloading. Its module path is `kvstore_client.vllm.tier`, and its class is `KVStoreTier`.

The class is imported on first access, because it needs vLLM, which some other modules of this package do not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore_client.vllm.tier.secondary_tier import KVStoreTier

__all__ = ["KVStoreTier"]


def __getattr__(name: str) -> object:
    if name == "KVStoreTier":
        from kvstore_client.vllm.tier.secondary_tier import KVStoreTier

        return KVStoreTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
