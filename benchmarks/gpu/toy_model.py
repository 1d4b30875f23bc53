"""A toy transformer in plain torch over a paged KV cache, in the shapes of Llama's models: RMSNorm, RoPE, grouped-query
attention, SwiGLU. The weights are random, from a fixed seed, with a spread that keeps activations equally large in all
layers. Queries and keys have a wider spread, so that a token attends to few others and the next token depends on the
whole prompt. An even wider spread would let each layer amplify rounding differences until the next token is a different
one.

For each layer the cache has pages in the layout of vLLM's attention backends: (blocks, KV heads, tokens, K and V of a
head). Attention to earlier chunks and attention within the chunk are two calls of flash attention, merged by their
log-sum-exps. So no matrix of all scores is made, and the kernel supports both calls. The pages are gathered before each
call; an engine's kernels need no such copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

BLOCK_TOKENS: Final = 16
_WIDE: Final = 1.75  # spread of queries and keys: scores deviate by 3, and few tokens get most weight
LOGITS: Final = 3.0  # their standard deviation
_ROWS: Final = 16384  # rows of the vocabulary at a time


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. `chunk`: how many tokens of a prompt are computed at a time."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    chunk: int = 8192

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def block_bytes(self) -> int:
        """The bytes of a block's keys and values in all layers, in bfloat16."""
        return self.layers * 2 * self.kv_heads * self.head_size * BLOCK_TOKENS * 2


LLAMA_8B: Final = Shape("8B", 32, 4096, 32, 8, 14336, 128256)
SMALL: Final = Shape("small", 4, 256, 8, 2, 512, 1024, chunk=96)


