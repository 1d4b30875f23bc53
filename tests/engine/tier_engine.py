"""An engine reduced to its offloading: vLLM's own connector, made as its scheduler makes it, with vLLM's tiering
manager, CPU tier and shared region, and the test in the place of the GPU."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterable, Sequence
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
LAYERS = 8
KV_HEADS = 4
HEAD_SIZE = 32
CHUNK_BYTES = LAYERS * BLOCK_TOKENS * KV_HEADS * 2 * HEAD_SIZE * 2  # of one block of one rank that has all heads
SLOWEST_CALL_S = 0.25  # no call of the scheduler takes longer: a deadline of the store would be several times that


def offload_keys(count: int, first: int = 0) -> list[bytes]:
    """Keys as the engine makes them: a sha256 and the number of the cache group."""
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


def _cache_config(tensor_parallel: int, num_blocks: int) -> KVCacheConfig:
    layers = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=KV_HEADS // tensor_parallel, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    page = spec.page_size_bytes
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=LAYERS * page * num_blocks, layers=layers, layer_stride=page * num_blocks, block_stride=page
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
        kv_cache_layout="LBHNC",
    )


class TieredEngine:
    """Chunks stand for themselves: the bytes of a key's chunk follow from the key, as ``harness.block_of`` makes them.

    chunks: room in the CPU tier. options: of the tier. num_blocks: of the GPU's cache, which must not matter.
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
        hash_algorithm: str = "sha256",
        lora: bool = False,
        takes_embeddings: bool = False,
    ) -> None:
        config = copy.deepcopy(_engine_config(model, tensor_parallel))
        config.cache_config.kv_cache_layout = "LBHNC"
        config.cache_config.prefix_caching_hash_algo = hash_algorithm
        config.lora_config = LoRAConfig() if lora else None
        config.model_config.enable_prompt_embeds = takes_embeddings  # as of pictures, there is more than tokens
        self.endpoint = endpoint
        self.chunk_bytes = CHUNK_BYTES * blocks_per_chunk
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
            config, KVConnectorRole.SCHEDULER, _cache_config(tensor_parallel, num_blocks)
        )
        self.manager = self.connector.scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        assert isinstance(self.tier, KVStoreTier)
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        assert self.rows.shape == (chunks, self.chunk_bytes)
        self.slowest_s = 0.0
        self._requests = 0

    # What the scheduler does.

    def call(self, name: str, *arguments: Any) -> Any:
        """A call of the manager by the scheduler, which must not wait."""
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
        """A request of vLLM's own has come. -> the keys of its chunks, and what the manager knows of it."""
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
        """One step's look at a chain, as the scheduler does it: leading hits, or None as long as it must wait."""
        hits, wait = 0, False
        for key in keys:
            result = self.call("lookup", key, context)
            if result is LookupResult.MISS:
                break
            wait |= result is not LookupResult.HIT
            hits += 1
        return None if wait else hits

    def hits(self, keys: Sequence[bytes], context: ReqContext | None = None, deadline_s: float = 10.0) -> int:
        """How many leading chunks are in the CPU tier once the scheduler has waited for those that come."""
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
        """Look until the store has told that it has the chunks; the next step begins their load."""

        def told() -> bool:
            self.step()
            return bool(self.call("lookup", keys[0], context) is LookupResult.HIT_PENDING)

        assert self.look(keys, context) is None
        wait_until(told)
        assert self.look(keys, context) is None

    def settle(self, deadline_s: float = 10.0) -> None:
        """Step until no job is under way."""
        end = time.monotonic() + deadline_s
        while self.call("has_pending_work"):
            assert time.monotonic() < end, f"jobs are under way after {deadline_s} s"
            self.step()
            time.sleep(0.002)

    # What the GPU does.

    def compute(self, keys: Sequence[bytes], context: ReqContext | None = None) -> None:
        """The GPU has the chunks; they go to the CPU tier and, in the background, to the store."""
        asking = context or self.request()
        output = self.call("prepare_store", keys, asking)
        assert output is not None, "no room in the CPU tier"
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.rows[chunk] = np.frombuffer(block_of(key, self.chunk_bytes), dtype=np.int8)
        if output.keys_to_store:
            self.call("complete_store", output.keys_to_store, asking)
        if context is None:
            self.finish(asking)

    def save(self, keys: Sequence[bytes]) -> None:
        """``compute`` and wait until the store has them."""
        self.compute(keys)
        self.settle()

    def wrong(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keys whose chunk in the CPU tier, as the GPU reads it, has not the bytes it should have."""
        context = self.request()
        spec = self.call("prepare_load", keys, context)
        bad = [
            key
            for key, chunk in zip(keys, spec.chunk_ids, strict=True)
            if self.rows[chunk].tobytes() != block_of(key, self.chunk_bytes)
        ]
        self.call("complete_load", keys, context)
        self.finish(context)
        return bad

    def counted(self) -> dict[str, float]:
        """The tier's metrics since the last call, by short names and labels."""
        stats = self.tier.get_stats()
        return {name.removeprefix("vllm:kvstore_"): value for name, value in stats.reduce().items() if value}

    def store_client(self) -> KVStoreClient:
        """Another client of this engine's chunks."""
        return KVStoreClient(self.endpoint, self.tier.namespace)

    def shutdown(self) -> None:
        """As at the engine's end; the memory's owner does not allow that it is still in use."""
        del self.rows
        self.connector.shutdown()
