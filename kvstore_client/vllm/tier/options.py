"""The options of one entry of ``secondary_tiers``, except those that vLLM itself reads (type, module_path, …)."""

from __future__ import annotations

from typing import Literal

from kvstore_client.vllm.shared.store_options import StoreOptions


class TierOptions(StoreOptions, frozen=True, kw_only=True):
    """The tier's own options, in addition to `StoreOptions`. Each chunk of vLLM's CPU tier is one block of the store.

    waiting_chunks: how many chunks may wait to be sent; 0 stands for a quarter of the CPU tier. Beyond that, the chunks
        that have waited longest are dropped.
    locality: where the store is, as seen from the engine. vLLM uses it in its filters of requests and for backpressure.
    """

    waiting_chunks: int = 0
    locality: Literal["LOCAL", "REMOTE"] = "REMOTE"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.waiting_chunks < 0:
            raise ValueError(f"waiting_chunks is {self.waiting_chunks}; expected 0 or more chunks")
