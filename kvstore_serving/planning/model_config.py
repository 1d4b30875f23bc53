"""The shape of a model's KV, and its bytes for each token, from the `config.json` of Hugging Face's models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvstore_client import Namespace

_Count = Annotated[int, msgspec.Meta(ge=1)]


class ModelConfigError(ValueError):
    """The config cannot be used; the message says why."""


@dataclass(frozen=True)
class KVShape:
    """The shape of a model's KV. For each token and layer, each KV head has a key and a value, which are vectors of
    `head_size` elements of `dtype`. `once`: whether one latent vector replaces both (MLA); every tensor-parallel rank
    then has all of it."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    once: bool = False

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's KV in all layers. Raises `ValueError` for numbers below 1 and for an unknown dtype."""
        shape = {"layers": self.layers, "kv_heads": self.kv_heads, "head_size": self.head_size}
        both = Namespace.for_model("m", dtype=self.dtype, block_tokens=1, **shape).block_bytes
        return both // 2 if self.once else both


class _Config(msgspec.Struct):
    """The fields of a config that are used. Models with several parts have them in `text_config`."""

    num_hidden_layers: _Count | None = None
    num_attention_heads: _Count | None = None
    num_key_value_heads: _Count | None = None
    hidden_size: _Count | None = None
    head_dim: _Count | None = None
    kv_lora_rank: _Count | None = None  # MLA: one latent vector for each token, shared by all heads
    qk_rope_head_dim: _Count | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    text_config: dict[str, msgspec.Raw] | None = None


_decode: Final = msgspec.json.Decoder(_Config).decode


def kv_bytes_per_token(path: Path) -> int:
    """Return the bytes of a token's KV in all layers, in the model's own dtype. Raises `ModelConfigError`.

    All layers are assumed to keep all tokens, but a model with sliding windows or state space layers keeps fewer.
    """
    return read_shape(path).bytes_per_token


def read_shape(path: Path) -> KVShape:
    """Return the shape of the KV that this `config.json` describes. Raises `ModelConfigError`."""
    try:
        data = path.read_bytes()
        config = _decode(data)
        if config.num_hidden_layers is None and config.text_config is not None:
            config = _decode(msgspec.json.encode(config.text_config))
    except OSError as error:
        raise ModelConfigError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{path}: {error}; expected the config.json of a model") from error
    dtype = config.dtype or config.torch_dtype or "bfloat16"
    heads = config.num_key_value_heads or config.num_attention_heads
    size = config.head_dim
    if size is None and config.hidden_size and config.num_attention_heads:
        size = config.hidden_size // config.num_attention_heads
    if config.num_hidden_layers is None or heads is None or size is None:
        raise ModelConfigError(f"{path}: expected num_hidden_layers, num_attention_heads, and hidden_size or head_dim")
    if config.kv_lora_rank is not None:
        latent = config.kv_lora_rank + (config.qk_rope_head_dim or 0)
        found = KVShape(config.num_hidden_layers, 1, latent, dtype, once=True)
    else:
        found = KVShape(config.num_hidden_layers, heads, size, dtype)
    try:
        _ = found.bytes_per_token
    except ValueError as error:
        raise ModelConfigError(f"{path}: {error}") from error
    return found
