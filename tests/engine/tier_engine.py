"""The offloading part of an engine: vLLM's own connector, made as its scheduler makes it, with vLLM's tiering manager,
CPU tier and shared region. The test replaces the GPU."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig, LoRAConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.request import Request

from kvstore_client import KVStoreClient
from kvstore_client.vllm.tier.secondary_tier import KVStoreTier
from tests.support.harness import block_of, make_keys, wait_until

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Shape:
    """What a model's cache has for each token."""

    layers: int = 8
    kv_heads: int = 4
    head_size: int = 32

    @property
    def chunk_bytes(self) -> int:
        """The size of one block, on a rank with all heads, in bfloat16."""
        return self.layers * BLOCK_TOKENS * self.kv_heads * 2 * self.head_size * 2


CHUNK_BYTES = Shape().chunk_bytes
SLOWEST_CALL_S = 0.25  # the longest time for a call of the scheduler; the store's deadlines are several times as long


def offload_keys(count: int, first: int = 0) -> list[bytes]:
    """Return keys in the engine's form: a sha256 and the number of the cache group."""
    return [make_offload_key(key, 0) for key in make_keys(count, first, key_bytes=32)]


@functools.cache
def _engine_config(model: Path, tensor_parallel: int) -> VllmConfig:
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=2048,
        tensor_parallel_size=tensor_parallel,
    ).create_engine_config()


def _cache_config(shape: Shape, tensor_parallel: int, num_blocks: int) -> KVCacheConfig:
    layers = [f"model.layers.{number}.self_attn.attn" for number in range(shape.layers)]
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=shape.kv_heads // tensor_parallel,
        head_size=shape.head_size,
        dtype=torch.bfloat16,
    )
    page = spec.page_size_bytes
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=shape.layers * page * num_blocks, layers=layers, layer_stride=page * num_blocks, block_stride=page
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
        kv_cache_layout="LBHNC",
    )


