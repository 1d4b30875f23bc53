"""An index of the blocks that engines have, built from their KV events. A lookup follows a prompt block by block.

It needs no hash function, because an event carries a block's tokens and its parent. Each engine has an index of its
own. So engines whose hashes mean different things, such as engines of different models, are never mixed. A block is
identified by its tokens, its adapter, and everything else that its hash covers: the cache salt, pictures and
embeddings.

The index is bounded. When it is full, it drops blocks of the engine whose blocks take the most memory. The blocks that
were reported or looked up longest ago are dropped first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import xxhash

GPU: Final = "GPU"
STORAGE: Final = "STORAGE"
INDEX_MEMORY_BYTES: Final = 256 << 20
INDEXED_BLOCK_BYTES: Final = 400  # the most memory for a block in one tier; measured by tests/unit/test_block_index.py
_HOLDING_BYTES: Final = 110  # the memory for the same block in each further tier or group of layers
# vLLM's names for groups of layers that keep every token. None stands for an event without a name.
_WHOLE: Final = (None, "full_attention", "mla_attention")

Hash = bytes | int
# The blocks in one tier of an engine, for each group of layers. A block is in the tier if all groups have it.
_Tier = dict[int, set[Hash]]


@dataclass(frozen=True)
class PromptExtras:
    """What identifies the blocks of a prompt in addition to its tokens.

    lora_name: the adapter's name, empty if there is none.
    media: pictures and other media, in order. Each entry has vLLM's identifier (either the request's ``uuid`` or a hash
        that vLLM makes), the position of the placeholder's first token, and the number of the placeholder's tokens.
    """

    lora_name: str = ""
    cache_salt: str = ""
    media: Sequence[tuple[str, int, int]] = ()

    def of_block(self, start: int, tokens: int) -> tuple[Any, ...]:
        """Return the ``extra_keys`` of the block that begins at token `start`, in the form that events use."""
        found: list[Any] = [self.lora_name] if self.lora_name else []
        found += [
            (name, first - start) for name, first, size in self.media if first < start + tokens and start < first + size
        ]
        if self.cache_salt and not start:
            found.append(self.cache_salt)
        return tuple(found)


@dataclass
class _Engine:
    """The blocks of one engine. A place is a digest of everything that identifies a block: its parent, its tokens, its
    adapter and the rest."""

    children: dict[bytes, Hash] = field(default_factory=dict)  # by place
    places: OrderedDict[Hash, bytes] = field(default_factory=OrderedDict)  # oldest first
    tiers: dict[str, _Tier] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)  # tokens of a block
    holdings: int = 0

    @property
    def held_bytes(self) -> int:
        return len(self.places) * (INDEXED_BLOCK_BYTES - _HOLDING_BYTES) + self.holdings * _HOLDING_BYTES

    def sets(self) -> Iterator[set[Hash]]:
        return (blocks for tier in self.tiers.values() for blocks in tier.values())

    def store(self, medium: str, group: int, event: dict[str, Any]) -> None:
        blocks = self.tiers.setdefault(medium, {}).setdefault(group, set())
        size, parent, extras = event["block_size"], event["parent_block_hash"], event.get("extra_keys")
        lora_name = event.get("lora_name") or ""
        tokens = np.asarray(event["token_ids"], dtype=np.int64)
        if parent in self.places:
            self.places.move_to_end(parent)
        for number, block_hash in enumerate(event["block_hashes"]):
            extra = _tuples(extras[number] or ()) if extras else ()
            place = _place(parent, tokens[number * size : (number + 1) * size], lora_name, extra)
            if block_hash in self.places:
                self.places.move_to_end(block_hash)
            else:
                self.places[block_hash] = place
                self.children[place] = block_hash
                self.sizes.add(size)
            self.holdings += block_hash not in blocks
            blocks.add(block_hash)
            parent = block_hash

    def remove(self, blocks: set[Hash], hashes: Sequence[Hash]) -> None:
        for block_hash in hashes:
            if block_hash in blocks:
                blocks.discard(block_hash)
                self.holdings -= 1
                if not any(block_hash in each for each in self.sets()):
                    self._forget(block_hash)

    def drop_oldest(self) -> None:
        block_hash = next(iter(self.places))
        for blocks in self.sets():
            self.holdings -= block_hash in blocks
            blocks.discard(block_hash)
        self._forget(block_hash)

    def _forget(self, block_hash: Hash) -> None:
        place = self.places.pop(block_hash)
        if self.children.get(place) == block_hash:
            del self.children[place]

    def chain(self, tokens: np.ndarray[Any, np.dtype[np.int64]], keys: PromptExtras) -> tuple[list[Hash], int]:
        longest: tuple[list[Hash], int] = ([], next(iter(self.sizes), 1))
        for size in self.sizes:
            hashes: list[Hash] = []
            parent: Hash | None = None
            for start in range(0, len(tokens) - size + 1, size):
                extra = keys.of_block(start, size)
                parent = self.children.get(_place(parent, tokens[start : start + size], keys.lora_name, extra))
                if parent is None:
                    break
                hashes.append(parent)
            if len(hashes) * size > len(longest[0]) * longest[1]:
                longest = hashes, size
        for block_hash in reversed(longest[0]):  # so the end of a prompt is dropped before its beginning
            self.places.move_to_end(block_hash)
        return longest

    def runs(self, hashes: Sequence[Hash]) -> dict[str, int]:
        own = [tier for medium, tier in self.tiers.items() if medium != STORAGE]
        by_tier = {medium: _leading(hashes, [tier]) for medium, tier in self.tiers.items()}
        return {**by_tier, "any": _leading(hashes, own)}


class Index:
    """An index of the blocks of many engines, built from their events. Thread-safe.

    If an engine has its layers in several groups, the index considers only the groups that keep every token. For other
    groups, such as sliding windows, an engine either has the blocks that it needs at the end of a prefix, or computes
    them.

    memory_bytes: the approximate memory for all engines together, in bytes.
    storage: whether to keep blocks in the tier ``STORAGE``, too. Only their names are useful, because the store may
        have evicted these blocks since.
    """

    def __init__(self, memory_bytes: int = INDEX_MEMORY_BYTES, *, storage: bool = False) -> None:
        self._lock = threading.Lock()
        self._memory_bytes = memory_bytes
        self._storage = storage
        self._engines: dict[str, _Engine] = {}
        self._held_bytes = 0

    def apply(self, engine: str, event: dict[str, Any]) -> None:
        """Process an event of vLLM in its decoded form. Unknown kinds are ignored, because later versions may have
        more."""
        kind, medium, group = event.get("type"), event.get("medium") or GPU, event.get("group_idx") or 0
        if event.get("kv_cache_spec_kind") not in _WHOLE or (medium == STORAGE and not self._storage):
            return
        with self._lock:
            blocks = self._engines.setdefault(engine, _Engine())
            before = blocks.held_bytes
            if kind == "BlockStored":
                blocks.store(medium, group, event)
            elif kind == "BlockRemoved":
                blocks.remove(blocks.tiers.get(medium, {}).get(group, set()), event["block_hashes"])
            elif kind == "AllBlocksCleared":  # of the GPU cache only; removals from other tiers are reported by block
                for each in blocks.tiers.get(GPU, {}).values():
                    blocks.remove(each, list(each))
            self._held_bytes += blocks.held_bytes - before
            while self._held_bytes > self._memory_bytes:
                largest = max(self._engines.values(), key=lambda engine: engine.held_bytes)
                before = largest.held_bytes
                largest.drop_oldest()
                self._held_bytes += largest.held_bytes - before

    def forget(self, engine: str) -> None:
        """Forget all blocks of an engine, because the engine is gone or its blocks are no longer known."""
        with self._lock:
            blocks = self._engines.pop(engine, None)
            self._held_bytes -= blocks.held_bytes if blocks is not None else 0

    def chain(
        self, token_ids: Sequence[int], keys: PromptExtras = PromptExtras(), engine: str | None = None
    ) -> tuple[list[Hash], int]:
        """Return the hashes of the prompt's leading blocks that `engine` has, and the number of tokens in a block. If
        `engine` is None, use the engine that has the longest prefix."""
        tokens = np.asarray(token_ids, dtype=np.int64)
        with self._lock:
            asked = [each for name, each in self._engines.items() if engine in (None, name)]
            chains = [each.chain(tokens, keys) for each in asked]
        return max(chains, key=lambda chain: len(chain[0]) * chain[1], default=([], 1))

    def runs(self, hashes: Sequence[Hash], engine: str | None = None) -> dict[str, dict[str, int]]:
        """Return, for each engine and each of its tiers, how many leading blocks of `hashes` are there. The entry
        ``any`` counts the engine's own tiers together. If `engine` is None, all engines are included."""
        with self._lock:
            return {name: each.runs(hashes) for name, each in self._engines.items() if engine in (None, name)}

    @property
    def engines(self) -> list[str]:
        """The engines that have sent an event."""
        with self._lock:
            return list(self._engines)

    @property
    def blocks(self) -> int:
        """The number of blocks that engines have. A block that two engines have counts twice."""
        with self._lock:
            return sum(len(engine.places) for engine in self._engines.values())

    @property
    def held_bytes(self) -> int:
        """The memory that the index takes, approximately."""
        return self._held_bytes


def _place(
    parent: Hash | None, tokens: np.ndarray[Any, np.dtype[np.int64]], lora_name: str, extra: tuple[Any, ...]
) -> bytes:
    return xxhash.xxh3_128_digest(repr((parent, lora_name, extra)).encode() + tokens.tobytes())


def _tuples(value: Any) -> Any:
    """Return the value with its lists replaced by tuples, because msgpack does not distinguish them."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list | tuple) else value


def _leading(hashes: Sequence[Hash], tiers: Sequence[_Tier]) -> int:
    """Return how many leading blocks every group has in at least one of the tiers."""
    groups = {group for tier in tiers for group in tier}
    by_group = [[tier[group] for tier in tiers if group in tier] for group in groups]
    if not by_group:
        return 0
    there = (all(any(each in some for some in sets) for sets in by_group) for each in hashes)
    return next((number for number, present in enumerate(there) if not present), len(hashes))
