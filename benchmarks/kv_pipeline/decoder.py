"""A decoder with real weights and attention, on one core: float32, in numpy.

Each layer reads its weights and the KV of all sequences, as an engine's step of decoding does. The KV of a layer is one
block for each sequence, `(2, heads, context, head_size)`, so that blocks from the store are used in place. New tokens
are kept in a separate tail, which is attended together with the rest, because KV only grows at its end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """`batch` sequences with `context` tokens of KV each, in `layers` layers of `heads` heads."""

    layers: int = 16
    heads: int = 12
    head_size: int = 64
    batch: int = 8
    context: int = 512
    steps: int = 4  # decode steps in a run: the length of the tail

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @property
    def block_bytes(self) -> int:
        """The bytes of one sequence's KV in one layer."""
        return 2 * self.context * self.width * 4

    @property
    def layer_bytes(self) -> int:
        return self.batch * self.block_bytes

    def of_batch(self, batch: int) -> Shape:
        """Return the same shape for `batch` sequences."""
        return replace(self, batch=batch)

    @property
    def kv_bytes(self) -> int:
        """The bytes of KV that a step reads."""
        return self.layers * self.layer_bytes

    @property
    def weight_bytes(self) -> int:
        return self.layers * 12 * self.width**2 * 4


@dataclass
class Layer:
    """The weights of a layer."""

    qkv: Array
    out: Array
    up: Array
    down: Array


@dataclass
class Partial:
    """Attention over a part of the KV. For each sequence and head: the sum of values weighted by exp(score - top), the
    sum of the weights, and the largest score. Parts are merged exactly (as FlashAttention does)."""

    values: Array
    weights: Array
    top: Array

    def merged(self, other: Partial) -> Partial:
        """Return this merged with the attention over another part."""
        top = np.maximum(self.top, other.top)
        mine, theirs = np.exp(self.top - top), np.exp(other.top - top)
        return Partial(self.values * mine + other.values * theirs, self.weights * mine + other.weights * theirs, top)

    @property
    def output(self) -> Array:
        return self.values / self.weights


def attend(query: Array, kv: Array) -> Partial:
    """query: (batch, heads, 1, head_size). kv: (batch, 2, heads, tokens, head_size)."""
    scores = query @ kv[:, 0].swapaxes(-1, -2)  # (batch, heads, 1, tokens)
    top = scores.max(axis=-1, keepdims=True)
    np.exp(scores - top, out=scores)
    return Partial(scores @ kv[:, 1], scores.sum(axis=-1, keepdims=True), top)


class Decoder:
    """Weights from a seed, and the tail of the current run."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        random = np.random.default_rng(seed)
        width = shape.width

        def weights(rows: int, columns: int) -> Array:
            return (random.standard_normal((rows, columns), dtype=np.float32) / np.float32(rows**0.5)).astype(
                np.float32
            )

        self.layers = [
            Layer(
                weights(width, 3 * width), weights(width, width), weights(width, 4 * width), weights(4 * width, width)
            )
            for _ in range(shape.layers)
        ]
        self.start = random.standard_normal((shape.batch, width), dtype=np.float32)

    def of_batch(self, batch: int) -> Decoder:
        """Return the decoder of the first `batch` sequences, with the same weights."""
        smaller = copy.copy(self)
        smaller.shape, smaller.start = self.shape.of_batch(batch), self.start[:batch]
        return smaller

    def run(self, past: Callable[[int, Array], Partial], stepped: Callable[[], None] = lambda: None) -> Array:
        """Decode `steps` tokens. Return the last hidden states.

        past: computes a layer's attention over the KV from before the run; called with the layer and its query.
        stepped: called after each step."""
        shape = self.shape
        tail = np.zeros((shape.layers, shape.batch, 2, shape.heads, shape.steps, shape.head_size), dtype=np.float32)
        hidden = self.start
        for step in range(shape.steps):
            for number, layer in enumerate(self.layers):
                qkv = (_normed(hidden) @ layer.qkv).reshape(shape.batch, 3, shape.heads, shape.head_size)
                query = qkv[:, 0, :, None, :] / np.float32(shape.head_size**0.5)
                tail[number, :, :, :, step] = qkv[:, 1:]
                found = past(number, query).merged(attend(query, tail[number, :, :, :, : step + 1]))
                hidden = hidden + found.output.reshape(shape.batch, shape.width) @ layer.out
                hidden = hidden + np.maximum(_normed(hidden) @ layer.up, 0) @ layer.down
            stepped()
        return hidden


def _normed(hidden: Array) -> Array:
    return hidden / np.sqrt(np.square(hidden).mean(axis=-1, keepdims=True) + np.float32(1e-6))
