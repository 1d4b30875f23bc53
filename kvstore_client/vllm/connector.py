"""``KVStoreConnector``: kvstore as the KV connector of a vLLM engine.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore_client.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": "tcp://127.0.0.1:7070"}}'

The engine makes one of these in its scheduler and one in every worker, usually in different processes; each holds
one half and passes the engine's calls on to it. The workers tell the scheduler their namespaces through the engine's
handshake, since only they know their tensors.

No exception leaves a connector once the engine runs: the store's failures end in the guards, and what a defect of
ours might raise ends at the calls here.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvstore_client import KVStoreClient, Namespace
from kvstore_client.vllm.config import parse_config
from kvstore_client.vllm.guard import StoreGuard
from kvstore_client.vllm.identity import check_engine, rank_namespace
from kvstore_client.vllm.layout import BlockLayout
from kvstore_client.vllm.scheduler import BlockLoad, BlockSaves, SchedulerHalf
from kvstore_client.vllm.stats import TransferStats
from kvstore_client.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

T = TypeVar("T")


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in one step. Travels from the scheduler to every worker, pickled by the engine."""

    loads: list[BlockLoad] = field(default_factory=list)
    saves: BlockSaves = field(default_factory=BlockSaves)


@dataclass
class RankNamespace(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler, pickled by the engine: where its part of every block lies."""

    namespace: Namespace


class KVStoreConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One class for both halves, as the engine wants it; see the module for what they are."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ValueError for options or an engine that cannot work; the engine stops with the message."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = self._kv_transfer_config
        self._config = parse_config(transfer.kv_connector_extra_config)
        check_engine(vllm_config, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._namespace: Namespace | None = None
        self._counters: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        if role == KVConnectorRole.SCHEDULER and transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                "kvstore: kv_load_failure_policy is %r, so a request whose blocks cannot be loaded fails; "
                'set "kv_load_failure_policy": "recompute" to have them computed instead',
                transfer.kv_load_failure_policy,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a later miss, nothing else."""
        return False

    # The scheduler's half.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], object]) -> None:
        """Called once while the engine starts, with what every worker's ``get_handshake_metadata`` returned."""
        ranks = [told.namespace for told in metadata.values() if isinstance(told, RankNamespace)]
        if len(ranks) != len(metadata):
            logger.warning(
                "kvstore: another connector's handshake arrived in place of ours (two connectors that both need it "
                "cannot share one engine); nothing will be loaded or saved"
            )
            ranks = []
        transfer = self._kv_transfer_config
        self._scheduler = SchedulerHalf(
            [self._guard(namespace, self._config.lookup_timeout_s) for namespace in ranks],
            block_tokens=self._vllm_config.cache_config.block_size,
            min_hit_tokens=self._config.min_hit_tokens,
            may_load=transfer.is_kv_consumer,
            may_save=transfer.is_kv_producer,
            counters=self._counters,
        )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        half = self._scheduler
        tokens = self._never_raise(lambda: half.matched_tokens(request, num_computed_tokens) if half else 0, 0)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if half := self._scheduler:  # not guarded: a promised load that is forgotten would park the request for ever
            half.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        half = self._scheduler
        if half is None:
            return StepPlan()
        loads = half.take_loads()
        return StepPlan(loads, self._never_raise(lambda: half.completed_blocks(scheduler_output), BlockSaves()))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        half = self._scheduler
        self._never_raise(lambda: half.loaded(connector_output) if half else None, None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Saves end within their step, so the engine may free the blocks at once."""
        if half := self._scheduler:
            half.finished(request)
        return False, None

    def reset_cache(self) -> bool | None:
        """The engine's blocks in the store are everybody's and stay."""
        logger.warning("kvstore: blocks in the store are shared with other engines and were not removed")
        return False

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Called once while the engine starts. Raises ValueError for a cache that has no uniform blocks."""
        modules = self._vllm_config.compilation_config.static_forward_context
        layers = [modules[name] for name in kv_caches if name in modules]
        layout = BlockLayout(kv_caches, self._kv_cache_config.num_blocks)
        self._namespace = rank_namespace(self._vllm_config, layout, layers, self._config.tenant)
        self._worker = WorkerHalf(self._guard(self._namespace, self._config.timeout_s), layout, self._counters)
        logger.info("kvstore: blocks are stored at %s as %s", self._config.endpoint, self._namespace)
        if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
            logger.info("kvstore: block hashes depend on PYTHONHASHSEED=%s; engines that share must agree on it", seed)

    def get_handshake_metadata(self) -> RankNamespace | None:
        return RankNamespace(self._namespace) if self._namespace is not None else None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        plan = self._plan()
        if self._worker and plan.loads:
            self._worker.load(plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its load ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to do: a block holds all layers, so it is saved when the step's last layer is computed."""

    def wait_for_save(self) -> None:
        plan = self._plan()
        if self._worker and plan.saves.keys:
            self._worker.save(plan.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self._worker.take_finished() if self._worker else None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_block_ids() if self._worker else set()

    # Both halves.

    def get_kv_connector_stats(self) -> TransferStats | None:
        """What was counted since the last call; the engine logs it and sums it over the workers."""
        news = self._counters - self._reported
        self._reported = Counter(self._counters)
        return TransferStats(data=dict(news)) if news else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data=data or {})

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                self._never_raise(half.close, None)

    def _plan(self) -> StepPlan:
        plan = self._connector_metadata
        return plan if isinstance(plan, StepPlan) else StepPlan()

    def _guard(self, namespace: Namespace, timeout_s: float) -> StoreGuard:
        endpoint = self._config.endpoint

        def connect() -> KVStoreClient:
            return KVStoreClient(endpoint, namespace, timeout_s=timeout_s, fail_open=False)

        guard = StoreGuard(connect, f"{endpoint} (rank {namespace.rank})", self._counters)
        guard.probe()
        return guard

    def _never_raise(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception:
            logger.exception("kvstore: a defect of the connector, treated as a miss")
            self._counters["defects"] += 1
            return otherwise
