"""The identity of a model and its weights, the same on every machine; part of every namespace."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from kvstore_client.vllm.shared.fingerprint import files_fingerprint, weight_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.load import LoadConfig


def model_identity(model: ModelConfig) -> str:
    """The identity of the weights: ``name@revision`` of a hub model, ``architecture@fingerprint`` of local files, or a
    bare name if neither is known.

    A path is not an identity: the same path may hold other weights tomorrow, and the same weights may lie at another
    path on another machine.
    """
    path = Path(model.model)
    if path.exists() and (files := weight_files(path)):
        return f"{model.hf_config.model_type}@{files_fingerprint(files)}"
    name = getattr(model, "model_weights", None) or model.model  # the former where weights come from an object store
    revision = getattr(model.hf_config, "_commit_hash", None) or model.revision
    return f"{name}@{revision}" if revision else str(name)


def load_identity(load: LoadConfig) -> str:
    """How weights are loaded. One format may read other files of a model than another, or files elsewhere; dummy
    weights come from no file."""
    extra = load.model_loader_extra_config
    text = json.dumps(extra if isinstance(extra, dict) else vars(extra), sort_keys=True, default=_plain)
    return f"{load.load_format}" + (f"/{xxhash.xxh3_64_hexdigest(text.encode())}" if extra else "")


def draft_identity(vllm_config: VllmConfig) -> str:
    """The identity of the drafting model, empty without one: the caches of its layers are in the blocks too."""
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
    if "longrope" in text:  # longrope chooses its factors by the longest sequence that the engine allows
        text += f"/{model.max_model_len}"
    return xxhash.xxh3_64_hexdigest(text.encode())


def _plain(value: object) -> object:
    """A JSON value for objects that JSON cannot hold, the same in every process: sets are sorted, and the addresses of
    objects are left out."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
