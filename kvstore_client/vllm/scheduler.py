"""The connector's half beside the engine's scheduler: which blocks a step loads and which it saves.

Thread: the engine core's, inside ``schedule()``. Blocking: one lookup in the store per request and rank, bounded by
``lookup_timeout_s``; everything else is bookkeeping.

Loads take the engine's asynchronous way (the request is parked until the worker names it finished) even though the
worker moves the bytes in one go. In the synchronous way the loaded blocks would be shared with other requests and
built upon, also by a step already scheduled behind, before it is known whether the load worked.

Saves cover every full block of a request the step after which it is complete, prompt and generated tokens alike:
the answer is the next turn's prompt. The cursor ``next_save`` starts where the store's run of blocks ended, so that
blocks which only the engine has (the store was emptied, or evicted them) are saved again and the chain in the store
has no hole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvstore_client import KVStoreClient
from kvstore_client.vllm.guard import StoreGuard

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# A request the engine has no room for asks in every step; an answer may be this old.
LOOKUP_VALID_S = 1.0
# What a lookup found stays until the worker has read it, one step later.
PIN_S = 5.0


@dataclass
class BlockLoad:
    """Blocks to copy from the store into the cache before ``request_id`` may run. keys[i] goes to block_ids[i]."""

    request_id: str
    keys: list[bytes]
    block_ids: list[int]


@dataclass
class BlockSaves:
    """Blocks that are complete at the end of a step, to copy to the store. keys[i] names block_ids[i]."""

    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


@dataclass
class Lookup:
    """The store's answer for a waiting request. All counts in blocks."""

    local: int  # computed in the engine's own cache
    stored: int  # leading blocks that every rank's namespace has
    asked_at: float


@dataclass
class Tracked:
    """A request that has blocks."""

    request: Request
    next_save: int  # blocks before this one are in the store, or were handed to the workers to save
    loading: set[int] = field(default_factory=set)  # block ids being loaded


class SchedulerHalf:
    """State per request, from its first lookup until the engine reports it finished."""

    def __init__(
        self,
        guards: Sequence[StoreGuard],
        *,
        block_tokens: int,
        min_hit_tokens: int,
        may_load: bool,
        may_save: bool,
        counters: Counter[str],
    ) -> None:
        """guards: one per rank, each on that rank's namespace."""
        self._guards = guards
        self._block_tokens = block_tokens
        self._min_hit_tokens = min_hit_tokens
        self._may_load = may_load and bool(guards)
        self._may_save = may_save and bool(guards)
        self._counters = counters
        self._lookups: dict[str, Lookup] = {}
        self._tracked: dict[str, Tracked] = {}
        self._failed_loads: set[str] = set()
        self._loads: list[BlockLoad] = []

    def matched_tokens(self, request: Request, computed_tokens: int) -> int:
        """Tokens beyond the ``computed_tokens`` of the engine's own cache that can be loaded: whole blocks only,
        and never the last token, which the engine must compute to go on."""
        local = computed_tokens // self._block_tokens
        usable = min(len(request.block_hashes), (request.num_tokens - 1) // self._block_tokens)
        # One failed load is enough: a store that finds blocks but cannot deliver them would hold the request for ever.
        if (
            not self._may_load
            or usable <= local
            or request.skip_reading_prefix_cache
            or request.request_id in self._failed_loads
        ):
            self._lookups[request.request_id] = Lookup(local, 0, 0.0)
            return 0
        lookup = self._lookups.get(request.request_id)
        if lookup is None or time.monotonic() - lookup.asked_at > LOOKUP_VALID_S:
            stored = self._stored_run(request.block_hashes[:usable])
            lookup = Lookup(local, stored, time.monotonic())
            self._lookups[request.request_id] = lookup
        lookup.local = local
        tokens = (lookup.stored - local) * self._block_tokens
        return tokens if tokens >= max(1, self._min_hit_tokens) else 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine gave the request blocks, and counts on ``external_tokens`` to be loaded into them."""
        lookup = self._lookups.pop(request.request_id, None)
        if lookup is None:  # the second call of a loaded request, which changes nothing
            return
        tracked = Tracked(request, next_save=lookup.stored)
        self._tracked[request.request_id] = tracked
        if external_tokens <= 0:
            return
        first, end = lookup.local, lookup.local + external_tokens // self._block_tokens
        block_ids = list(blocks.get_block_ids()[0][first:end])
        tracked.loading = set(block_ids)
        self._loads.append(BlockLoad(request.request_id, list(request.block_hashes[first:end]), block_ids))
        self._counters["hit_tokens"] += external_tokens

    def take_loads(self) -> list[BlockLoad]:
        """The loads promised since the last call. A request waits until its load was handed out and done."""
        loads, self._loads = self._loads, []
        return loads

    def completed_blocks(self, output: SchedulerOutput) -> BlockSaves:
        """The blocks which the step the engine just scheduled completes."""
        saves = BlockSaves()
        if not self._may_save or output.kv_connector_block_state is None:
            return saves
        planned: set[bytes] = set()
        for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            block_ids = output.kv_connector_block_state.get_block_ids(request_id)
            if tracked is None or block_ids is None:
                continue
            request = tracked.request
            # After a failed load the engine computes again from the first missing block on: go back with it.
            first = min(tracked.next_save, request.num_computed_tokens // self._block_tokens)
            # A hash exists once the block's tokens are known, so drafts that may be rejected are never saved.
            computed = (request.num_computed_tokens + scheduled_tokens) // self._block_tokens
            end = min(computed, len(request.block_hashes))
            for key, block_id in zip(request.block_hashes[first:end], block_ids[0][first:end], strict=False):
                if key not in planned:
                    planned.add(key)
                    saves.keys.append(key)
                    saves.block_ids.append(block_id)
            tracked.next_save = max(first, end)
        return saves

    def loaded(self, output: KVConnectorOutput) -> None:
        """The workers' report on the loads of a step."""
        for request_id in output.finished_recving or ():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if tracked.loading & (output.invalid_block_ids or set()):
                self._failed_loads.add(request_id)
                self._counters["failed_loads"] += 1
            tracked.loading = set()

    def finished(self, request: Request) -> None:
        """Forget the request. A load still under way ends in the worker's step and needs nothing from here."""
        self._tracked.pop(request.request_id, None)
        self._lookups.pop(request.request_id, None)
        self._failed_loads.discard(request.request_id)

    def close(self) -> None:
        for guard in self._guards:
            guard.close()

    def _stored_run(self, keys: list[bytes]) -> int:
        """How many leading blocks every rank's namespace has. A rank that cannot answer has none."""
        self._counters["lookups"] += 1
        stored = len(keys)
        for guard in self._guards:
            asked = keys[:stored]
            stored = guard.call(partial(_match_prefix, asked), 0)
            if stored == 0:
                break
        return stored


def _match_prefix(keys: list[bytes], client: KVStoreClient) -> int:
    return client.match_prefix(keys, refresh=True, pin_s=PIN_S)
