"""The models that real engines run here: Qwen2 with random weights, made from a config; nothing is downloaded.

*tiny* starts in seconds and is for workloads of many prompts. *mid* computes slowly enough that a hit saves time and is
for times to the first token. *8B* is for GPUs, and has no file of weights. All weights have a wide spread
(`initializer_range`), so that the output depends on every token of the prompt. With the usual spread a random model
repeats one token whatever the prompt is, and its output would not show a wrong cache.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from argparse import ArgumentParser
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

BLOCK_TOKENS: Final = 32  # vLLM's CPU attention takes multiples of 32
_LONGEST: Final = 131072


@dataclass(frozen=True)
class EngineModel:
    """The shape of a Qwen2. All weights and the KV cache are bfloat16."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's KV cache."""
        head_size = self.hidden_size // self.num_attention_heads
        return self.num_hidden_layers * 2 * self.num_key_value_heads * head_size * 2

    @property
    def block_bytes(self) -> int:
        """The bytes of the KV cache of `BLOCK_TOKENS` tokens."""
        return self.token_bytes * BLOCK_TOKENS

    @property
    def shape(self) -> dict[str, int]:
        """Return the shape as arguments of a Qwen2Config."""
        return {name: value for name, value in asdict(self).items() if name != "name"}

    def prompts(self, seed: int, count: int, tokens: int, shared_tokens: int = 0) -> list[list[int]]:
        """Return `count` prompts that have their first `shared_tokens` in common. Prompts of different seeds have
        nothing in common."""
        chooser = random.Random(seed)
        shared = [chooser.randrange(self.vocab_size) for _ in range(shared_tokens)]
        return [
            shared + [chooser.randrange(self.vocab_size) for _ in range(tokens - shared_tokens)] for _ in range(count)
        ]

    def to_json(self) -> dict[str, Any]:
        """The model's shape, for the results."""
        return {**asdict(self), "block_tokens": BLOCK_TOKENS, "block_bytes": self.block_bytes}


ENGINE_MODELS: Final = {
    model.name: model
    for model in (
        EngineModel("tiny", 256, 512, 8, 8, 4, 4096),
        EngineModel("mid", 1024, 2816, 12, 16, 4, 8192),  # 152 M parameters
    )
}

LARGE: Final = EngineModel("8B", 4096, 14336, 32, 32, 8, 128256)  # the shapes of Llama-3.1-8B; for GPUs


def add_engine_model_option(parser: ArgumentParser, option: str = "--model", default: str = "tiny") -> None:
    """Add `option`, which takes the name of one of `ENGINE_MODELS`."""
    sizes = "; ".join(f"{model.name}: {model.token_bytes} bytes of KV a token" for model in ENGINE_MODELS.values())
    parser.add_argument(option, choices=sorted(ENGINE_MODELS), help=f"default: {default}; --quick: tiny ({sizes})")


def full_blocks(tokens: int) -> int:
    """Return the number of blocks that are full when this many tokens are computed."""
    return tokens // BLOCK_TOKENS


def cacheable_tokens(tokens: int) -> int:
    """Return the number of a prompt's tokens that can come from a cache: whole blocks, and never the last token."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def _models_folder() -> Path:
    cache = os.environ.get("KVSTORE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kvstore"
    return Path(cache).expanduser() / "models"


def save_model(model: EngineModel) -> Path:
    """Return the model's folder. The folder is made once, with weights from a fixed seed, and kept for later runs."""
    folder = _models_folder() / f"benchmark-{model.name}-3"
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(max_position_embeddings=_LONGEST, initializer_range=0.1, **model.shape)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(scratch)
        save_tokenizer(scratch, model.vocab_size)
        scratch.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():  # otherwise another benchmark made it first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def save_config(model: EngineModel) -> Path:
    """Return a folder with the model's configuration and no weights, for engines that make random weights
    (`dummy_weights`)."""
    folder = _models_folder() / f"benchmark-{model.name}-config-1"
    if (folder / "config.json").exists():
        return folder
    from transformers import Qwen2Config

    config = Qwen2Config(max_position_embeddings=2 * _LONGEST, architectures=["Qwen2ForCausalLM"], **model.shape)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        config.save_pretrained(scratch)
        folder.mkdir(exist_ok=True)
        (Path(scratch) / "config.json").rename(folder / "config.json")
    return folder


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer in which every token is a word, so that an engine that serves text sends each token at once."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {f" w{number}": number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" w0"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
