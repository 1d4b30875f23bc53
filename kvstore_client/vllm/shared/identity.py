"""What must agree before two engines may share blocks, and what an engine must be for its blocks to be shared.

A block's key is the engine's own hash of its tokens and of everything before them. The namespace must name the rest
of what decides the block's bytes. A too narrow namespace costs hits; a too wide one serves wrong bytes, so when in
doubt it is here. Where each thing is named (verified in vLLM 0.32; ``hash`` is ``generate_block_hash_extra_keys``):

=============================== =====================================================================================
tokens, cache salt              hash (the salt in the first block, hence in all)
prompt embeddings               hash, by content
images, audio, video            hash, by content, or by the id a request gives them, which is taken at its word. With
                                prefix caching and the processor's cache both off they are named by a counter: refused
LoRA adapter                    hash, but only by name and path, which hold other weights elsewhere and tomorrow:
                                ``keys`` adds the content
weights                         model: revision of the hub, or a fingerprint of the files; how they are loaded: loaded
rope and window overrides, …    config: all of the configuration as the engine runs it, quantization included
processing of images            config
drafting layers' weights        draft. Their last entry of a block depends on the next token too, which costs a
                                proposal at worst, never a token
which layers, which heads       layers (pipeline stages may be cut anywhere), rank and world, parallel
dtypes                          dtype, kv_dtype, and in layout the one each layer has. fp8 scales are the
                                checkpoint's or 1, never measured while running; those per token lie in the page
page layout, attention backend  layout
block size                      block_tokens; hashes of another granularity are refused
hash function and its seed      hash
engine version                  engine
bytes that depend on later      refused: non-causal layers, diffusion models
tokens
pages that are no plain table   refused: windows, sinks, states, compression, context parallelism
=============================== =====================================================================================

Weights that change while the engine runs are in no namespace: see ``keys``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
import xxhash
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, resolve_none_hash_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, iter_layer_specs

from kvstore_client import Namespace
from kvstore_client.vllm.connector.layout import BlockLayout
from kvstore_client.vllm.shared.fingerprint import files_fingerprint, weight_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.load import LoadConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = logging.getLogger(f"vllm.{__name__}")

PROBE_TOKENS = tuple(range(1, 17))
# How a model's configuration may call the number of KV heads, of all its layers or of some.
KV_HEADS_NAME = re.compile(r"kv_heads|key_value_heads|n_head_kv|query_group|heads_in_group|attention_groups")


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ValueError, saying what to change, for an engine whose blocks cannot be shared."""
    check_hash_reproducible(vllm_config)
    check_inputs(vllm_config)
    if (groups := len(kv_cache_config.kv_cache_groups)) != 1:
        raise ValueError(
            f"kvstore: this model has {groups} KV cache groups, one is supported. Start the engine with "
            "--disable-hybrid-kv-cache-manager; models that need several groups even then cannot use this connector"
        )
    for spec in iter_layer_specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec):
        _check_layer(spec)
        sizes = {spec.block_size, kv_cache_config.hash_block_size or spec.block_size}
        if sizes != {block_tokens := vllm_config.cache_config.block_size}:
            raise ValueError(
                f"kvstore: a block has {spec.block_size} tokens, is hashed every {kv_cache_config.hash_block_size} and "
                f"scheduled by {block_tokens}; all three must be equal. Leave out --prefix-match-unit, and set "
                f"--block-size {spec.block_size}"
            )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name)) != 1:
            raise ValueError(
                f"kvstore: {name} is {size}; context parallelism is not supported: leave --{name.replace('_', '-')} out"
            )


def _check_layer(spec: KVCacheSpec) -> None:
    """Only the two plain kinds, not what derives from them: a window, a sink or a compression in a subclass changes
    which blocks a request has or what is in them."""
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise ValueError(
            f"kvstore: KV caches of kind {type(spec).__name__} are not supported, only those that keep every "
            "token. Start the engine with --disable-hybrid-kv-cache-manager if the model mixes kinds"
        )
    if spec.non_causal:
        raise ValueError(
            "kvstore: this model has layers that attend to later tokens, so a block's bytes depend on more than its "
            "prefix and cannot be shared; run it without this connector"
        )
    if spec.tokens_per_state != 1:
        raise ValueError(
            f"kvstore: this model's KV cache keeps one state for {spec.tokens_per_state} tokens; only one for each "
            "token is supported; run it without this connector"
        )


