"""Checks that stop an engine while it starts if its blocks cannot be shared. The message says what to change."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvstore_client.vllm.shared.block_hashes import check_hash_reproducible
from kvstore_client.vllm.shared.releases import hash_tokens, layer_specs, tokens_per_state, transfer_results

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ValueError for an engine whose blocks cannot be shared. The message says what to change."""
    check_hash_reproducible(vllm_config)
    check_inputs(vllm_config)
    groups = [layer_specs(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    if len(groups) > 1 and transfer_results() is None:
        raise ValueError(
            f"kvstore: the cache of this model has {len(groups)} groups of layers, and this release of vLLM cannot "
            "compute a request again when not all of its blocks can be loaded. Start the engine with "
            "--disable-hybrid-kv-cache-manager, or use vLLM 0.30 or later"
        )
    for spec in itertools.chain(*groups):
        _check_layer(spec)
        hashed = hash_tokens(kv_cache_config, vllm_config) or spec.block_size
        sizes = {spec.block_size, hashed}
        if sizes != {block_tokens := vllm_config.cache_config.block_size}:
            raise ValueError(
                f"kvstore: a block of the KV cache has {spec.block_size} tokens, one hash covers "
                f"{hashed} tokens, and --block-size is {block_tokens}; all three must be "
                f"equal. Leave out --prefix-match-unit, and set --block-size {spec.block_size}. If only some layers "
                "have sliding windows, start the engine with --disable-hybrid-kv-cache-manager"
            )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name)) != 1:
            raise ValueError(
                f"kvstore: --{name.replace('_', '-')} is {size}; context parallelism is not supported. Leave this "
                "option out"
            )


def check_layer_parts(vllm_config: VllmConfig, layer_parts: int) -> None:
    """Raise ValueError if blocks are to be cut into layer slices although the engine does not show when a layer is
    computed for all tokens of a step."""
    if layer_parts > 1 and vllm_config.parallel_config.use_ubatching:
        raise ValueError(
            f"kvstore: layer_parts is {layer_parts}, which does not work with microbatches (--enable-dbo or "
            "--ubatch-size): each microbatch would count as a whole step. Leave out either layer_parts or these options"
        )


def check_single_flight(kv_cache_config: KVCacheConfig, single_flight_s: float) -> None:
    """Raise ValueError if requests are to wait for blocks of other requests although the model has states. A load can
    end only at places of a prompt with stored states, and the other requests may keep states at other places."""
    if single_flight_s and kv_cache_config.has_mamba_layers:
        raise ValueError(
            f"kvstore: single_flight_s is {single_flight_s}; expected 0, because this model has layers with states, "
            "such as Mamba, and the engine keeps their states at only a few places of a prompt"
        )


def recompute_failed_loads(transfer: KVTransferConfig, engine: VllmConfig | None) -> None:
    """Make the engine compute a request whose blocks cannot be loaded. By vLLM's default, the request would fail.

    transfer: the connector's configuration.
    engine: the engine's configuration, if it is known.

    The two policies can differ if the connector is the child of a MultiConnector. The engine's policy then counts, and
    cannot be set from here. Raises ValueError if it is not "recompute".
    """
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"  # the scheduler makes its connector before reading this
    whole = engine.kv_transfer_config if engine is not None else None
    if whole is not None and whole.kv_load_failure_policy != "recompute":
        raise ValueError(
            f"kvstore: kv_load_failure_policy of {whole.kv_connector} is {whole.kv_load_failure_policy!r}, so a "
            'request fails if its blocks cannot be loaded. Set "kv_load_failure_policy": "recompute" in '
            f'--kv-transfer-config, next to "kv_connector": "{whole.kv_connector}"'
        )


def _check_layer(spec: KVCacheSpec) -> None:
    """Raise ValueError unless the KV cache is of a plain kind. With a derived class, such as one for sinks or
    compression, a request has other blocks, or its blocks have other content."""
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec):
        raise ValueError(
            f"kvstore: this model has a KV cache of kind {type(spec).__name__}; supported are FullAttentionSpec, "
            "MLAAttentionSpec, SlidingWindowSpec and MambaSpec. If the model mixes kinds, start the engine with "
            "--disable-hybrid-kv-cache-manager"
        )
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != "align":
            raise ValueError(
                "kvstore: this model has layers with states, and the engine does not keep these states at the ends of "
                f"blocks (--mamba-cache-mode is {spec.mamba_cache_mode}). Start the engine with "
                "--enable-prefix-caching, which makes it keep them"
            )
        return
    if getattr(spec, "non_causal", False):
        raise ValueError(
            "kvstore: this model has layers that attend to later tokens, so a block depends on more than the tokens "
            "before it and cannot be shared. Run this model without kvstore"
        )
    if (tokens := tokens_per_state(spec)) != 1:
        raise ValueError(
            f"kvstore: this model's KV cache keeps one state for {tokens} tokens; only one state for "
            "each token is supported. Run this model without kvstore"
        )


def check_inputs(vllm_config: VllmConfig) -> None:
    """Raise ValueError if a block's hash does not cover all inputs on which the block's bytes depend."""
    model = vllm_config.model_config
    if model.is_diffusion:
        raise ValueError(
            "kvstore: this is a diffusion model, whose blocks depend on later tokens and cannot be shared. Run this "
            "model without kvstore"
        )
    multimodal, caching = model.multimodal_config, vllm_config.cache_config.enable_prefix_caching
    if multimodal is not None and multimodal.mm_processor_cache_gb == 0 and not caching:
        raise ValueError(
            "kvstore: prefix caching is off and --mm-processor-cache-gb is 0. With these settings, vLLM names images "
            "by a counter instead of their content. A block that follows an image would never be found or, with "
            "trust_media_ids, could be a block of another image. Set --mm-processor-cache-gb above 0, or "
            "--enable-prefix-caching"
        )
