"""How an engine names its blocks, told in short: two engines find each other's blocks only if all of it is the same.

Engines tell it in their directory record, and to whoever asks (``kv_transfer_params``, ``{"kvstore": {"describe":
true}}``), so that a proxy hands prompts over between engines that fit, and says of others why they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
import xxhash

# Instead of a digest: the engine loads and saves nothing at the moment, as its weights may have changed.
NOT_SHARED: Final = "none"


class BlockNames(msgspec.Struct, frozen=True):
    """namespaces: a digest of the namespaces of all ranks, and of what the weights are called; empty: not known;
    `NOT_SHARED`. generation: of the namespaces, the highest that the engine knows; -1: the store was never reached.
    adapter: a digest of the LoRA adapter's content, where one was asked for; empty: none, or not known."""

    namespaces: Annotated[str, msgspec.Meta(max_length=64)] = ""
    generation: Annotated[int, msgspec.Meta(ge=-1)] = -1
    adapter: Annotated[str, msgspec.Meta(max_length=64)] = ""

    @classmethod
    def of(cls, generations: Mapping[str, int], weights: str, adapter: str = "") -> BlockNames:
        """generations: by the namespaces' ids. weights: what they are called, beside what the namespaces say."""
        digest = xxhash.xxh3_128_hexdigest("\n".join([*sorted(generations), weights]).encode())
        return cls(digest, max(generations.values(), default=-1), adapter)
