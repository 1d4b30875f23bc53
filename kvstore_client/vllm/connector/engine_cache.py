"""Removes outdated blocks from the engine's own cache. The connector does not change the cache in any other way.

No request finds a block that was removed. Requests that already use the block continue to use it.

Only the engine core's thread uses this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvstore_client.vllm.shared.releases import BlockTables, block_tables

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput


class EngineCache:
    """The engine's own cache. `manager`: vLLM's manager of the cache. If it is None, no block can be removed."""

    def __init__(self, manager: KVCacheManager | None = None) -> None:
        self._manager = manager

    def tables(self, output: SchedulerOutput) -> BlockTables | None:
        """Return the block tables of the step that was just scheduled."""
        return block_tables(output, self._manager)

    @property
    def is_empty(self) -> bool:
        """Whether no request has blocks and no block can be found. This is so after a reset that vLLM reports as
        successful."""
        if self._manager is None:
            return True
        pool: BlockPool = self._manager.block_pool
        in_use = pool.num_gpu_blocks - pool.get_num_free_blocks() - 1  # the null block counts as used
        return not in_use and not len(pool.cached_block_hash_to_block)

    def evict_all(self) -> None:
        """Remove all blocks."""
        if self._manager is not None:
            pool = self._manager.block_pool
            named = {block.block_id for block in pool.blocks if block.block_hash is not None}
            pool.evict_blocks(named | pool.cached_block_hashes_by_block.keys())

    def evict_of(self, request_ids: Iterable[str]) -> None:
        """Remove the blocks of these requests."""
        for request_id in request_ids:
            self.evict(self.blocks_of(request_id))

    def evict(self, block_ids: Iterable[int]) -> None:
        if self._manager is not None:
            self._manager.block_pool.evict_blocks(set(block_ids))

    def blocks_of(self, request_id: str) -> set[int]:
        """Return the blocks that a request has now."""
        if self._manager is None:
            return set()
        return {block for group in self._manager.get_block_ids(request_id) for block in group}
