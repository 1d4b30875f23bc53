"""The identity of a model and its weights. It is the same on every machine, and is a part of every namespace."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

from kvstore_client.vllm.shared.fingerprint import files_fingerprint, weight_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.load import LoadConfig

# Drafting methods that keep no keys and values, because they either look tokens up or add heads to the target's last
# layer. For n-grams, vLLM gives the target's own configuration as the draft's.
METHODS_WITHOUT_LAYERS: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


def model_identity(model: ModelConfig) -> str:
    """Return the identity of the weights: ``name@revision`` of a hub model, ``architecture@fingerprint`` of local
    files, or a bare name if neither is known.

    A path is not an identity, because it may hold other weights tomorrow, and because the same weights may be at
    another path on another machine.
    """
    path = Path(model.model)
    if path.exists() and (files := weight_files(path)):
        return f"{model.hf_config.model_type}@{files_fingerprint(files)}"
    name = getattr(model, "model_weights", None) or model.model  # set if the weights are in an object store
    revision = getattr(model.hf_config, "_commit_hash", None) or model.revision
    return f"{name}@{revision}" if revision else str(name)


def load_identity(load: LoadConfig) -> str:
    """Return how the weights are loaded. Two load formats may read different files of a model, or read them from
    different places. Dummy weights come from no file."""
    extra = load.model_loader_extra_config
    text = json.dumps(extra if isinstance(extra, dict) else vars(extra), sort_keys=True, default=_plain)
    return f"{load.load_format}" + (f"/{xxhash.xxh3_64_hexdigest(text.encode())}" if extra else "")


def has_draft_layers(vllm_config: VllmConfig) -> bool:
    """Return whether the engine drafts with layers that have KV caches of their own. The engine's blocks then include
    these caches. A method that is not known here is assumed to have such layers."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method not in METHODS_WITHOUT_LAYERS


def draft_identity(vllm_config: VllmConfig) -> str:
    """Return the identity of the drafting layers, whose caches are also in the blocks; empty without such layers."""
    speculative = vllm_config.speculative_config
    if speculative is None or not has_draft_layers(vllm_config):
        return ""
    draft = speculative.draft_model_config
    if draft is None:
        return f"{speculative.method}"
    # For the operator's own class, the draft's configuration is the target's, and only the class knows what it loads.
    name = f"/{speculative.model}" if speculative.method == "custom_class" else ""
    return f"{speculative.method}{name}:{model_identity(draft)}/{config_digest(draft)}"


def adapter_settings(vllm_config: VllmConfig) -> str:
    """Return the modules to which the engine applies LoRA adapters, and the adapters' dtype; empty without adapters."""
    lora = vllm_config.lora_config
    if lora is None:
        return ""
    modules = None if lora.target_modules is None else sorted(lora.target_modules)
    experts = lora.enable_mixed_moe_lora_format, lora.enable_moe_shared_loras
    return f"{lora.lora_dtype}/{modules}/{lora.enable_tower_connector_lora}/{experts}"


def config_digest(model: ModelConfig) -> str:
    """Return a digest of the model's configuration that the engine uses, with overrides and quantization."""
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
        images and images.mm_encoder_fp8_scale_path and _file_identity(Path(images.mm_encoder_fp8_scale_path)),
    )
    text = json.dumps([kept, settings], sort_keys=True, default=_plain)
    if "longrope" in text:  # its factors depend on the longest sequence that the engine allows
        text += f"/{model.max_model_len}"
    return xxhash.xxh3_64_hexdigest(text.encode())


def _file_identity(path: Path) -> str:
    """Return the identity of a file's content, or the file's path if it cannot be read here."""
    try:
        return files_fingerprint([path])
    except OSError:
        return str(path)


def _plain(value: object) -> object:
    """Return a JSON value for an object that JSON cannot represent. The value is the same in every process, because
    sets are sorted and the addresses of objects are left out."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
