"""A short description of how an engine names its blocks. Two engines find each other's blocks only if their
descriptions are equal.

Engines put the description in their directory record, and answer requests for it (``kv_transfer_params``, ``{"kvstore":
{"describe": true}}``). A proxy uses it to hand prompts over only between engines whose descriptions match, and to say
why others do not match.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
import xxhash

# Stands in place of a digest while the engine loads and saves nothing, because its weights may have changed.
NOT_SHARED: Final = "none"


class BlockNames(msgspec.Struct, frozen=True):
    """How an engine names its blocks.

    namespaces: one digest of the namespaces of all ranks and the name of the weights. It is empty if it is not known.
        It is `NOT_SHARED` while the engine shares no blocks.
    generation: the highest generation of these namespaces that the engine knows, -1 if the store was never reached.
    adapter: a digest of the content of the LoRA adapter that a request named. It is empty if the request named none, or
        if the content is not known.
    """

    namespaces: Annotated[str, msgspec.Meta(max_length=64)] = ""
    generation: Annotated[int, msgspec.Meta(ge=-1)] = -1
    adapter: Annotated[str, msgspec.Meta(max_length=64)] = ""

    @classmethod
    def of(cls, generations: Mapping[str, int], weights: str, adapter: str = "") -> BlockNames:
        """`generations`: the generation of each namespace, by namespace id. `weights`: the name of the weights, which
        the namespaces do not include. `adapter`: the attribute of this name."""
        digest = xxhash.xxh3_128_hexdigest("\n".join([*sorted(generations), weights]).encode())
        return cls(digest, max(generations.values(), default=-1), adapter)
