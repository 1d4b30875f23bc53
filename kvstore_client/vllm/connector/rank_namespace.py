"""Makes the namespace of a rank's slice of every block. It names everything that must agree before two engines may
share blocks.

A block's key covers its tokens, everything before them, and all other properties of the request that affect the block
(`block_keys`). The namespace must name everything else that affects the block's bytes. A namespace with too many fields
costs hits, but one with too few fields leads to wrong bytes. So a setting is included if there is any doubt. Each input
is named as follows (verified in vLLM 0.32). Words before a colon are inputs; words in quotes are fields of the
namespace.

* Tokens, cache salt, embeddings, images, adapters: these are in the key; see `block_keys`. If prefix caching and the
  processor's cache are both off, vLLM names images by a counter, so no block would be found. An engine with these
  settings is refused.
* Weights: "model" has the revision of the hub, or a fingerprint of the files. "loaded" says how they are loaded.
  "weights" is the operator's name for them.
* Rope and window overrides and similar settings: "config" has the whole configuration with which the engine runs,
  including quantization.
* Processing of images: "config".
* Weights of draft layers: "draft", if there are such layers (a draft model, EAGLE, MTP). Drafts from n-grams, suffixes
  or heads without caches change no bytes. In draft layers, the last entry of a block also depends on the next token.
  So a draft token may be rejected, but the generated tokens never change.
* The layers and heads of a block: "groups", "layers" (pipeline stages may be cut anywhere), "rank", "world" and
  "parallel". If blocks are kept in ranges of heads, the keys name the ranges. If they are kept in layer slices,
  "layer_parts" and the keys name the slices. With MLA, every rank has the whole block, so "rank", "world" and
  "parallel" are those of an engine with one rank.
* Dtypes: "dtype", "kv_dtype", and "layout", which has the dtype of each layer. fp8 scales either come from the
  checkpoint or are 1, and are never measured at run time. Scales per token are in the page.
* Page layout, attention backend: "layout" and "pages". The latter has a digest of the bytes that the engine's own
  kernels write for known keys and values.
* Shapes and dtypes of states: "layout". The meaning of states cannot be probed, so "pages" has the version of the
  engine for states.
* Block size: "block_tokens". An engine whose hashes cover another number of tokens is refused.
* Hash function and its seed: "hash".
* Engine version: not named, except for states, because the fields above cover the effects of a version.
* Bytes that depend on later tokens: refused (non-causal layers, diffusion models).
* Pages that are not plain tables: refused (sinks, compression, context parallelism, states elsewhere than at the ends
  of blocks).

Weights that change while the engine runs are covered by the keys (see ``block_keys``), not by the namespace. The checks
that refuse an engine are in ``shared/engine_checks.py``.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import xxhash
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvstore_client import Namespace
from kvstore_client.engine.paged.layout import BlockLayout
from kvstore_client.engine.slices import HeadSlices
from kvstore_client.vllm.shared.block_hashes import hash_probe
from kvstore_client.vllm.shared.model_identity import (
    config_digest,
    draft_identity,
    has_draft_layers,
    load_identity,
    model_identity,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = logging.getLogger(f"vllm.{__name__}")

# The names that model configurations use for the number of KV heads, either of all layers or of some layers.
KV_HEADS_NAME = re.compile(r"kv_heads|key_value_heads|n_head_kv|query_group|heads_in_group|attention_groups")


def rank_namespace(
    vllm_config: VllmConfig,
    layout: BlockLayout,
    layers: Iterable[object],
    pages: str,
    *,
    tenant: str,
    weights: str,
    slices: HeadSlices | None = None,
    groups: str = "",
) -> Namespace:
    """Return the namespace of this worker's slice of every block.

    `layout`: the layout of blocks.
    `layers`: the attention layers that have KV caches.
    `pages`: the `page_fingerprint` of these layers.
    `tenant`: the tenant.
    `weights`: the operator's name for the weights.
    `slices`: the ranges of heads that this worker has, if blocks are kept in ranges.
    `groups`: a digest of the layers in each group of the cache.

    Ranks that have the same slice (see `replica`) have the same namespace. Engines of different parallel sizes have
    different namespaces, even if a slice has the same heads. The reason is that if weights are quantized while they are
    loaded, each rank computes the scales of its own part. With `slices`, these engines have the same namespace, and so
    have all ranks of a pipeline stage. With MLA, these engines also have the same namespace, unless weights are
    quantized while they are loaded.
    """
    model = vllm_config.model_config
    layers = list(layers)
    tp, pp = get_tp_group(), get_pp_group()
    replicas = tp_replicas(vllm_config)
    stage_ranks = 1 if slices else tp.world_size // replicas
    tp_size = 1 if _is_latent(vllm_config) and not _quantizes_while_loading(model) else tp.world_size
    identity = model_identity(model)
    if "@" not in identity and tp.rank_in_group == pp.rank_in_group == 0:
        logger.warning(
            "kvstore: the revision of model %s is unknown, so every engine that loads a model of this name shares "
            "blocks. If its weights change under this name, give the option 'tenant' another value each time",
            identity,
        )
    return Namespace(
        model=identity,
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=vllm_config.cache_config.block_size,
        block_bytes=layout.slice_bytes // (len(slices.mine) if slices else 1),
        layout=f"{'+'.join(sorted(set(map(attention_kind, layers))))}:{layout.description}",
        rank=pp.rank_in_group * stage_ranks + (0 if slices else tp.rank_in_group // replicas),
        world=pp.world_size * stage_ranks,
        tenant=tenant,
        extra={
            "pages": pages,
            "weights": weights,
            "config": config_digest(model),
            "loaded": load_identity(vllm_config.load_config),
            "draft": draft_identity(vllm_config),
            "kv_dtype": f"{vllm_config.cache_config.cache_dtype}/{layout.dtype}",
            "layers": _names_digest(vllm_config, layers),
            "parallel": (f"heads{slices.of}" if slices else f"tp{tp_size}") + f"pp{pp.world_size}",
            "layer_parts": str(layout.slices),
            "groups": groups,
            "hash": hash_probe(vllm_config),
        },
    )


def head_slices(vllm_config: VllmConfig, head_shards: int) -> HeadSlices:
    """Return the ranges of heads that this rank has, if blocks are kept in the ranges that `head_shards` ranks would
    have. Raises ValueError if this model or this engine's size does not allow it. Call this only in a worker, after the
    model is loaded.

    With MLA, there is one range, because every rank has the whole block. If there are fewer heads than `head_shards`,
    there is one range for each head.
    """
    tp = get_tp_group()
    if head_shards % tp.world_size:
        raise ValueError(
            f"kvstore: head_shards is {head_shards} and --tensor-parallel-size is {tp.world_size}; expected a multiple "
            "of that size: the largest --tensor-parallel-size of the engines that share blocks"
        )
    if _is_latent(vllm_config):
        return HeadSlices(range(1), 1)
    specs = list(_layer_specs(vllm_config))
    heads = None if has_draft_layers(vllm_config) else uniform_kv_heads(vllm_config.model_config)
    if heads is None or any(getattr(spec, "num_kv_heads", 0) != max(1, heads // tp.world_size) for spec in specs):
        raise ValueError(
            "kvstore: head_shards cannot be used with this model: its layers, or those of a draft model, may differ "
            "in their number of KV heads. Leave head_shards out; then engines with the same --tensor-parallel-size "
            "share blocks"
        )
    if heads % head_shards and head_shards % heads:
        raise ValueError(
            f"kvstore: head_shards is {head_shards}, but this model has {heads} KV heads; expected a divisor or a "
            "multiple of that number"
        )
    of, holders = min(heads, head_shards), min(heads, tp.world_size)
    count, place = of // holders, tp.rank_in_group // (tp.world_size // holders)
    return HeadSlices(range(place * count, (place + 1) * count), of)


def replica(vllm_config: VllmConfig) -> tuple[int, int]:
    """Return the index of this rank among the ranks that have the same slice of every block, and the number of these
    ranks. Call this only in a worker, after the model is loaded."""
    replicas = tp_replicas(vllm_config)
    return get_tp_group().rank_in_group % replicas, replicas


def among_replicas(replica: tuple[int, int], mine: object) -> Sequence[object]:
    """Exchange an object among the ranks with the same slice of every block. All ranks of a pipeline stage must call
    this."""
    tp = get_tp_group()
    of_all: list[object] = [None] * tp.world_size
    torch.distributed.all_gather_object(of_all, mine, group=tp.cpu_group)
    first = tp.rank_in_group - replica[0]
    return of_all[first : first + replica[1]]


def tp_replicas(vllm_config: VllmConfig) -> int:
    """Return how many consecutive tensor-parallel ranks have the same bytes in every layer of this worker.

    For MLA, vLLM reports this number (a layer's ``max_tp_shards``). If there are fewer KV heads than ranks, vLLM also
    replicates heads to consecutive ranks (``QKVParallelLinear.num_kv_head_replicas``). But vLLM only reports the number
    of heads of the whole model. If the layers of the model differ, this may be the number of a single layer. If
    replication is assumed wrongly, a rank reads another rank's heads. If replication is not noticed, some bytes are
    only stored twice. So replicated heads count only if the model's configuration has one number of KV heads and every
    layer agrees with it.
    """
    tp = int(get_tp_group().world_size)
    heads = None if has_draft_layers(vllm_config) else uniform_kv_heads(vllm_config.model_config)
    specs = list(_layer_specs(vllm_config))
    replicas = tp if specs else 1
    for spec in specs:
        shards = getattr(spec, "max_tp_shards", None)
        if shards is None and heads is not None and getattr(spec, "num_kv_heads", 0) == max(1, heads // tp):
            shards = heads
        replicas = math.gcd(replicas, tp // shards if shards and tp % shards == 0 else 1)
    return replicas


def uniform_kv_heads(model: ModelConfig) -> int | None:
    """Return the number of KV heads of each layer, over all ranks. Return None if the configuration does not show it
    for certain."""
    if model.using_transformers_backend() or model.model_arch_config.per_layer_overrides is not None:
        return None
    named = [value for name, value in _items(model.hf_text_config.to_dict()) if KV_HEADS_NAME.search(name)]
    total = int(model.get_total_num_kv_heads())
    return total if named == [total] else None


def _items(fields: object) -> Iterator[tuple[str, object]]:
    """Yield all names and values of nested dicts and lists."""
    if isinstance(fields, Mapping):
        for name, value in fields.items():
            yield str(name), value
            yield from _items(value)
    elif isinstance(fields, list | tuple):
        for value in fields:
            yield from _items(value)


def _layer_specs(vllm_config: VllmConfig) -> Iterator[KVCacheSpec]:
    for layer in vllm_config.compilation_config.static_forward_context.values():
        tell = getattr(layer, "get_kv_cache_spec", None)
        if tell is not None and (spec := tell(vllm_config)) is not None:
            yield spec


def _is_latent(vllm_config: VllmConfig) -> bool:
    """Return whether every tensor-parallel rank has the whole block, however many ranks there are. This is so with
    MLA."""
    return all(getattr(spec, "max_tp_shards", None) == 1 for spec in _layer_specs(vllm_config))


def _quantizes_while_loading(model: ModelConfig) -> bool:
    """Return whether each rank computes the scales of its own part of the weights, because the checkpoint has no
    scales."""
    return model.quantization is not None and getattr(model.hf_config, "quantization_config", None) is None


def _names_digest(vllm_config: VllmConfig, layers: Sequence[object]) -> str:
    """Return the number of these layers and a digest of their names."""
    wanted = {id(layer) for layer in layers}
    modules: Mapping[str, object] = vllm_config.compilation_config.static_forward_context
    names = sorted(name for name, module in modules.items() if id(module) in wanted)
    return f"{len(names)}-{xxhash.xxh3_64_hexdigest('/'.join(names).encode())}"


def attention_kind(layer: object) -> str:
    """Return the properties of a layer that determine the meaning of a page's bytes. These are the attention backend,
    the instruction set of the CPU backend, and the dtype of the layer's cache. For a layer with a state, they include
    the shapes and dtypes of its tensors."""
    backend = getattr(layer, "get_attn_backend", None)
    name = backend().get_name() if backend is not None else type(layer).__name__
    details = [getattr(layer, "isa", None), getattr(layer, "kv_cache_dtype", None)]
    if (shape := getattr(layer, "get_state_shape", None)) is not None:
        parts = zip(shape(), layer.get_state_dtype(), strict=True)  # type: ignore[attr-defined]
        details += [f"{dtype}({'x'.join(map(str, sizes))})".removeprefix("torch.") for sizes, dtype in parts]
    return "/".join([str(name), *(str(detail) for detail in details if detail)])
