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
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore_client import Namespace
from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.lookup import PrefixLookups
from kvstore_client.vllm.connector.config import parse_config
from kvstore_client.vllm.connector.host_tier import HostTier
from kvstore_client.vllm.connector.layout import BlockLayout
from kvstore_client.vllm.connector.plan import StepPlan, WorkerReport
from kvstore_client.vllm.connector.scheduler import SchedulerHalf
from kvstore_client.vllm.connector.stats import PromMetrics, TrafficLog, TransferStats
from kvstore_client.vllm.connector.worker import WorkerHalf
from kvstore_client.vllm.shared.identity import (
    check_engine,
    check_same_hash,
    explain_strangers,
    rank_namespace,
    replica,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

T = TypeVar("T")

# With fewer rows than this a host pool only gets in its own way.
MIN_SLOTS = 8


@dataclass
class RankStore(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler, pickled by the engine: where its part of every block lies, and how many
    blocks its host pool has room for."""

    namespace: Namespace
    slots: int


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
        self._guards: list[StoreGuard] = []
        self._rank_store: RankStore | None = None
        self._counters = Counters()
        self._traffic = TrafficLog(time.monotonic())
        self._waiting_told = 0
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
        """Called once while the engine starts, with what every worker's ``get_handshake_metadata`` returned. Raises
        ValueError when the workers do not hash as this process does."""
        ranks = [told for told in metadata.values() if isinstance(told, RankStore)]
        if len(ranks) != len(metadata):
            logger.warning(
                "kvstore: another connector's handshake arrived in place of ours (two connectors that both need it "
                "cannot share one engine); nothing will be loaded or saved"
            )
            return
        check_same_hash(self._vllm_config, [rank.namespace for rank in ranks])
        # Ranks that hold the same part have one namespace, and one answer.
        distinct = {rank.namespace.id: rank.namespace for rank in ranks}
        self._guards = [self._guard(namespace, self._config.lookup_timeout_s) for namespace in distinct.values()]
        self._explain_strangers(self._guards[0])
        transfer = self._kv_transfer_config
        self._scheduler = SchedulerHalf(
            PrefixLookups(self._guards, timeout_s=self._config.lookup_timeout_s, counters=self._counters),
            HostTier(
                min(rank.slots for rank in ranks), keep=self._config.cpu_bytes > 0, policy=self._config.cpu_policy
            ),
            ranks=len(ranks),
            block_tokens=self._vllm_config.cache_config.block_size,
            min_hit_tokens=self._config.min_hit_tokens,
            save_decode=self._config.save_decode,
            may_load=transfer.is_kv_consumer,
            may_save=transfer.is_kv_producer,
            counters=self._counters,
            prefix_caching=bool(self._vllm_config.cache_config.enable_prefix_caching),
        )

    def _explain_strangers(self, guard: StoreGuard) -> None:
        """Say why nothing will be found, if the store has this model's blocks under another description."""
        info = guard.call(lambda client: client.info(), None)
        if info is None:
            return
        known = {namespace.namespace for shard in info.shards for namespace in shard.namespaces}
        if warning := explain_strangers(guard.namespace, known):
            logger.warning("kvstore: %s", warning)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        half = self._scheduler
        none: int | None = 0
        tokens = self._never_raise(lambda: half.matched_tokens(request, num_computed_tokens) if half else 0, none)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if half := self._scheduler:  # not guarded: a promised load that is forgotten would park the request for ever
            half.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        host, store = self._scheduler.hit_sources(request) if self._scheduler else (0, 0)
        sources = {CacheHitSource.HOST: host, CacheHitSource.EXTERNAL_UNSPECIFIED: store}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        half = self._scheduler
        if half is None:
            return StepPlan()
        plan = half.plan(scheduler_output)
        plan.saves = self._never_raise(lambda: half.plan_saves(scheduler_output), None)
        self._never_raise(lambda: self._traffic.tick(time.monotonic()), None)
        return plan

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if half := self._scheduler:
            self._never_raise(lambda: half.update(connector_output), None)
        if isinstance(stats := connector_output.kv_connector_stats, TransferStats):
            self._never_raise(lambda: self._traffic.observe(stats.data), None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if (half := self._scheduler) is None:
            return False, None
        self._never_raise(lambda: half.save_rest(request, block_ids), None)
        return half.finished(request), None

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.holds_blocks

    def reset_cache(self) -> bool | None:
        """Called with new weights, among others: from now on nothing that was saved before is found by this engine,
        neither in the host tier nor in the store, where the blocks stay for the others."""
        if half := self._scheduler:
            self._never_raise(half.reset, None)
            logger.warning("kvstore: cache reset; until its restart this engine shares no blocks with others")
        return True

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Called once while the engine starts. Raises ValueError for a cache that has no uniform blocks."""
        modules = self._vllm_config.compilation_config.static_forward_context
        layers = [modules[name] for name in kv_caches if name in modules]
        layout = BlockLayout(kv_caches, self._kv_cache_config.num_blocks)
        namespace = rank_namespace(self._vllm_config, layout, layers, self._config.tenant)
        slots = self._pool_slots(layout.block_bytes)
        self._rank_store = RankStore(namespace, slots)
        self._guards = [self._guard(namespace, self._config.timeout_s)]
        self._worker = WorkerHalf(
            self._guards[0],
            layout,
            slots=slots,
            timeout_s=self._config.timeout_s,
            replica=replica(self._vllm_config),
            counters=self._counters,
        )
        logger.info("kvstore: blocks are stored at %s as %s", self._config.endpoint, namespace)
        logger.info(
            "kvstore: %s of %d blocks in host memory",
            "a CPU tier" if self._config.cpu_bytes else "no CPU tier (cpu_bytes is 0); room",
            slots,
        )

    def _pool_slots(self, block_bytes: int) -> int:
        """Rows of this rank's host pool."""
        if not self._config.cpu_bytes:
            return max(MIN_SLOTS, self._config.staging_bytes // block_bytes)
        ranks: int = self._vllm_config.parallel_config.world_size
        slots = self._config.cpu_bytes // ranks // block_bytes
        if slots < MIN_SLOTS:
            raise ValueError(
                f"kvstore: cpu_bytes is {self._config.cpu_bytes}, which is room for {slots} blocks of {block_bytes} "
                f"bytes on each of {ranks} ranks; expected room for at least {MIN_SLOTS}, or 0 for no CPU tier"
            )
        return slots

    def get_handshake_metadata(self) -> RankStore | None:
        return self._rank_store

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker:
            self._worker.begin_step(self._plan())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker and isinstance(kv_connector_metadata, StepPlan) and kv_connector_metadata.preempting:
            self._worker.await_copies()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker:
            for load in self._plan().loads:
                self._worker.load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its load ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to do: a block holds all layers, so it is saved when the step's last layer is computed."""

    def wait_for_save(self) -> None:
        """Orders the copies out of the cache; they end, and are sent, behind the engine's back."""
        if self._worker and (saves := self._plan().saves):
            self._worker.save(saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if not self._worker:
            return None, None
        loaded = self._worker.take_loaded()
        return self._worker.take_saved(), loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_block_ids() if self._worker else set()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.take_report() if self._worker else None

    # Both halves.

    def get_kv_connector_stats(self) -> TransferStats | None:
        """What was counted since the last call; the engine logs it, sums it over the workers, and exports it."""
        counters = self._counters.take()
        if self._role == KVConnectorRole.SCHEDULER:
            stats = TransferStats.of(counters)
            self._never_raise(lambda: self._traffic.observe(stats.data), None)
            return stats if counters else None
        waiting = self._worker.waiting_blocks if self._worker else 0
        if not counters and waiting == self._waiting_told:
            return None
        self._waiting_told = waiting
        rank = self._rank_store.namespace.rank if self._rank_store else 0
        return TransferStats.of(counters, {f"waiting_blocks/{rank}": waiting})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Sends what waits, for at most ``timeout_s``, then disconnects."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                self._never_raise(half.close, None)
        for guard in self._guards:
            guard.close()

    def _plan(self) -> StepPlan:
        plan = self._connector_metadata
        return plan if isinstance(plan, StepPlan) else StepPlan()

    def _guard(self, namespace: Namespace, timeout_s: float) -> StoreGuard:
        return StoreGuard(
            self._config.endpoint,
            namespace,
            timeout_s=timeout_s,
            counters=self._counters,
            replicas=self._config.replicas,
            logger=logger,
        )

    def _never_raise(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception:
            logger.exception("kvstore: a defect of the connector, treated as a miss")
            self._counters.add("defects")
            return otherwise
