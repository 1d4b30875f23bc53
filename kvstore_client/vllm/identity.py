"""What must agree before two engines may share blocks, and what an engine must be for its blocks to be shared.

A block's key (the engine's own block hash) names its tokens, everything before them, the LoRA adapter, the
multimodal inputs and the cache salt. The namespace must name the rest of what decides the block's bytes: the
weights, the model's configuration, the dtypes, the page layout of the attention backend, and which rank's part it
is. A too narrow namespace costs hits; a too wide one serves wrong bytes, so when in doubt it is here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
import xxhash
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs

from kvstore_client import Namespace
from kvstore_client.vllm.layout import BlockLayout

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
SAMPLES = 256
SAMPLE_BYTES = 4096


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ValueError, saying what to change, for an engine whose blocks cannot be shared."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in os.environ:
        raise ValueError(
            f"kvstore: block hashes of prefix_caching_hash_algo={algorithm!r} differ in every process unless "
            "PYTHONHASHSEED is set, so nothing would ever be found again. Set --prefix-caching-hash-algo sha256 "
            "(or sha256_cbor), or set PYTHONHASHSEED to the same value for every engine"
        )
    if (groups := len(kv_cache_config.kv_cache_groups)) != 1:
        raise ValueError(
            f"kvstore: this model has {groups} KV cache groups, one is supported. Start the engine with "
            "--disable-hybrid-kv-cache-manager; models that need several groups even then cannot use this connector"
        )
    for spec in iter_layer_specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec):
        if not isinstance(spec, FullAttentionSpec):
            raise ValueError(
                f"kvstore: KV caches of kind {type(spec).__name__} are not supported, only those that keep every "
                "token. Start the engine with --disable-hybrid-kv-cache-manager if the model mixes kinds"
            )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name)) != 1:
            raise ValueError(f"kvstore: {name} is {size}; context parallelism is not supported, set it to 1")


def rank_namespace(vllm_config: VllmConfig, layout: BlockLayout, layers: Iterable[object], tenant: str) -> Namespace:
    """The namespace of this worker's part of every block. ``layers``: the attention layers that have KV caches."""
    model = vllm_config.model_config
    tp, pp = get_tp_group(), get_pp_group()
    return Namespace(
        model=model_identity(model),
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=vllm_config.cache_config.block_size,
        block_bytes=layout.block_bytes,
        layout=f"{'+'.join(sorted(set(map(attention_kind, layers))))}:{layout.description}",
        rank=pp.rank_in_group * tp.world_size + tp.rank_in_group,
        world=pp.world_size * tp.world_size,
        tenant=tenant,
        extra={
            "engine": "vllm-" + ".".join(vllm.__version__.split(".")[:2]),
            "config": config_digest(model),
            "kv_dtype": f"{vllm_config.cache_config.cache_dtype}/{layout.dtype}",
            "parallel": f"tp{tp.world_size}pp{pp.world_size}",
            "hash": vllm_config.cache_config.prefix_caching_hash_algo,
        },
    )


def attention_kind(layer: object) -> str:
    """The backend that decides what the bytes of a page mean, with the CPU backend's instruction set."""
    backend = getattr(layer, "get_attn_backend", None)
    name = backend().get_name() if backend is not None else type(layer).__name__
    isa = getattr(layer, "isa", None)
    return f"{name}/{isa}" if isa else str(name)


def model_identity(model: ModelConfig) -> str:
    """What the weights are: ``name@revision`` of a hub model, ``architecture@fingerprint`` of local files.

    A path is no identity: the same path holds other weights tomorrow, and the same weights lie at another path on the
    next machine.
    """
    path = Path(model.model)
    if path.exists() and (files := weight_files(path)):
        return f"{model.hf_config.model_type}@{files_fingerprint(files)}"
    name = getattr(model, "model_weights", None) or model.model  # the former where weights come from an object store
    revision = getattr(model.hf_config, "_commit_hash", None) or model.revision
    return f"{name}@{revision}" if revision else str(name)


def weight_files(path: Path) -> list[Path]:
    """The files with weights in a folder, or the one file that is the model, by name."""
    candidates = [path] if path.is_file() else path.iterdir()
    return sorted(file for file in candidates if file.suffix in WEIGHT_SUFFIXES)


def files_fingerprint(files: Iterable[Path]) -> str:
    """A digest of files: their names, sizes and the bytes at ``SAMPLES`` places of each.

    Sampling keeps it under a second for weights of any size; that other weights agree in every sampled place of
    every file, with equal names and sizes, is as good as excluded even for merged adapters.
    """
    digest = xxhash.xxh3_128()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for offset in sample_offsets(size):
                stream.seek(offset)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def sample_offsets(size: int) -> Iterable[int]:
    """Where to sample a file of ``size`` bytes: everywhere when it is small, else evenly from start to end."""
    if size <= SAMPLES * SAMPLE_BYTES:
        return range(0, size, SAMPLE_BYTES)
    return [index * (size - SAMPLE_BYTES) // (SAMPLES - 1) for index in range(SAMPLES)]


def config_digest(model: ModelConfig) -> str:
    """A digest of the model's configuration as the engine runs it, overrides and quantization included."""
    fields: Mapping[str, Any] = model.hf_config.to_dict()
    kept = {
        name: value
        for name, value in fields.items()
        if not name.startswith("_") and name not in ("transformers_version", "dtype", "torch_dtype")
    }
    text = json.dumps(kept, sort_keys=True, default=str)
    if "longrope" in text:  # chooses its factors by the longest sequence the engine allows
        text += f"/{model.max_model_len}"
    return xxhash.xxh3_64_hexdigest(f"{text}/{model.quantization}".encode())
