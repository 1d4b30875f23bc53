"""The blocks that engines have, from their KV events: an index that follows a prompt block by block.

It needs no hash function: an event carries a block's tokens and its parent. Each engine has an index of its own, so
engines whose hashes mean different things, as those of different models do, are never mixed. Beside its tokens, a block
is known by its adapter and by what else its hash covers: the cache salt, pictures, embeddings.

Bounded: what was heard of, or asked for, longest ago goes first, of the engine that has most.
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
MEMORY_BYTES: Final = 256 << 20
BLOCK_BYTES: Final = 400  # of a block, in one tier, at most: tests/unit/test_block_index.py measures it
_HOLDING_BYTES: Final = 110  # in each further tier or group of layers
# What vLLM calls the groups of layers that keep every token; None: it does not say.
_WHOLE: Final = (None, "full_attention", "mla_attention")

Hash = bytes | int
# What one tier of an engine has, by group of its layers. A block is there if all groups have it.
_Tier = dict[int, set[Hash]]


@dataclass(frozen=True)
class BlockKeys:
    """What decides the blocks of a prompt beside its tokens. lora_name: of the adapter; empty: none. media: pictures
    and the like, in order, by vLLM's identifier (the request's ``uuid``, or a hash that vLLM makes), and where their
    placeholders are: the first token, and how many."""

    lora_name: str = ""
    cache_salt: str = ""
    media: Sequence[tuple[str, int, int]] = ()

    def of_block(self, start: int, tokens: int) -> tuple[Any, ...]:
        """-> the ``extra_keys`` of the block that begins at token `start`, as events have them."""
        found: list[Any] = [self.lora_name] if self.lora_name else []
        found += [
            (name, first - start) for name, first, size in self.media if first < start + tokens and start < first + size
        ]
        if self.cache_salt and not start:
            found.append(self.cache_salt)
        return tuple(found)


@dataclass
class _Engine:
    """What one engine has. A place is a digest of a block's parent, its tokens, and the rest of what it is known by."""

    children: dict[bytes, Hash] = field(default_factory=dict)  # by place
    places: OrderedDict[Hash, bytes] = field(default_factory=OrderedDict)  # oldest first
    tiers: dict[str, _Tier] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)  # tokens of a block
    holdings: int = 0

    @property
    def held_bytes(self) -> int:
        return len(self.places) * (BLOCK_BYTES - _HOLDING_BYTES) + self.holdings * _HOLDING_BYTES

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

    def chain(self, tokens: np.ndarray[Any, np.dtype[np.int64]], keys: BlockKeys) -> tuple[list[Hash], int]:
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
        for block_hash in reversed(longest[0]):  # of a prompt, the end goes before the beginning
            self.places.move_to_end(block_hash)
        return longest

    def runs(self, hashes: Sequence[Hash]) -> dict[str, int]:
        own = [tier for medium, tier in self.tiers.items() if medium != STORAGE]
        by_tier = {medium: _leading(hashes, [tier]) for medium, tier in self.tiers.items()}
        return {**by_tier, "any": _leading(hashes, own)}


class Index:
    """The blocks of many engines, from their events. Thread-safe.

    Of an engine whose layers are in several groups, those count that keep every token. Of the others, such as sliding
    windows, an engine has what it needs at the end of a prefix, or computes it. memory_bytes: about, for all engines.
    storage: blocks in the store are kept, too; that engines have put them there is all that is known, and only what
    their names are is of use.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES, *, storage: bool = False) -> None:
        self._lock = threading.Lock()
        self._memory_bytes = memory_bytes
        self._storage = storage
        self._engines: dict[str, _Engine] = {}
        self._held_bytes = 0

    def apply(self, engine: str, event: dict[str, Any]) -> None:
        """Take in an event of vLLM, as its msgpack decodes. Unknown kinds are ignored: later versions may have more."""
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
            elif kind == "AllBlocksCleared":  # of the engine's own cache; of others each block is told
                for each in blocks.tiers.get(GPU, {}).values():
                    blocks.remove(each, list(each))
            self._held_bytes += blocks.held_bytes - before
            while self._held_bytes > self._memory_bytes:
                largest = max(self._engines.values(), key=lambda engine: engine.held_bytes)
                before = largest.held_bytes
                largest.drop_oldest()
                self._held_bytes += largest.held_bytes - before

    def forget(self, engine: str) -> None:
        """The engine has gone, or what it has is not known any more."""
        with self._lock:
            blocks = self._engines.pop(engine, None)
            self._held_bytes -= blocks.held_bytes if blocks is not None else 0

    def chain(
        self, token_ids: Sequence[int], keys: BlockKeys = BlockKeys(), engine: str | None = None
    ) -> tuple[list[Hash], int]:
        """-> the hashes of the prompt's leading blocks that an engine has, and the tokens of a block; without `engine`,
        of the one that has most."""
        tokens = np.asarray(token_ids, dtype=np.int64)
        with self._lock:
            asked = [each for name, each in self._engines.items() if engine in (None, name)]
            chains = [each.chain(tokens, keys) for each in asked]
        return max(chains, key=lambda chain: len(chain[0]) * chain[1], default=([], 1))

    def runs(self, hashes: Sequence[Hash], engine: str | None = None) -> dict[str, dict[str, int]]:
        """-> by engine and tier, how many leading ones of these blocks it has; ``any``: in its own tiers together.
        Without `engine`, of all."""
        with self._lock:
            return {name: each.runs(hashes) for name, each in self._engines.items() if engine in (None, name)}

    @property
    def engines(self) -> list[str]:
        """Those that have told anything."""
        with self._lock:
            return list(self._engines)

    @property
    def blocks(self) -> int:
        """How many blocks engines have; one that two engines have counts twice."""
        with self._lock:
            return sum(len(engine.places) for engine in self._engines.values())

    @property
    def held_bytes(self) -> int:
        """What all of it takes, about."""
        return self._held_bytes


def _place(
    parent: Hash | None, tokens: np.ndarray[Any, np.dtype[np.int64]], lora_name: str, extra: tuple[Any, ...]
) -> bytes:
    return xxhash.xxh3_128_digest(repr((parent, lora_name, extra)).encode() + tokens.tobytes())


def _tuples(value: Any) -> Any:
    """-> the value with tuples for lists: msgpack does not know which it was."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list | tuple) else value


def _leading(hashes: Sequence[Hash], tiers: Sequence[_Tier]) -> int:
    """How many leading ones of these blocks are in one of the tiers, in each group."""
    groups = {group for tier in tiers for group in tier}
    by_group = [[tier[group] for tier in tiers if group in tier] for group in groups]
    if not by_group:
        return 0
    there = (all(any(each in some for some in sets) for sets in by_group) for each in hashes)
    return next((number for number, present in enumerate(there) if not present), len(hashes))
