"""Makes vLLM's KV events for the blocks that the connector keeps in the CPU tier and in the store.

The engine publishes them together with the events of its own cache, and routers build their index from them. ``medium``
is ``CPU`` for the CPU tier and ``STORAGE`` for the store; ``ownership`` is ``kvstore`` for both. A block is in the CPU
tier from its ``BlockStored`` event to its ``BlockRemoved`` event. For the store, ``BlockStored`` says that all ranks
have stored their slices. The store does not report its evictions, so a router that must know whether a block is still
there asks the store.

Hashes are the engine's own, as in its other events, even if the block has a different key in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvstore_client.vllm.shared.releases import event_extra_keys, made

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

OWNERSHIP: Final = "kvstore"
LOCALITY: Final = {MEDIUM_CPU: "LOCAL", MEDIUM_STORAGE: "REMOTE"}


@dataclass
class _Block:
    """The content of an event about a block. `users`: the number of saves and loads in progress that may report it."""

    block_hash: Any
    parent: Any
    token_ids: list[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None
    group: int
    users: int = 0


def group_kinds(kv_cache_config: KVCacheConfig) -> list[tuple[str, int | None]]:
    """Return the argument `groups` of `KVEvents`."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]


class KVEvents:
    """The events of one engine. Not thread-safe. If events are not wanted, no call has an effect."""

    def __init__(self, *, wanted: bool, block_tokens: int, groups: Sequence[tuple[str, int | None]]) -> None:
        """`wanted`: whether events are wanted. `block_tokens`: the number of tokens of a block. `groups`: for each
        group of the cache, vLLM's name for its kind, and its sliding window."""
        self.wanted = wanted
        self._groups = groups
        self._block_tokens = block_tokens
        self._blocks: dict[bytes, _Block] = {}  # by key
        self._in_tier: dict[bytes, tuple[Any, int]] = {}  # hash and group, by key
        self._events: list[KVCacheEvent] = []

    def note(self, request: Request, key: bytes, index: int, group: int) -> None:
        """Note the content of the events of a block. Call this when a save or a load of the block begins. `index`,
        `group`: the block's index in the request, and its group."""
        if not self.wanted or index >= len(request.block_hashes):  # a partly filled last block has no hash
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
        """Note that a save or a load for which `note` was called has ended."""
        block = self._blocks.get(key)
        if block is not None:
            block.users -= 1
            if not block.users:
                del self._blocks[key]

    def stored(self, keys: Sequence[bytes], medium: str) -> None:
        """Report that these blocks are now in the tier `medium`. Blocks for which `note` was not called are skipped."""
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                continue
            if medium == MEDIUM_CPU:
                self._in_tier[key] = block.block_hash, block.group
            kind, window = self._groups[block.group]
            self._events.append(
                made(
                    BlockStored,
                    block_hashes=[block.block_hash],
                    parent_block_hash=block.parent,
                    token_ids=block.token_ids,
                    block_size=self._block_tokens,
                    lora_id=block.lora_id,
                    medium=medium,
                    lora_name=block.lora_name,
                    extra_keys=event_extra_keys(block.extra_keys),
                    group_idx=block.group,
                    kv_cache_spec_kind=kind,
                    kv_cache_spec_sliding_window=window,
                    locality=LOCALITY[medium],
                    ownership=OWNERSHIP,
                )
            )

    def evicted(self, keys: Sequence[bytes]) -> None:
        """Report that these blocks are no longer in the CPU tier."""
        removed: dict[int, list[Any]] = {}  # by group
        for key in keys:
            if key in self._in_tier:
                block_hash, group = self._in_tier.pop(key)
                removed.setdefault(group, []).append(block_hash)
        self._events += [
            made(
                BlockRemoved,
                block_hashes=hashes,
                medium=MEDIUM_CPU,
                group_idx=group,
                locality=LOCALITY[MEDIUM_CPU],
                ownership=OWNERSHIP,
            )
            for group, hashes in removed.items()
        ]

    def cleared(self) -> None:
        """Report that the CPU tier is empty. The blocks of saves and loads in progress will not be reported."""
        self.evicted(list(self._in_tier))
        self._blocks.clear()

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
