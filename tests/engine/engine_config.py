"""vLLM's real configuration for a real model, and a worker's rank in it."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_client import Namespace
from kvstore_client.engine.slices import HeadSlices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    import torch
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from kvstore_client.vllm.connector import rank_namespace as rank_namespace_module
    from kvstore_client.vllm.connector.rank_namespace import head_slices, rank_namespace, replica

BLOCK_TOKENS = 32
PLAIN = {"block_size": BLOCK_TOKENS, "num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}


def engine_config(model: Path) -> VllmConfig:
    """Return the configuration that vLLM itself makes for a CPU engine with this model."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        arguments = EngineArgs(str(model), skip_tokenizer_init=True, dtype="bfloat16", block_size=BLOCK_TOKENS)
        return arguments.create_engine_config()


def cache(spec: Any = None, *, groups: int = 1, hash_block_size: int | None = BLOCK_TOKENS) -> KVCacheConfig:
    spec = FullAttentionSpec(**PLAIN) if spec is None else spec
    members = [KVCacheGroupSpec([f"model.layers.{group}"], spec) for group in range(groups)]
    return KVCacheConfig(100, [], members, hash_block_size=hash_block_size)


class Layer:
    """The parts of an attention layer that the connector reads to describe it."""

    def __init__(self, spec: Any, kv_cache_dtype: str = "auto") -> None:
        self.spec = spec
        self.kv_cache_dtype = kv_cache_dtype

    def get_kv_cache_spec(self, _config: VllmConfig) -> Any:
        return self.spec

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "FLASH")


SLICE_BYTES = 32768
LAYOUT: Any = SimpleNamespace(slice_bytes=131072, slices=1, dtype="bfloat16", description="8xbhnc(4x32x64)")


@dataclasses.dataclass
class Rank:
    """A worker's rank, which vLLM keeps in its process groups."""

    config: VllmConfig
    patch: pytest.MonkeyPatch
    slices: HeadSlices | None = None  # the head slices of the last namespace

    def be(self, tp_rank: int = 0, tp: int = 1, pp_rank: int = 0, pp: int = 1) -> None:
        for name, rank, size in (("get_tp_group", tp_rank, tp), ("get_pp_group", pp_rank, pp)):
            group = SimpleNamespace(rank_in_group=rank, world_size=size)
            self.patch.setattr(rank_namespace_module, name, lambda group=group: group)

    def namespace(
        self,
        layers: dict[str, Any],
        tenant: str = "",
        weights: str = "",
        pages: str = "page-0",
        head_shards: int = 0,
        groups: str = "",
    ) -> Namespace:
        self.config.compilation_config.static_forward_context = layers
        slices = head_slices(self.config, head_shards) if head_shards else None
        layout = LAYOUT
        if slices is not None:
            layout = SimpleNamespace(**{**vars(LAYOUT), "slice_bytes": len(slices.mine) * SLICE_BYTES})
        found = rank_namespace(
            self.config,
            layout,
            list(layers.values()),
            pages,
            tenant=tenant,
            weights=weights,
            slices=slices,
            groups=groups,
        )
        self.slices = slices
        return found

    def places(self, tp: int, layers: dict[str, Any]) -> list[tuple[int, int, int, int]]:
        """Return (rank, world, replica, replicas) of every worker."""
        found = []
        for tp_rank in range(tp):
            self.be(tp_rank, tp)
            namespace = self.namespace(layers)
            found.append((namespace.rank, namespace.world, *replica(self.config)))
        return found


def layers_of(spec: Any, count: int = 2) -> dict[str, Any]:
    return {f"model.layers.{index}.self_attn.attn": Layer(spec) for index in range(count)}


def heads(local: int) -> dict[str, Any]:
    return layers_of(FullAttentionSpec(**{**PLAIN, "num_kv_heads": local}))