class TieredEngine:
    """The bytes of a chunk follow from its key, as in ``harness.block_of``, unless a test replaces `content_of`.

    chunks: the size of the CPU tier. options: the options of the store's tier. num_blocks: the size of the GPU's cache,
    which must make no difference.
    """

    def __init__(
        self,
        model: Path,
        endpoint: str,
        *,
        chunks: int = 64,
        options: dict[str, Any] | None = None,
        tensor_parallel: int = 1,
        blocks_per_chunk: int = 1,
        num_blocks: int = 64,
        shape: Shape = Shape(),
        hash_algorithm: str = "sha256",
        lora: bool = False,
        takes_embeddings: bool = False,
    ) -> None:
        config = copy.deepcopy(_engine_config(model, tensor_parallel))
        config.cache_config.kv_cache_layout = "LBHNC"
        config.cache_config.prefix_caching_hash_algo = hash_algorithm
        config.lora_config = LoRAConfig() if lora else None
        config.model_config.enable_prompt_embeds = takes_embeddings  # as for models with pictures
        self.endpoint = endpoint
        self.chunk_bytes = shape.chunk_bytes * blocks_per_chunk
        self.content_of: Callable[[bytes], bytes] = functools.partial(block_of, block_bytes=self.chunk_bytes)
        tier = {"type": "KVStoreTier", "module_path": "kvstore_client.vllm.tier", "endpoint": endpoint}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": chunks * self.chunk_bytes,
                "blocks_per_chunk": blocks_per_chunk,
                "secondary_tiers": [{**tier, **(options or {})}],
            },
        )
        self.connector = OffloadingConnector(
            config, KVConnectorRole.SCHEDULER, _cache_config(shape, tensor_parallel, num_blocks)
        )
        self.manager = self.connector.scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        assert isinstance(self.tier, KVStoreTier)
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        assert self.rows.shape == (chunks, self.chunk_bytes)
        self.slowest_s = 0.0
        self._requests = 0

    # Actions of the scheduler.

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the manager as the scheduler does, and check that the call does not wait."""
        started = time.monotonic()
        result = getattr(self.manager, name)(*arguments)
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        return result

    def request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(req_id=f"request-{self._requests}")
        self.call("on_new_request", context)
        return context

    def ask(self, request: Request) -> tuple[list[bytes], ReqContext]:
        """Add a request of vLLM's own class. Returns the keys of its chunks, and the manager's record of it."""
        self.connector.on_new_request(request)
        state = self.connector.scheduler._req_status[request.request_id]
        state.update_offload_keys()
        return list(state.group_states[0].offload_keys), state.req_context

    def finish(self, *requests: ReqContext) -> None:
        for context in requests:
            self.call("on_request_finished", context)

    def step(self) -> None:
        self.call("on_schedule_end", ScheduleEndContext([], []))

    def look(self, keys: Iterable[bytes], context: ReqContext) -> int | None:
        """Look up a chain once, as the scheduler does in each step. Returns the number of leading hits, or None while
        the scheduler must wait."""
        hits, wait = 0, False
        for key in keys:
            result = self.call("lookup", key, context)
            if result is LookupResult.MISS:
                break
            wait |= result is not LookupResult.HIT
            hits += 1
        return None if wait else hits

    def hits(self, keys: Sequence[bytes], context: ReqContext | None = None, deadline_s: float = 10.0) -> int:
        """Wait for arriving chunks as the scheduler does, and return how many leading chunks are then in the CPU
        tier."""
        asking = context or self.request()
        end = time.monotonic() + deadline_s
        while (found := self.look(keys, asking)) is None:
            assert time.monotonic() < end, f"not told within {deadline_s} s"
            self.step()
            time.sleep(0.002)
        self.step()
        if context is None:
            self.finish(asking)
        return found

    def begin_load(self, keys: Sequence[bytes], context: ReqContext) -> None:
        """Repeat the lookup until the store has reported which chunks it has. The next step begins their load."""

        def told() -> bool:
            self.step()
            return bool(self.call("lookup", keys[0], context) is LookupResult.HIT_PENDING)

        assert self.look(keys, context) is None
        wait_until(told)
        assert self.look(keys, context) is None

    def settle(self, deadline_s: float = 10.0) -> None:
        """Step until no job is in progress."""
        end = time.monotonic() + deadline_s
        while self.call("has_pending_work"):
            assert time.monotonic() < end, f"jobs are under way after {deadline_s} s"
            self.step()
            time.sleep(0.002)

    # Actions of the GPU.

    def compute(self, keys: Sequence[bytes], context: ReqContext | None = None) -> None:
        """Compute chunks on the GPU and copy them to the CPU tier, which sends them to the store in the background."""
        asking = context or self.request()
        output = self.call("prepare_store", keys, asking)
        assert output is not None, "no room in the CPU tier"
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.rows[chunk] = np.frombuffer(self.content_of(key), dtype=np.int8)
        if output.keys_to_store:
            self.call("complete_store", output.keys_to_store, asking)
        if context is None:
            self.finish(asking)

    def save(self, keys: Sequence[bytes]) -> None:
        """Compute chunks, and wait until the store has them."""
        self.compute(keys)
        self.settle()

    def read(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the bytes of these chunks in the CPU tier, read as the GPU reads them."""
        context = self.request()
        spec = self.call("prepare_load", keys, context)
        found = [self.rows[chunk].tobytes() for chunk in spec.chunk_ids]
        self.call("complete_load", keys, context)
        self.finish(context)
        return found

    def wrong(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys whose chunks in the CPU tier have wrong bytes."""
        return [key for key, found in zip(keys, self.read(keys), strict=True) if found != self.content_of(key)]

    def counted(self) -> dict[str, float]:
        """Return the increase of the tier's metrics since the last call, by short names and labels."""
        stats = self.tier.get_stats()
        return {name.removeprefix("vllm:kvstore_"): value for name, value in stats.reduce().items() if value}

    def store_client(self) -> KVStoreClient:
        """Connect another client to the namespace of this engine's chunks."""
        return KVStoreClient(self.endpoint, self.tier.namespace)

    def shutdown(self) -> None:
        """Shut down as at the engine's end, and check that the CPU tier's memory is no longer in use."""
        del self.rows
        self.connector.shutdown()
