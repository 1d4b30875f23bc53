"""The tier that vLLM's tiered offloading loads: `kvstore_client.vllm.tier`, `KVStoreTier`.

The class is imported when it is asked for: it needs vLLM, and the other modules do not all need it.
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
