"""The package that holds the tier for vLLM's tiered offloading: module path `kvstore_client.vllm.tier`, class
`KVStoreTier`.

The class is imported on first access: it needs vLLM, and not all of the other modules do.
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