def check_inputs(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    if model.is_diffusion:
        raise ValueError(
            "kvstore: a diffusion model's blocks depend on later tokens and cannot be shared; run it without this "
            "connector"
        )
    multimodal, caching = model.multimodal_config, vllm_config.cache_config.enable_prefix_caching
    if multimodal is not None and multimodal.mm_processor_cache_gb == 0 and not caching:
        raise ValueError(
            "kvstore: with prefix caching off and --mm-processor-cache-gb 0, vLLM names images by a counter instead "
            "of their content, so different images' blocks would have equal names. Leave --mm-processor-cache-gb "
            "above 0, or switch --enable-prefix-caching on"
        )


# Hashes


def check_hash_reproducible(vllm_config: VllmConfig) -> None:
    """Raise ValueError when this process would hash with a seed of its own."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    function = get_hash_fn_by_name(algorithm)
    if resolve_none_hash_seed(function) != resolve_none_hash_seed(function):
        raise ValueError(
            f"kvstore: block hashes of prefix_caching_hash_algo={algorithm!r} differ in every process unless "
            "PYTHONHASHSEED is set, so nothing would ever be found again. Set --prefix-caching-hash-algo sha256 "
            "(or sha256_cbor), or set PYTHONHASHSEED to the same value for every engine"
        )


def hash_probe(vllm_config: VllmConfig) -> str:
    """How this process hashes: the algorithm, and a digest of the hash it gives a fixed block, which reveals neither
    the seed nor leaves a trace in vLLM's own state. Equal where hashes are equal."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    function = get_hash_fn_by_name(algorithm)
    root = BlockHash(function(resolve_none_hash_seed(function)))  # what init_none_hash makes the first block's parent
    block = hash_block_tokens(function, root, PROBE_TOKENS, (("cache_salt", "kvstore"),))
    return f"{algorithm}-{hashlib.sha256(block).hexdigest()[:16]}"


def check_same_hash(vllm_config: VllmConfig, namespaces: Iterable[Namespace]) -> None:
    """Raise ValueError when a worker, told by its namespace, does not hash as this process, the scheduler's, does."""
    mine = hash_probe(vllm_config)
    for namespace in namespaces:
        if (theirs := namespace.extra["hash"]) != mine:
            raise ValueError(
                f"kvstore: the worker of rank {namespace.rank} hashes blocks otherwise ({theirs}) than the scheduler "
                f"({mine}), so its blocks would be kept under names nobody asks for. Start all processes of the engine "
                "with the same PYTHONHASHSEED (or all without), on every node, and with one version of Python"
            )


# Namespaces


def rank_namespace(vllm_config: VllmConfig, layout: BlockLayout, layers: Iterable[object], tenant: str) -> Namespace:
    """The namespace of this worker's part of every block. ``layers``: the attention layers that have KV caches.

    Ranks that hold the same part (see ``replica``) have the same namespace. Engines of different parallel sizes have
    different ones even where a part has the same heads: weights quantized while they are loaded get scales of their
    shard.
    """
    model = vllm_config.model_config
    layers = list(layers)
    tp, pp = get_tp_group(), get_pp_group()
    replicas = tp_replicas(vllm_config)
    parts = tp.world_size // replicas
    identity = model_identity(model)
    if "@" not in identity and tp.rank_in_group == pp.rank_in_group == 0:
        logger.warning(
            "kvstore: the revision of %s is unknown. Engines that load it share blocks, so its weights must never "
            "change under this name; where they do, give every change another 'tenant'",
            identity,
        )
    return Namespace(
        model=identity,
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=vllm_config.cache_config.block_size,
        block_bytes=layout.block_bytes,
        layout=f"{'+'.join(sorted(set(map(attention_kind, layers))))}:{layout.description}",
        rank=pp.rank_in_group * parts + tp.rank_in_group // replicas,
        world=pp.world_size * parts,
        tenant=tenant,
        extra={
            "engine": f"vllm-{vllm.__version__}",
            "config": config_digest(model),
            "loaded": load_identity(vllm_config.load_config),
            "draft": draft_identity(vllm_config),
            "kv_dtype": f"{vllm_config.cache_config.cache_dtype}/{layout.dtype}",
            "layers": _names_digest(vllm_config, layers),
            "parallel": f"tp{tp.world_size}pp{pp.world_size}",
            "hash": hash_probe(vllm_config),
        },
    )


def replica(vllm_config: VllmConfig) -> tuple[int, int]:
    """The index of this rank among the ranks that hold the same part of every block, and how many they are. For a
    worker, once its model is loaded."""
    replicas = tp_replicas(vllm_config)
    return get_tp_group().rank_in_group % replicas, replicas


def tp_replicas(vllm_config: VllmConfig) -> int:
    """How many consecutive tensor-parallel ranks hold the same bytes, in every layer this worker has.

    vLLM says it of MLA (a layer's ``max_tp_shards``). KV heads fewer than ranks are replicated to consecutive ranks
    too (``QKVParallelLinear.num_kv_head_replicas``), but of that it only tells the number of heads of the model as a
    whole, and for models whose layers differ it may be that of one layer. Wrongly assumed, a rank would read another
    one's heads; wrongly denied, some bytes are stored twice. So it counts only where the model's configuration has one
    number of KV heads and every layer agrees with it.
    """
    tp = int(get_tp_group().world_size)
    heads = None if vllm_config.speculative_config is not None else uniform_kv_heads(vllm_config.model_config)
    specs = list(_layer_specs(vllm_config))
    replicas = tp if specs else 1
    for spec in specs:
        shards = getattr(spec, "max_tp_shards", None)
        if shards is None and heads is not None and getattr(spec, "num_kv_heads", 0) == max(1, heads // tp):
            shards = heads
        replicas = math.gcd(replicas, tp // shards if shards and tp % shards == 0 else 1)
    return replicas


def uniform_kv_heads(model: ModelConfig) -> int | None:
    """The number of KV heads, of every layer and over all ranks, if the model's configuration leaves no doubt."""
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


def _names_digest(vllm_config: VllmConfig, layers: Sequence[object]) -> str:
    """How many layers, and a digest of which."""
    wanted = {id(layer) for layer in layers}
    modules: Mapping[str, object] = vllm_config.compilation_config.static_forward_context
    names = sorted(name for name, module in modules.items() if id(module) in wanted)
    return f"{len(names)}-{xxhash.xxh3_64_hexdigest('/'.join(names).encode())}"


def attention_kind(layer: object) -> str:
    """The backend that decides what the bytes of a page mean, with the CPU backend's instruction set, and the dtype
    the layer keeps."""
    backend = getattr(layer, "get_attn_backend", None)
    name = backend().get_name() if backend is not None else type(layer).__name__
    details = (getattr(layer, "isa", None), getattr(layer, "kv_cache_dtype", None))
    return "/".join([str(name), *(str(detail) for detail in details if detail)])


def model_identity(model: ModelConfig) -> str:
    """What the weights are: ``name@revision`` of a hub model, ``architecture@fingerprint`` of local files, a bare name
    where neither is known.

    A path is no identity: the same path holds other weights tomorrow, and the same weights lie at another path on the
    next machine.
    """
    path = Path(model.model)
    if path.exists() and (files := weight_files(path)):
        return f"{model.hf_config.model_type}@{files_fingerprint(files)}"
    name = getattr(model, "model_weights", None) or model.model  # the former where weights come from an object store
    revision = getattr(model.hf_config, "_commit_hash", None) or model.revision
    return f"{name}@{revision}" if revision else str(name)


def load_identity(load: LoadConfig) -> str:
    """How weights are read. Formats may pick other files of one model, some other places, and dummies none."""
    extra = load.model_loader_extra_config
    text = json.dumps(extra if isinstance(extra, dict) else vars(extra), sort_keys=True, default=_plain)
    return f"{load.load_format}" + (f"/{xxhash.xxh3_64_hexdigest(text.encode())}" if extra else "")


def draft_identity(vllm_config: VllmConfig) -> str:
    """The model that drafts, if one does: its layers' caches are in the blocks too."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return ""
    draft = speculative.draft_model_config
    return f"{speculative.method}:{model_identity(draft)}/{config_digest(draft)}"


def config_digest(model: ModelConfig) -> str:
    """A digest of the model's configuration as the engine runs it, overrides and quantization included."""
    fields: Mapping[str, Any] = model.hf_config.to_dict()
    kept = {
        name: value
        for name, value in fields.items()
        if not name.startswith("_") and name not in ("transformers_version", "dtype", "torch_dtype")
    }
    images = model.multimodal_config
    settings = (
        model.quantization,
        model.quantization_config,
        model.disable_sliding_window,
        model.model_impl,
        model.model_class_overrides,
        model.code_revision,
        images and (images.mm_processor_kwargs, images.video_pruning_rate, images.video_pruning_method),
        images and (images.mm_encoder_attn_dtype, images.mm_device_do_normalize),
    )
    text = json.dumps([kept, settings], sort_keys=True, default=_plain)
    if "longrope" in text:  # chooses its factors by the longest sequence the engine allows
        text += f"/{model.max_model_len}"
    return xxhash.xxh3_64_hexdigest(text.encode())


def _plain(value: object) -> object:
    """What JSON has no form for, the same in every process: without order of sets and addresses of objects."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


# Strangers

# What a difference means to its reader: the field, and what to set alike for it. Consequences of others come last.
ADVICE: Mapping[str, str] = {
    "hash": "set the same PYTHONHASHSEED (or none) and --prefix-caching-hash-algo for every engine",
    "model": "load the same --revision",
    "engine": "run the same vLLM version",
    "block_tokens": "set the same --block-size",
    "dtype": "set the same --dtype",
    "kv_dtype": "set the same --kv-cache-dtype",
    "parallel": "set the same --tensor-parallel-size and --pipeline-parallel-size",
    "config": "set the same --quantization, --hf-overrides and other options of the model",
    "loaded": "set the same --load-format",
    "draft": "set the same --speculative-config",
    "world": "store the same parts",
    "layers": "split the layers alike",
    "layout": "use the same attention backend and kind of processor",
    "block_bytes": "store blocks of one size",
}
CAUSES = ("block_tokens", "dtype", "kv_dtype", "parallel", "draft", "model", "config")
CONSEQUENCES = ("world", "layers", "layout", "block_bytes")


def explain_strangers(mine: Namespace, store_namespaces: Iterable[str]) -> str | None:
    """Why another engine's blocks of the same model will not be found, or None if there is nothing to explain.

    mine: of rank 0. store_namespaces: the canonical JSON of the namespaces a store holds, some of which may be no
    engine's. Other tenants are strangers on purpose. Nothing is said while the store has blocks of ours too, unless
    others hash differently, which nobody means to.
    """
    own = _flat(mine.canonical())
    differences = []
    for text in store_namespaces:
        other = _flat(text)
        if other is not None and own is not None and _same_model(own, other):
            differences.append((other, [name for name in ADVICE if other.get(name) != own.get(name)]))
    familiar = any(not names for _, names in differences)
    nearest = min(
        ((other, names) for other, names in differences if names and (names == ["hash"] or not familiar)),
        key=lambda found: len(found[1]),
        default=None,
    )
    if nearest is None:
        return None
    other, names = nearest
    if set(names) & set(CAUSES):
        names = [name for name in names if name not in CONSEQUENCES]
    told = ", ".join(f"{name}={other.get(name)}, this one uses {own.get(name) if own else None}" for name in names)
    return (
        f"another engine stores the same model with {told}: they will not share blocks. "
        f"If they should, {'; '.join(ADVICE[name] for name in names)}"
    )


def _flat(canonical: str | bytes) -> dict[str, object] | None:
    """A namespace's fields and its extra ones side by side; None for what is no namespace of an engine."""
    try:
        fields = json.loads(canonical)
        extra = fields.pop("extra")
        return {**fields, **extra} if str(extra["engine"]).startswith("vllm-") else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _same_model(own: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether the two look like parts of one deployment, in the same terms. Hub models compare by name, so that a
    revision can be the difference; a fingerprint of files is all there is to compare."""
    mine, theirs = str(own["model"]), str(other.get("model"))
    same = mine == theirs or ("/" in mine and mine.partition("@")[0] == theirs.partition("@")[0])
    return same and own.keys() == other.keys() and all(own[name] == other.get(name) for name in ("tenant", "rank"))
