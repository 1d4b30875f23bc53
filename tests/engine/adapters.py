"""Saves LoRA adapters for the model of `save_model`, as PEFT does."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8
LAYERS, HIDDEN, KV_WIDTH = 4, 256, 128


def save_adapter(folder: Path, seed: int) -> Path:
    """Save an adapter of the queries and values with random weights, large enough that answers differ."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    chooser = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HIDDEN), ("v_proj", KV_WIDTH)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=chooser)
            weights[f"{module}.lora_B.weight"] = torch.randn(width, RANK, generator=chooser)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config["target_modules"] = ["q_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
