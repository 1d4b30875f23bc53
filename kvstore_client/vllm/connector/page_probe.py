"""Makes a fingerprint of the layout of pages that vLLM's own kernels write. The fingerprint does not depend on vLLM's
version.

Shapes and strides do not describe everything, because a kernel may interleave keys and values inside a page, or store
them scaled. So vLLM's code for writing to the cache is used to write known keys and values of one block to a page
outside the cache, and the bytes are hashed. Two engines with the same fingerprint can read each other's pages. A layer
with a state has no code that only writes the state, so the fingerprint of such layers includes the version of vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import vllm
import xxhash

logger = logging.getLogger(f"vllm.{__name__}")

PAGE_FINGERPRINT = "page-"  # the prefix of a fingerprint if the pages could be written
_SEED = 20_240_229


def page_fingerprint(
    layers: Mapping[str, Any],
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    block_tokens: int,
    dtype: torch.dtype,
    ranges: int = 1,
) -> str:
    """Return the fingerprint of the pages of these layers. It is ``page-`` and a digest. If a page cannot be written in
    this way, that is logged, and the fingerprint is ``vllm-`` and vLLM's version.

    `layers`, `kv_caches`: the layers and their caches, by name. `dtype`: the type of keys and values. `ranges`: the
        number of ranges of heads into which pages are cut. The fingerprint describes one of these ranges.
    """
    digests = set()
    try:
        for name, cache in kv_caches.items():
            if hasattr(layers[name], "get_state_shape"):
                digests.add(f"vllm-{vllm.__version__}")
                continue
            digests.add(_digest(layers[name], cache, num_blocks, block_tokens, dtype, ranges))
    except Exception as error:  # the interfaces of vLLM that this needs are not public
        logger.warning(
            "kvstore: the page layout of this engine cannot be determined (%s: %s), so blocks are shared with "
            "engines of the same vLLM version only",
            type(error).__name__,
            error,
        )
        return f"vllm-{vllm.__version__}"
    return PAGE_FINGERPRINT + xxhash.xxh3_64_hexdigest(" ".join(sorted(digests)).encode())


def _digest(layer: Any, cache: torch.Tensor, num_blocks: int, tokens: int, dtype: torch.dtype, ranges: int) -> str:
    """Return the digest of one range of heads in the pages of one block of a layer, after known keys and values were
    written to it."""
    contents = set()
    for number in range(ranges):  # the other ranges stay zero, which shows where this range is
        parts = _written(layer, cache, num_blocks, tokens, dtype, ranges, number)
        content = parts.pop(number)
        if any(map(any, parts)):
            raise ValueError("the ranges of heads of a page cannot be separated")
        if not any(content):
            raise ValueError("nothing was written")
        contents.add(content)
    if len(contents) > 1:
        raise ValueError("the ranges of heads are laid out in different ways")
    return xxhash.xxh3_64_hexdigest(contents.pop())


def _written(
    layer: Any, cache: torch.Tensor, num_blocks: int, tokens: int, dtype: torch.dtype, ranges: int, number: int
) -> list[bytes]:
    """Return the bytes of each range of heads, after known keys and values were written to range `number` and zeros to
    the others."""
    pages = cache.shape[0] // num_blocks  # the kernel's pages in one block
    page = torch.zeros_like(cache[:pages])  # dense, with the same order of axes
    slots = torch.arange(tokens, device=cache.device)

    def known(*shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_SEED + len(shape) + sum(shape))
        return torch.randn(shape, generator=generator).to(device=cache.device, dtype=dtype)

    if hasattr(layer, "kv_lora_rank"):
        latent, rope = known(tokens, layer.kv_lora_rank), known(tokens, 1, layer.qk_rope_head_dim)
        layer.impl.do_kv_cache_update(latent, rope, page, slots, layer.kv_cache_dtype, layer._k_scale)
    else:
        heads = layer.num_kv_heads // ranges
        some = slice(number * heads, (number + 1) * heads)
        key = torch.zeros((tokens, layer.num_kv_heads, layer.head_size), dtype=dtype, device=cache.device)
        value = torch.zeros((tokens, layer.num_kv_heads, layer.head_size_v), dtype=dtype, device=cache.device)
        key[:, some] = known(tokens, heads, layer.head_size)
        value[:, some] = known(tokens, heads, layer.head_size_v) + 1
        layer.impl.do_kv_cache_update(layer, key, value, page, slots)
    parts = page.chunk(ranges, dim=1) if ranges > 1 else [page]
    return [part.contiguous().view(torch.uint8).cpu().numpy().tobytes() for part in parts]
