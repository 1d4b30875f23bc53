"""Tiny models of every kind of KV cache, with random weights.

Their weights are spread as widely as those of `engines.save_model`, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.engines import save_random

_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}


def save_short_convolutions(folder: Path) -> Path:
    """Save an LFM2: three of four layers are short convolutions, whose states are smaller than a page of attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    layers = ["conv", "conv", "full_attention", "conv"] * 2
    config = Lfm2Config(
        **_SHAPE,
        num_hidden_layers=len(layers),
        layer_types=layers,
        block_auto_adjust_ff_dim=False,
        conv_L_cache=4,
        conv_dim=_SHAPE["hidden_size"],
        block_dim=_SHAPE["hidden_size"],
    )
    return save_random(Lfm2ForCausalLM, config, folder)


def save_mamba_hybrid(folder: Path) -> Path:
    """Save a Granite 4: Mamba2 in three of four layers, attention in the others."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    layers = ["linear_attention", "linear_attention", "full_attention", "linear_attention"] * 2
    config = GraniteMoeHybridConfig(
        **_SHAPE,
        num_hidden_layers=len(layers),
        layer_types=layers,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=512,
        mamba_n_heads=8,
        mamba_d_state=8,
        position_embedding_type="rope",
        attention_multiplier=0.2,
    )
    return save_random(GraniteMoeHybridForCausalLM, config, folder)


def save_mamba(folder: Path) -> Path:
    """Save a Mamba2: states only."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        hidden_size=256,
        num_hidden_layers=4,
        num_heads=8,
        head_dim=64,
        state_size=16,
        n_groups=1,
        vocab_size=4096,
        initializer_range=0.1,
    )
    return save_random(Mamba2ForCausalLM, config, folder)


def save_latent(folder: Path) -> Path:
    """Save a DeepSeek V2 of dense layers: MLA in all layers. vLLM's kernel on CPUs requires latents of this size, and
    blocks of 16 tokens."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    shape = {name: value for name, value in _SHAPE.items() if name != "num_key_value_heads"}
    config = DeepseekV2Config(
        **shape,
        num_hidden_layers=4,
        num_key_value_heads=8,
        first_k_dense_replace=4,
        n_routed_experts=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
    )
    return save_random(DeepseekV2ForCausalLM, config, folder)


def save_draft(folder: Path) -> Path:
    """Save a Qwen2 of two layers that drafts for the model of `engines.save_model`; it has fewer heads, so its pages
    are smaller."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**{**_SHAPE, "num_key_value_heads": 2}, num_hidden_layers=2)
    return save_random(Qwen2ForCausalLM, config, folder)


def save_eagle(folder: Path) -> Path:
    """Save an EAGLE head of one layer for the Llama of `engines.save_windowed_model`."""
    import json

    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_SHAPE, num_hidden_layers=1)
    torch.manual_seed(1)
    layer = LlamaForCausalLM(config).to(torch.bfloat16).model.layers[0]
    weights = {f"layers.0.{name}": value for name, value in layer.state_dict().items() if "input_layernorm" not in name}
    weights["fc.weight"] = (torch.randn(256, 512) * 0.1).to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    described = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def save_picture_model(folder: Path) -> Path:
    """Save a BLIP-2: a prompt begins with 16 positions for the picture. Its processor does not use torchvision, which
    has no CPU build."""
    import torch
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        OPTConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    spread = {"initializer_range": 0.2}
    sees = Blip2VisionConfig(**small, **spread, image_size=32, patch_size=16)
    asks = Blip2QFormerConfig(**small, **spread, encoder_hidden_size=64, cross_attention_frequency=1, vocab_size=100)
    size = {"hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 512, "vocab_size": 4096}
    text = OPTConfig(**size, num_hidden_layers=4, num_attention_heads=8, init_std=0.1)
    config = Blip2Config(
        vision_config=sees.to_dict(),
        qformer_config=asks.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=16,
        image_token_index=4000,
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config)
    model.query_tokens.data.normal_(0.0, 1.0)
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(4096) if number != 4000} | {"<image>": 4000}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "w4095", "pad_token": "w4094", "unk_token": "w0"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, additional_special_tokens=["<image>"])
    pictures = BlipImageProcessorPil(size={"height": 32, "width": 32})
    Blip2Processor(image_processor=pictures, tokenizer=made, num_query_tokens=16).save_pretrained(folder)
    return folder


STATES: dict[str, Callable[[Path], Path]] = {
    "Mamba2 and attention": save_mamba_hybrid,
    "Mamba2": save_mamba,
    "short convolutions": save_short_convolutions,
}
