"""The KV of a token, from a model's `config.json`, as Hugging Face's models have it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvstore_client import Namespace

_Count = Annotated[int, msgspec.Meta(ge=1)]


class ConfigError(ValueError):
    """The config cannot be used; the message says why."""


class _Config(msgspec.Struct):
    """What matters of it. Models of several parts have it in `text_config`."""

    num_hidden_layers: _Count | None = None
    num_attention_heads: _Count | None = None
    num_key_value_heads: _Count | None = None
    hidden_size: _Count | None = None
    head_dim: _Count | None = None
    kv_lora_rank: _Count | None = None  # MLA: one latent vector of a token, for all heads
    qk_rope_head_dim: _Count | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    text_config: dict[str, msgspec.Raw] | None = None


_decode: Final = msgspec.json.Decoder(_Config).decode


def kv_bytes_per_token(path: Path) -> int:
    """-> the bytes of a token's KV in all layers, in the model's own dtype. Raises `ConfigError`.

    All layers are taken to keep all tokens: a model with sliding windows or state space layers keeps less."""
    try:
        data = path.read_bytes()
        config = _decode(data)
        if config.num_hidden_layers is None and config.text_config is not None:
            config = _decode(msgspec.json.encode(config.text_config))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; expected the config.json of a model") from error
    dtype = config.dtype or config.torch_dtype or "bfloat16"
    heads = config.num_key_value_heads or config.num_attention_heads
    size = config.head_dim
    if size is None and config.hidden_size and config.num_attention_heads:
        size = config.hidden_size // config.num_attention_heads
    if config.num_hidden_layers is None or heads is None or size is None:
        raise ConfigError(
            f"{path}: expected num_hidden_layers, num_attention_heads and hidden_size, or head_dim; give "
            "--kv-bytes-per-token instead"
        )
    try:
        if config.kv_lora_rank is not None:
            latent = config.kv_lora_rank + (config.qk_rope_head_dim or 0)
            shape = {"layers": config.num_hidden_layers, "kv_heads": 1, "head_size": latent}
            return Namespace.for_model("m", dtype=dtype, block_tokens=1, **shape).block_bytes // 2
        shape = {"layers": config.num_hidden_layers, "kv_heads": heads, "head_size": size}
        return Namespace.for_model("m", dtype=dtype, block_tokens=1, **shape).block_bytes
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
