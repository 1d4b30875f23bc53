"""The namespace of a tier's chunks: all that must be equal before two engines' CPU tiers may share chunks.

A chunk's key names its tokens, everything before them, the adapter, the salt, and the cache group. A chunk's bytes are
a row of the engine's shared region, as the ranks have written it. A row contains the parts of all ranks, one after the
other. The part of a rank contains the tensors of its layers, and each tensor contains the blocks of the chunk. So the
namespace names the model and everything that decides this layout. An engine that differs in any of this has another
namespace and shares nothing. If it is doubtful whether a setting matters, the setting is included.

The framework passes too little of this to a tier: no revision, no quantization, no hash function. The functions that
call the tier's constructor have the rest, and `engine_configs` takes it from them. If the bytes of an engine's chunks
depend on anything that neither the key nor the namespace can name, the engine stops while it starts.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import vllm
import xxhash
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstore.wire import MAX_BLOCK_BYTES
from kvstore_client import Namespace
from kvstore_client.vllm.shared.block_hashes import check_hash_reproducible, hash_probe
from kvstore_client.vllm.shared.engine_checks import check_inputs
from kvstore_client.vllm.shared.model_identity import config_digest, draft_identity, load_identity, model_identity
from kvstore_client.vllm.shared.releases import layer_specs

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig


def engine_configs() -> tuple[VllmConfig, KVCacheConfig]:
    """Return the configuration of the engine that is being built, from the stack of the calling thread.

    Raises ValueError if there is none on the stack, because with a wrong guess, the engine could use another model's
    bytes.
    """
    frame = sys._getframe()
    while frame is not None:
        engine, cache = frame.f_locals.get("vllm_config"), frame.f_locals.get("kv_cache_config")
        if isinstance(engine, VllmConfig) and isinstance(cache, KVCacheConfig):
            return engine, cache
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError(
        "kvstore: KVStoreTier found no engine configuration. Only vLLM's OffloadingConnector (spec_name "
        "'TieringOffloadingSpec') may make the tier. The tier takes the configuration from the arguments of "
        f"that connector's constructor. vLLM {vllm.__version__} may have moved these arguments (tested with 0.32)"
    )


def check_chunks(engine: VllmConfig, cache: KVCacheConfig, chunk_bytes: int) -> None:
    """Raise ValueError for an engine whose chunks cannot be shared. The message says what to change."""
    check_hash_reproducible(engine)
    check_inputs(engine)
    if engine.lora_config is not None:
        raise ValueError(
            "kvstore: --enable-lora is set, but vLLM passes only an adapter's name to a tier, and another engine may "
            "have other weights under this name. Leave --enable-lora out, or use KVStoreConnector, which supports it"
        )
    for group in cache.kv_cache_groups:
        if any(getattr(spec, "non_causal", False) for spec in layer_specs(group.kv_cache_spec)):
            raise ValueError(
                "kvstore: this model has layers that attend to later tokens, so a chunk depends on more than the "
                "tokens before it and cannot be shared. Run this model without kvstore"
            )
    if chunk_bytes > MAX_BLOCK_BYTES:
        raise ValueError(
            f"kvstore: a chunk of the CPU tier has {chunk_bytes} bytes; the store takes at most {MAX_BLOCK_BYTES}. Set "
            "a smaller 'blocks_per_chunk' or 'block_size' in kv_connector_extra_config"
        )


def chunk_namespace(
    offloading: OffloadingConfig,
    engine: VllmConfig,
    cache: KVCacheConfig,
    *,
    chunk_bytes: int,
    page_bytes: int,
    tenant: str,
    weights: str,
) -> Namespace:
    """Return the namespace of the chunks.

    chunk_bytes: the size of a row of the primary tier, in bytes.
    page_bytes: the size of one rank's part of a row, in bytes.
    weights: the operator's name for the weights.
    """
    model = engine.model_config
    parallel = offloading.parallel
    chunk_tokens = offloading.groups[0].tokens_per_block * offloading.cache.blocks_per_chunk
    return Namespace(
        model=model_identity(model),
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=chunk_tokens,
        block_bytes=chunk_bytes,
        layout=f"vllm-cpu-tier/{offloading.kv_cache_layout}/{page_bytes}",
        rank=0,  # one chunk holds the parts of all ranks
        world=1,
        tenant=tenant,
        extra={
            "engine": f"vllm-{vllm.__version__}",  # vLLM itself decides the layout of a tier's chunks
            "weights": weights,
            "config": config_digest(model),
            "loaded": load_identity(engine.load_config),
            "draft": draft_identity(engine),
            "kv_dtype": f"{engine.cache_config.cache_dtype}/{offloading.model.dtype}",
            "parallel": f"tp{parallel.tp_size}pp{parallel.pp_size}pcp{parallel.pcp_size}dcp{parallel.dcp_size}"
            f"of{parallel.world_size}/{engine.parallel_config.cp_kv_cache_interleave_size}"
            f"/{envs.VLLM_PP_LAYER_PARTITION}",
            "copies": f"replicated={offloading.replicated_layout},canonical={offloading.canonical_layout}",
            "chunk": f"{offloading.cache.blocks_per_chunk}x{offloading.worker_kv_bytes_per_block}"
            f"/{offloading.cache.tokens_per_hash}",
            "cache": _cache_digest(cache),
            "device": f"{current_platform.device_name}/{current_platform.get_device_capability()}",
            "attention": str(engine.attention_config.backend),
            "hash": hash_probe(engine),
        },
    )


def _cache_digest(cache: KVCacheConfig) -> str:
    """Return a digest of how layers share a chunk. It does not depend on the size of the engine's cache. So it covers
    neither the number of blocks nor the sizes and offsets of the tensors, but only the order of the offsets."""
    groups = [(group.layer_names, group.role.value, repr(group.kv_cache_spec)) for group in cache.kv_cache_groups]
    places = sorted({tensor.offset for tensor in cache.kv_cache_tensors})
    tensors = [(tensor.layers, tensor.block_stride, places.index(tensor.offset)) for tensor in cache.kv_cache_tensors]
    return xxhash.xxh3_128_hexdigest(repr((groups, tensors)).encode())
