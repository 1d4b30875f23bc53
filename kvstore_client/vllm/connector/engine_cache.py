"""The engine's own cache, as far as the connector changes it: blocks that are not right any more are taken out of it.

A block that is taken out is found by no request. Requests that use it go on to use it.

Thread: the engine core's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class EngineCache:
    """manager: vLLM's; None: it is not known, and nothing can be taken out."""

    def __init__(self, manager: KVCacheManager | None = None) -> None:
        self._manager = manager

    @property
    def is_empty(self) -> bool:
        """Whether no request has blocks, and no block can be found, as after a reset that vLLM calls successful."""
        if self._manager is None:
            return True
        pool: BlockPool = self._manager.block_pool
        in_use = pool.num_gpu_blocks - pool.get_num_free_blocks() - 1  # the null block counts as used
        return not in_use and not len(pool.cached_block_hash_to_block)

    def evict_all(self) -> None:
        """Take out all blocks."""
        if self._manager is not None:
            pool = self._manager.block_pool
            named = {block.block_id for block in pool.blocks if block.block_hash is not None}
            pool.evict_blocks(named | pool.cached_block_hashes_by_block.keys())

    def evict_of(self, request_ids: Iterable[str]) -> None:
        """Take out the blocks of these requests."""
        for request_id in request_ids:
            self.evict(self.blocks_of(request_id))

    def evict(self, block_ids: Iterable[int]) -> None:
        if self._manager is not None:
            self._manager.block_pool.evict_blocks(set(block_ids))

    def blocks_of(self, request_id: str) -> set[int]:
        """The blocks that a request has now."""
        if self._manager is None:
            return set()
        return {block for group in self._manager.get_block_ids(request_id) for block in group}
