"""vLLM's KV events for what the connector keeps: blocks in the CPU tier and in the store.

The engine publishes them beside those of its own cache, and routers build their index from them. ``medium`` is ``CPU``
for the CPU tier and ``STORAGE`` for the store; ``ownership`` is ``kvstore`` for both. A block is in the CPU tier from
``BlockStored`` to ``BlockRemoved``. It is in the store from ``BlockStored`` on, when all ranks have stored their parts;
what the store evicts it does not tell, so who must know asks it.

Hashes are the engine's own, as in its other events, also where the block has another key in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

OWNERSHIP: Final = "kvstore"
LOCALITY: Final = {MEDIUM_CPU: "LOCAL", MEDIUM_STORAGE: "REMOTE"}


@dataclass
class _Block:
    """What an event says of a block. users: saves and loads under way that may tell of it."""

    block_hash: Any
    parent: Any
    token_ids: list[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None
    group: int
    users: int = 0


def group_kinds(kv_cache_config: KVCacheConfig) -> list[tuple[str, int | None]]:
    """What `KVEvents` must know of the groups."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]


class KVEvents:
    """The events of one engine. Not thread-safe. All calls do nothing if they are not wanted."""

    def __init__(self, *, wanted: bool, block_tokens: int, groups: Sequence[tuple[str, int | None]]) -> None:
        """groups: of each group of the cache, what vLLM calls its kind, and its sliding window."""
        self.wanted = wanted
        self._groups = groups
        self._block_tokens = block_tokens
        self._blocks: dict[bytes, _Block] = {}  # by key
        self._in_tier: dict[bytes, tuple[Any, int]] = {}  # key -> hash, group
        self._events: list[KVCacheEvent] = []

    def note(self, request: Request, key: bytes, index: int, group: int) -> None:
        """A save or a load of the request's block ``index`` in a group begins: what events will say of it."""
        if not self.wanted or index >= len(request.block_hashes):  # the tail of a prompt has no hash
            return
        block = self._blocks.get(key)
        if block is None:
            hashes, tokens = request.block_hashes, self._block_tokens
            start, lora = index * tokens, request.lora_request
            extra, _ = generate_block_hash_extra_keys(request, start, start + tokens, 0)
            block = self._blocks[key] = _Block(
                maybe_convert_block_hash(hashes[index]),
                maybe_convert_block_hash(hashes[index - 1]) if index else None,
                list(request.all_token_ids[start : start + tokens]),
                lora.adapter_id if lora else None,
                lora.name if lora else None,
                extra,
                group,
            )
        block.users += 1

    def forget(self, key: bytes) -> None:
        """A save or a load that was noted has ended."""
        block = self._blocks.get(key)
        if block is not None:
            block.users -= 1
            if not block.users:
                del self._blocks[key]

    def stored(self, keys: Sequence[bytes], medium: str) -> None:
        """These blocks, which were noted, are there now."""
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                continue
            if medium == MEDIUM_CPU:
                self._in_tier[key] = block.block_hash, block.group
            extra = to_event_extra_keys([block.extra_keys])
            kind, window = self._groups[block.group]
            self._events.append(
                BlockStored(
                    block_hashes=[block.block_hash],
                    parent_block_hash=block.parent,
                    token_ids=block.token_ids,
                    block_size=self._block_tokens,
                    lora_id=block.lora_id,
                    medium=medium,
                    lora_name=block.lora_name,
                    extra_keys=extra,
                    group_idx=block.group,
                    kv_cache_spec_kind=kind,
                    kv_cache_spec_sliding_window=window,
                    locality=LOCALITY[medium],
                    ownership=OWNERSHIP,
                )
            )

    def evicted(self, keys: Sequence[bytes]) -> None:
        """These blocks are not in the CPU tier any more."""
        removed: dict[int, list[Any]] = {}  # by group
        for key in keys:
            if key in self._in_tier:
                block_hash, group = self._in_tier.pop(key)
                removed.setdefault(group, []).append(block_hash)
        self._events += [
            BlockRemoved(
                block_hashes=hashes,
                medium=MEDIUM_CPU,
                group_idx=group,
                locality=LOCALITY[MEDIUM_CPU],
                ownership=OWNERSHIP,
            )
            for group, hashes in removed.items()
        ]

    def cleared(self) -> None:
        """The CPU tier is empty, and nothing that is under way will be found by anybody."""
        self.evicted(list(self._in_tier))
        self._blocks.clear()

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
