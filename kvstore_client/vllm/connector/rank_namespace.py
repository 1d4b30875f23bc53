"""The namespace of a rank's part of every block: what must agree before two engines may share blocks.

A block's key covers its tokens, everything before them, and what else its request decides (`block_keys`). The
namespace must name everything else that decides the block's bytes. A namespace with too many fields costs hits; one
with too few serves wrong bytes. So a setting in doubt is included. Where each input is named (verified in vLLM 0.32):

=============================== =====================================================================================
tokens, cache salt, embeddings, the key: see `block_keys`. If prefix caching and the processor's cache are both off,
images, adapters                vLLM names images by a counter, so that nothing would be found: refused
weights                         model: revision of the hub, or a fingerprint of the files; how they are loaded: loaded;
                                weights: what the operator calls them
rope and window overrides, …    config: all of the configuration as the engine runs it, quantization included
processing of images            config
drafting layers' weights        draft, if there are such layers (a draft model, EAGLE, MTP): drafts of n-grams,
                                suffixes or heads without caches change no byte. A block's last entry of these layers
                                depends on the next token too, which can cost a proposal, never change a token
which layers, which heads       groups, layers (pipeline stages may be cut anywhere), rank and world, parallel; the
                                keys, if blocks are kept as ranges of heads; layer_parts and the keys, if they are
                                kept as parts of layers. With MLA every rank has all of a block, so rank, world and
                                parallel are those of an engine of one rank
dtypes                          dtype, kv_dtype, and in layout the dtype of each layer. fp8 scales are the
                                checkpoint's or 1, never measured while running; scales per token lie in the page
page layout, attention backend  layout, and pages: what the engine's own kernels make of known keys and values
states: shapes, dtypes          layout; what they mean cannot be probed, so pages has the engine's version for them
block size                      block_tokens; hashes of another granularity are refused
hash function and its seed      hash
engine version                  not named, but for states: what a version changes is above
bytes that depend on later      refused: non-causal layers, diffusion models
tokens
pages that are not plain tables refused: sinks, compression, context parallelism, states at other places than the
                                ends of blocks
=============================== =====================================================================================

No namespace covers weights that change while the engine runs: see ``block_keys``. The refusals are in
``shared/engine_checks.py``.
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
from kvstore_client.engine.parts import HeadParts
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

# The names that model configurations use for the number of KV heads, of all layers or of some.
KV_HEADS_NAME = re.compile(r"kv_heads|key_value_heads|n_head_kv|query_group|heads_in_group|attention_groups")


def rank_namespace(
    vllm_config: VllmConfig,
    layout: BlockLayout,
    layers: Iterable[object],
    pages: str,
    *,
    tenant: str,
    weights: str,
    parts: HeadParts | None = None,
    groups: str = "",
) -> Namespace:
    """The namespace of this worker's part of every block. ``layers``: the attention layers that have KV caches.
    ``pages``: their `page_fingerprint`. ``weights``: the operator's name for the weights. ``parts``: the ranges of
    heads that this worker has, if blocks are kept as such. ``groups``: which layers are in which group of the cache.

    Ranks that hold the same part (see ``replica``) have the same namespace. Engines of different parallel sizes have
    different namespaces, even where a part holds the same heads: weights that are quantized while they are loaded get
    scales of their shard. Only with ``parts`` they have the same, of all ranks of a pipeline stage; and with MLA,
    unless weights are quantized like that.
    """
    model = vllm_config.model_config
    layers = list(layers)
    tp, pp = get_tp_group(), get_pp_group()
    replicas = tp_replicas(vllm_config)
    stage_ranks = 1 if parts else tp.world_size // replicas
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
        block_bytes=layout.part_bytes // (len(parts.mine) if parts else 1),
        layout=f"{'+'.join(sorted(set(map(attention_kind, layers))))}:{layout.description}",
        rank=pp.rank_in_group * stage_ranks + (0 if parts else tp.rank_in_group // replicas),
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
            "parallel": (f"heads{parts.of}" if parts else f"tp{tp_size}") + f"pp{pp.world_size}",
            "layer_parts": str(layout.parts),
            "groups": groups,
            "hash": hash_probe(vllm_config),
        },
    )


def head_parts(vllm_config: VllmConfig, head_shards: int) -> HeadParts:
    """The ranges of heads that this rank has, if blocks are kept in as many as ``head_shards`` ranks would have. Raises
    ValueError if this model, or this engine's size, does not allow it. For workers only, once the model is loaded.

    With MLA there is one range, since every rank has all of a block, and with fewer heads than ``head_shards`` there is
    one for each head.
    """
    tp = get_tp_group()
    if head_shards % tp.world_size:
        raise ValueError(
            f"kvstore: head_shards is {head_shards} and --tensor-parallel-size {tp.world_size}; expected a multiple of "
            "it: the largest --tensor-parallel-size of the engines that share blocks"
        )
    if _is_latent(vllm_config):
        return HeadParts(range(1), 1)
    specs = list(_layer_specs(vllm_config))
    heads = None if has_draft_layers(vllm_config) else uniform_kv_heads(vllm_config.model_config)
    if heads is None or any(getattr(spec, "num_kv_heads", 0) != max(1, heads // tp.world_size) for spec in specs):
        raise ValueError(
            "kvstore: head_shards cannot be used with this model: its layers may differ in their heads, or a drafting "
            "model has others. Leave it out; then engines of one --tensor-parallel-size share blocks"
        )
    if heads % head_shards and head_shards % heads:
        raise ValueError(
            f"kvstore: head_shards is {head_shards}, but this model has {heads} KV heads; expected a divisor or a "
            "multiple of that"
        )
    of, holders = min(heads, head_shards), min(heads, tp.world_size)
    count, place = of // holders, tp.rank_in_group // (tp.world_size // holders)
    return HeadParts(range(place * count, (place + 1) * count), of)


def replica(vllm_config: VllmConfig) -> tuple[int, int]:
    """The index of this rank among the ranks that hold the same part of every block, and the number of those ranks.
    For workers only, once the model is loaded."""
    replicas = tp_replicas(vllm_config)
    return get_tp_group().rank_in_group % replicas, replicas


def among_replicas(replica: tuple[int, int], mine: object) -> Sequence[object]:
    """Exchange an object among the ranks with the same part of every block. All ranks of a pipeline stage call this."""
    tp = get_tp_group()
    of_all: list[object] = [None] * tp.world_size
    torch.distributed.all_gather_object(of_all, mine, group=tp.cpu_group)
    first = tp.rank_in_group - replica[0]
    return of_all[first : first + replica[1]]


def tp_replicas(vllm_config: VllmConfig) -> int:
    """How many consecutive tensor-parallel ranks hold the same bytes, in every layer this worker has.

    For MLA, vLLM says it (a layer's ``max_tp_shards``). If there are fewer KV heads than ranks, vLLM replicates heads
    to consecutive ranks too (``QKVParallelLinear.num_kv_head_replicas``), but it only tells the number of heads of the
    whole model; for models whose layers differ, that may be the number of one layer. If replication is assumed
    wrongly, a rank reads another rank's heads; if it is missed, some bytes are stored twice. So replicated heads count
    only if the model's configuration has one number of KV heads and every layer agrees with it.
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
    """The number of KV heads of each layer, over all ranks; None unless the configuration is certain about it."""
    if model.using_transformers_backend() or model.model_arch_config.per_layer_overrides is not None:
        return None
    named = [value for name, value in _items(model.hf_text_config.to_dict()) if KV_HEADS_NAME.search(name)]
    total = int(model.get_total_num_kv_heads())
    return total if named == [total] else None


def _items(fields: object) -> Iterator[tuple[str, object]]:
    """All names and values of nested dicts and lists."""
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
    """Whether every tensor-parallel rank has all of a block, however many they are, as with MLA."""
    return all(getattr(spec, "max_tp_shards", None) == 1 for spec in _layer_specs(vllm_config))


def _quantizes_while_loading(model: ModelConfig) -> bool:
    """Whether weights get scales that the checkpoint does not have: those of a rank's shard."""
    return model.quantization is not None and getattr(model.hf_config, "quantization_config", None) is None


def _names_digest(vllm_config: VllmConfig, layers: Sequence[object]) -> str:
    """The number of these layers, and a digest of their names."""
    wanted = {id(layer) for layer in layers}
    modules: Mapping[str, object] = vllm_config.compilation_config.static_forward_context
    names = sorted(name for name, module in modules.items() if id(module) in wanted)
    return f"{len(names)}-{xxhash.xxh3_64_hexdigest('/'.join(names).encode())}"


def attention_kind(layer: object) -> str:
    """What decides the meaning of a page's bytes: the attention backend, the instruction set of the CPU backend, and
    the dtype of the layer's cache; of a layer with a state, the shapes and dtypes of its parts."""
    backend = getattr(layer, "get_attn_backend", None)
    name = backend().get_name() if backend is not None else type(layer).__name__
    details = [getattr(layer, "isa", None), getattr(layer, "kv_cache_dtype", None)]
    if (shape := getattr(layer, "get_state_shape", None)) is not None:
        parts = zip(shape(), layer.get_state_dtype(), strict=True)  # type: ignore[attr-defined]
        details += [f"{dtype}({'x'.join(map(str, sizes))})".removeprefix("torch.") for sizes, dtype in parts]
    return "/".join([str(name), *(str(detail) for detail in details if detail)])
