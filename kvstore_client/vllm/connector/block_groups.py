"""The groups of a model's KV cache: layers that keep the same tokens share a group, and a request has blocks of each.

In a group of full attention a request has a block for all its tokens. In one with a sliding window it has blocks for
the window alone: in the place of those before it is the null block, which holds nothing. A prefix is a hit if the store
has it in all groups, and of each group that is loaded for which the engine gave the request blocks.

Blocks of all groups are of one size and lie in one cache, so they are blocks of one namespace. Where there is more
than one group, a block's key is the engine's hash and one byte more: the number of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import xxhash
from vllm.v1.kv_cache_interface import SlidingWindowSpec, iter_layer_specs

from kvstore_client.engine.parts import part_keys

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

NULL_BLOCK: Final = 0


@dataclass(frozen=True, slots=True)
class Place:
    """A block of a request: the index in its chain, the group, and its number in the engine's cache."""

    index: int
    group: int
    block_id: int


class BlockGroups:
    """The groups of one engine. Immutable.

    count: how many there are. first: one that keeps most tokens. whole: how many keep all tokens. windows: whether one
    does not.
    """

    def __init__(self, windows: Sequence[bool] = (False,)) -> None:
        """windows: of each group, whether it has a sliding window."""
        self.count = len(windows)
        self.windows = any(windows)
        self.whole = list(windows).count(False)
        self.first = list(windows).index(False) if self.whole else 0

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig) -> BlockGroups:
        """Those of an engine that `check_engine` accepts."""
        groups = [iter_layer_specs(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        return cls([any(isinstance(spec, SlidingWindowSpec) for spec in group) for group in groups])

    @property
    def recompute_whole(self) -> bool:
        """Whether a request must be computed from its beginning if one of its blocks is missing: what is before that
        block is not all there, or the engine cannot tell whose block it is."""
        return self.windows or self.count > 1

    def key(self, key: bytes, group: int) -> bytes:
        """The key of a block in a group."""
        return key + bytes([group]) if self.count > 1 else key

    def keys(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys of blocks in all groups, block by block."""
        return part_keys(keys, range(self.count)) if self.count > 1 else keys

    def in_group(self, keys: Sequence[bytes], group: int) -> Sequence[bytes]:
        """The keys of blocks in one group."""
        return [self.key(key, group) for key in keys] if self.count > 1 else keys

    def all_of(self, present: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """By block, whether it is present in all groups; `present`: of the keys of `keys`."""
        return np.asarray(present.reshape(-1, self.count).all(axis=1))

    def places(self, block_ids: Sequence[Sequence[int]], first: int, end: int) -> Iterator[Place]:
        """Blocks `first` to `end` of a request, whose numbers are `block_ids` by group, as far as it has them."""
        for index in range(first, end):
            for group, ids in enumerate(block_ids):
                if ids[index] != NULL_BLOCK:
                    yield Place(index, group, ids[index])


def groups_digest(kv_cache_config: KVCacheConfig) -> str:
    """The number of groups, and a digest of which layers are in which; empty for one group."""
    groups = [",".join(sorted(group.layer_names)) for group in kv_cache_config.kv_cache_groups]
    return f"{len(groups)}-{xxhash.xxh3_64_hexdigest('/'.join(groups).encode())}" if len(groups) > 1 else ""