class ToyModel:
    """The weights and the cache of a model. Only the thread that owns the device's current stream may use it."""

    def __init__(self, shape: Shape, blocks: int, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        """blocks: the number of blocks in the cache."""
        self.shape = shape
        self.device = torch.device(device)
        generator = torch.Generator(self.device).manual_seed(1)

        def weight(rows: int, columns: int, wide: float = 1.0) -> torch.Tensor:
            made = torch.empty((rows, columns), dtype=dtype, device=self.device)
            return made.normal_(0.0, wide / math.sqrt(columns), generator=generator)

        hidden, kv = shape.hidden, shape.kv_heads * shape.head_size
        self._embedding = weight(shape.vocabulary, hidden, math.sqrt(hidden))
        self._head = weight(shape.vocabulary, hidden, LOGITS)
        self._layers = [
            (
                torch.cat([weight(hidden, hidden, _WIDE), weight(kv, hidden, _WIDE), weight(kv, hidden)]),
                weight(hidden, hidden),
                weight(2 * shape.feed_forward, hidden),
                weight(hidden, shape.feed_forward),
            )
            for _ in range(shape.layers)
        ]
        self.resize(blocks)
        turns = torch.arange(0, shape.head_size, 2, dtype=torch.float64, device=self.device) / shape.head_size
        self._frequencies = 500_000.0**-turns

    def resize(self, blocks: int) -> None:
        """Replace the cache with an empty one of this number of blocks."""
        shape = self.shape
        self.cache = torch.zeros(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.cache = torch.zeros(
            (shape.layers, blocks, shape.kv_heads, BLOCK_TOKENS, 2 * shape.head_size),
            dtype=self._embedding.dtype,
            device=self.device,
        )

    def kv_caches(self) -> dict[str, torch.Tensor]:
        """Return the pages of each layer, as an engine gives them to its connector."""
        return {f"model.layers.{number}.attn": layer for number, layer in enumerate(self.cache)}

    @torch.inference_mode()
    def compute(
        self,
        tokens: Sequence[int] | npt.NDArray[np.int64],
        block_ids: Sequence[int],
        start: int = 0,
        computed: Callable[[int, int], object] = lambda first, end: None,
    ) -> torch.Tensor:
        """Compute ``tokens[start:]``, chunk by chunk; the KV of the tokens before `start` is in the cache. block_ids:
        the blocks of the prompt, in order. computed: called after each chunk with the range (end exclusive) of the
        prompt's blocks that have become full. Return the logits of the next token, float32, on the device."""
        prompt = torch.as_tensor(tokens[start:], dtype=torch.long).to(self.device)
        blocks = torch.as_tensor(block_ids, dtype=torch.long).to(self.device)
        for first in range(start, len(tokens), self.shape.chunk):
            end = min(first + self.shape.chunk, len(tokens))
            hidden = self._forward(prompt[first - start : end - start], first, blocks)
            if hidden.is_cuda:  # an engine, too, needs a step's token before the next step
                torch.cuda.current_stream().synchronize()
            computed(first // BLOCK_TOKENS, end // BLOCK_TOKENS)
        # In float32, because in bfloat16 many logits would be equal. In pieces, because all weights at once would take
        # 2 GB.
        last = _norm(hidden[-1:])[0].float()
        return torch.cat([torch.mv(rows.float(), last) for rows in self._head.split(_ROWS)])

    def _forward(self, tokens: torch.Tensor, first: int, blocks: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        positions = torch.arange(first, first + len(tokens), device=self.device)
        angles = positions[:, None].double() * self._frequencies
        turns = (angles.cos().float(), angles.sin().float())
        pages, places = blocks[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
        kv = shape.kv_heads * shape.head_size
        x = self._embedding[tokens]
        for (qkv, out, gate_up, down), cache in zip(self._layers, self.cache, strict=True):
            q, k, v = (_norm(x) @ qkv.T).split([shape.hidden, kv, kv], dim=1)
            q = _turned(q.view(len(tokens), shape.heads, shape.head_size), turns)
            k = _turned(k.view(len(tokens), shape.kv_heads, shape.head_size), turns)
            v = v.view(len(tokens), shape.kv_heads, shape.head_size)
            cache[pages, :, places] = torch.cat([k, v], dim=2)
            x = x + self._attended(q, k, v, cache, first, blocks).reshape(len(tokens), shape.hidden) @ out.T
            gate, up = (_norm(x) @ gate_up.T).chunk(2, dim=1)
            x = x + (torch.nn.functional.silu(gate) * up) @ down.T
        return x

    def _attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, first: int, blocks: torch.Tensor
    ) -> torch.Tensor:
        """(tokens, heads, head size): attention of each token over the chunk and the `first` tokens before it."""
        shape = self.shape
        query = q.transpose(0, 1)[None]
        together = shape.heads // shape.kv_heads  # the number of query heads that share a head of keys and values
        own_k, own_v = (each.transpose(0, 1).repeat_interleave(together, dim=0)[None] for each in (k, v))
        own, own_sum = _flash(query, own_k, own_v, True)
        if not first:
            return own[0].transpose(0, 1)
        # Without a causal order, query heads that share a KV head can be treated as more queries of one head.
        earlier_k, earlier_v = self._gathered(cache, blocks[: -(-first // BLOCK_TOKENS)])[:, None, :, :first]
        folded = query.reshape(1, shape.kv_heads, together * len(q), shape.head_size)
        earlier, earlier_sum = _flash(folded, earlier_k, earlier_v, False)
        earlier, earlier_sum = earlier.reshape(query.shape), earlier_sum.reshape(own_sum.shape)
        share = torch.sigmoid(own_sum - earlier_sum)[..., None]  # the chunk's share of the token's attention
        merged = own.float() * share + earlier.float() * (1.0 - share)
        return merged.to(q.dtype)[0].transpose(0, 1)

    def _gathered(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """(K and V, KV heads, tokens, head size) of these blocks."""
        shape = self.shape
        words = cache.flatten(1).view(torch.int64)  # the time of a gather depends on the number of elements
        pages = words[blocks].view(cache.dtype).view(-1, shape.kv_heads, BLOCK_TOKENS, 2, shape.head_size)
        return pages.permute(3, 1, 0, 2, 4).reshape(2, shape.kv_heads, -1, shape.head_size)


def _norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-5)).to(x.dtype)


def _turned(x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding: (tokens, heads, head size), by the angles of each token."""
    cosine, sine = (turn[:, None] for turn in turns)
    one, other = x.float().chunk(2, dim=2)
    return torch.cat([one * cosine - other * sine, other * cosine + one * sine], dim=2).to(x.dtype)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention, in the layout of `q`, and the log-sum-exp of each query's scores, (1, heads, tokens), float32.
    causal: there are as many keys as queries, and no query attends to later keys."""
    operators = torch.ops.aten
    if q.is_cuda:
        found = operators._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
    else:
        found = operators._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    return found[0], found[1].float()
