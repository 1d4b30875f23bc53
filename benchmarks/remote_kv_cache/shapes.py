"""The blocks that are moved: the block sizes of five models, 8192 tokens in 8 calls, and rows of random bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = "npt.NDArray[np.uint8]"

BLOCK_TOKENS: Final = 16
ELEMENT_BYTES: Final = 2
KEY_BYTES: Final = 16


@dataclass(frozen=True)
class Model:
    """The shape of one model's KV cache, 16-bit elements."""

    name: str
    layers: int
    kv_heads: int
    head_size: int

    @property
    def layer_bytes(self) -> int:
        """The bytes of keys and values of one block in one layer."""
        return 2 * BLOCK_TOKENS * self.kv_heads * self.head_size * ELEMENT_BYTES

    @property
    def block_bytes(self) -> int:
        """The bytes of one block, all layers."""
        return self.layers * self.layer_bytes


MODELS: Final = {
    model.name: model
    for model in (
        Model("Qwen2.5-32B", 64, 8, 128),
        Model("Qwen2.5-7B", 28, 4, 128),
        Model("Qwen2.5-3B", 36, 2, 128),
        Model("glm-4-9b", 40, 4, 128),
        Model("Llama-3.1-8B", 32, 8, 128),
    )
}
HEADLINE: Final = MODELS["Qwen2.5-7B"]


@dataclass(frozen=True)
class Batch:
    """The number of blocks that an operation moves, in all and in one call."""

    blocks: int
    per_call: int

    def calls(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last (exclusive) block of every call."""
        for start in range(0, self.blocks, self.per_call):
            yield start, min(start + self.per_call, self.blocks)

    def described(self, block_bytes: int) -> dict[str, int]:
        """Return the description for a result, for blocks of this size."""
        return {"block_bytes": block_bytes, "blocks": self.blocks, "blocks_per_call": self.per_call}


FULL: Final = Batch(512, 64)
QUICK: Final = Batch(32, 8)


def random_rows(count: int, row_bytes: int, seed: int = 0) -> Rows:
    """Return rows of shape `(count, row_bytes)` that neither repeat nor compress. The same seed gives the same
    bytes."""
    words = -(-count * row_bytes // 8)
    data = np.random.Generator(np.random.SFC64(seed)).integers(0, 1 << 64, words, dtype=np.uint64)
    return data.view(np.uint8)[: count * row_bytes].reshape(count, row_bytes)


def random_keys(count: int, seed: int = 1) -> Rows:
    """Return `(count, 16)` distinct keys, like those of `prefix_keys`."""
    return random_rows(count, KEY_BYTES, seed)


def size_text(count: int) -> str:
    """Return a size as text: ``64 KiB`` if that is exact, otherwise ``917504 B``."""
    return f"{count >> 10} KiB" if count % 1024 == 0 and count < 1 << 19 else f"{count} B"
