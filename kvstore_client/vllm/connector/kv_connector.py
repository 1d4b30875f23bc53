"""``KVStoreConnector``, which makes kvstore the KV connector of a vLLM engine.

    vllm serve MODEL --shutdown-timeout 30 --kv-transfer-config '{"kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore_client.vllm.connector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"endpoint": "tcp://127.0.0.1:7070"}}'

The engine makes one connector in its scheduler and one in every worker, usually in different processes. Each connector
has one half and passes the engine's calls on to that half. Only the workers know their tensors, so they send their
namespaces to the scheduler with their first reports.

Once the engine runs, the guards catch failures of the store, and `_never_raise` catches our own defects. The only
errors that are not caught are those of the few calls that must keep a promise to the engine, such as
``update_state_after_alloc``.

Over 400 lines because vLLM wants one class for both halves.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvstore_client import Namespace
from kvstore_client.engine.admission import Admission
from kvstore_client.engine.block_names import BlockNames
from kvstore_client.engine.computing_pace import ComputingPace
from kvstore_client.engine.flights import Flights
from kvstore_client.engine.guard import Counters, Purges, StoreGuard
from kvstore_client.engine.lookup import PrefixLookups
from kvstore_client.engine.paged.host_tier import HostTier
from kvstore_client.engine.paged.layout import BlockLayout
from kvstore_client.engine.paged.plan import RankStore, StepPlan, WorkerReport
from kvstore_client.engine.paged.shared_pool import shared_pool
from kvstore_client.engine.paged.sharing import SharingChecks
from kvstore_client.engine.paged.weights import WeightsWatch
from kvstore_client.engine.paged.worker import WorkerHalf
from kvstore_client.vllm.connector.block_groups import BlockGroups, groups_digest
from kvstore_client.vllm.connector.block_keys import BlockKeys
from kvstore_client.vllm.connector.ending import Ending, allow_time, check_time
from kvstore_client.vllm.connector.engine_cache import EngineCache
from kvstore_client.vllm.connector.engine_model import calling_worker, fingerprints_of, offer_naming
from kvstore_client.vllm.connector.events import KVEvents, group_kinds
from kvstore_client.vllm.connector.hand_over import HandOvers
from kvstore_client.vllm.connector.load_planner import LoadPlanner
from kvstore_client.vllm.connector.mismatch import explain_mismatch
from kvstore_client.vllm.connector.options import ConnectorOptions
from kvstore_client.vllm.connector.page_probe import PAGE_FINGERPRINT, page_fingerprint
from kvstore_client.vllm.connector.planner_state import PlannerState
from kvstore_client.vllm.connector.rank_namespace import among_replicas, head_slices, rank_namespace, replica
from kvstore_client.vllm.connector.registration import register
from kvstore_client.vllm.connector.request_options import OPTIONS_NAME, is_to_describe
from kvstore_client.vllm.connector.request_spans import RequestSpans
from kvstore_client.vllm.connector.save_planner import SavePlanner
from kvstore_client.vllm.connector.scheduler import SchedulerHalf
from kvstore_client.vllm.connector.starting import FIRST_ANSWER_S, SchedulerStart
from kvstore_client.vllm.connector.stats import PromMetrics, TrafficLog, TransferStats
from kvstore_client.vllm.connector.vllm_parts import make_device_copies
from kvstore_client.vllm.shared.block_hashes import check_same_hash
from kvstore_client.vllm.shared.engine_checks import (
    check_engine,
    check_layer_parts,
    check_single_flight,
    recompute_failed_loads,
)
from kvstore_client.vllm.shared.model_identity import adapter_settings
from kvstore_client.vllm.shared.releases import CacheHitSource, binds_manager, manager_of, transfer_results
from kvstore_client.vllm.shared.store_options import parse_options

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

T = TypeVar("T")

make_device_copies()

# With fewer slots in a host pool, blocks would wait for each other in every step.
MIN_SLOTS = 8


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connector. vLLM requires one class for both halves; see the package's docstring for the halves. Once the
    engine runs, no call waits for the store, except ``shutdown``.

    In each process, only the thread from which the engine calls its connector may use it.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ValueError for wrong options and for an engine whose blocks cannot be shared. The engine then stops
        with the message of the error."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = self._kv_transfer_config
        self._options = parse_options(ConnectorOptions, transfer.kv_connector_extra_config, "kv_connector_extra_config")
        self._client_options = self._options.client
        check_engine(vllm_config, kv_cache_config)
        check_layer_parts(vllm_config, self._options.layer_parts)
        check_single_flight(kv_cache_config, self._options.single_flight_s)
        self._keys = BlockKeys(
            vllm_config.cache_config.block_size,
            trust_media_ids=self._options.trust_media_ids,
            adapter_settings=adapter_settings(vllm_config),
        )
        self._groups = BlockGroups.of(kv_cache_config, vllm_config.cache_config.block_size)
        self._start = SchedulerStart(vllm_config.parallel_config.world_size, self._make_half)
        self._worker: WorkerHalf | None = None
        self._engine_worker = calling_worker() if role == KVConnectorRole.WORKER else None
        self._cache = EngineCache()
        self._guards: list[StoreGuard] = []
        self._rank = 0
        self._counters = Counters()
        self._traffic = TrafficLog(time.monotonic())
        self._waiting_told = 0
        schedules = role == KVConnectorRole.SCHEDULER
        self._registered = (
            register(vllm_config, transfer, self._options, self._present)
            if schedules and self._options.engines
            else None
        )
        self._spans = self._trace() if schedules and self._options.trace_file else None
        engine = get_current_vllm_config_or_none()
        recompute_failed_loads(transfer, engine)
        self._ending = Ending(self._options.timeout_s, self._leave)
        if schedules:
            check_time(vllm_config, transfer, engine, self._options.timeout_s)
            self._ending.watch_signals()

    def _leave(self) -> None:
        """Leave the directory of engines when the engine shuts down, so that proxies send it no more requests. A signal
        handler calls this."""
        if self._registered is not None:
            self._registered.withdraw()

    def _trace(self) -> RequestSpans:
        """Return the writer of spans. Each engine of a data-parallel group has a file of its own. Raises ValueError if
        the file cannot be written."""
        number = self._vllm_config.parallel_config.data_parallel_index
        path = self._options.trace_file + (f".dp{number}" if number else "")
        return RequestSpans(path, self._options.engine_url)

    @property
    def _scheduler(self) -> SchedulerHalf | None:
        return self._start.half

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether each layer must report that it is computed. A CUDA graph of a whole step cannot do that."""
        return parse_options(ConnectorOptions, extra_config, "kv_connector_extra_config").layer_parts > 1

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether vLLM must wait for every save. This is False, because a dropped save only leads to a later miss."""
        return False

    # The scheduler's half.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._cache = EngineCache(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        if not binds_manager():
            self._cache = EngineCache(manager_of(gpu_block_pool))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], object]) -> None:
        """Do nothing, because this connector does not use vLLM's handshake (see ``starting``). Another connector that
        is used together with this one may use it."""

    def _make_half(self, ranks: Sequence[RankStore]) -> SchedulerHalf:
        """Make the scheduler's half. Raises ValueError if a worker hashes blocks differently than this process does."""
        check_same_hash(self._vllm_config, [rank.namespace for rank in ranks])
        # Ranks that have the same slice share one namespace, so this namespace gets only one guard.
        distinct = {rank.namespace.id: rank for rank in ranks}
        # In a model with states, not all groups have all blocks, so each lookup names its groups.
        groups = [range(self._groups.count)] if self._groups.count > 1 and not self._groups.states else []
        self._guards += [
            self._guard(
                rank.namespace,
                self._options.lookup_timeout_s,
                [
                    *groups,
                    *([range(rank.layer_parts)] if rank.layer_parts > 1 else []),
                    *([range(rank.head_slices.of)] if rank.head_slices else []),
                ],
            )
            for rank in distinct.values()
        ]
        # Blocks that are computed before the store has answered cannot be saved, because they may be older than a
        # purge.
        deadline = time.monotonic() + FIRST_ANSWER_S
        for guard in self._guards:
            guard.await_store(deadline - time.monotonic())
        self._explain_mismatch(self._guards[0])
        transfer = self._kv_transfer_config
        state = self._state(ranks)
        saves = SavePlanner(
            state,
            ranks=len(ranks),
            slices=len({rank.slice_id for rank in ranks}),
            save_decode=self._options.save_decode,
            may_save=transfer.is_kv_producer,
        )
        loads = LoadPlanner(
            state,
            saves.tracked,
            admission=Admission(timeout_s=self._options.timeout_s, always=self._options.always_load),
            # A layer of width h has about 12 h² weights, and needs 2 h multiplications to attend to each earlier token.
            computing=ComputingPace(
                attention=1 / (6 * self._vllm_config.model_config.get_hidden_size()) if self._groups.whole else 0.0
            ),
            min_hit_tokens=self._options.min_hit_tokens,
            may_load=transfer.is_kv_consumer,
            may_save=transfer.is_kv_producer,
            prefix_caching=bool(self._vllm_config.cache_config.enable_prefix_caching),
            steps_ahead=self._vllm_config.max_concurrent_batches - 1,
            shares_rows=any(rank.shares_rows for rank in ranks),
        )
        return SchedulerHalf(
            state,
            saves,
            loads,
            cache=self._cache,
            purges=Purges(self._guards),
            names_changed=self._register_again,
        )

    def _state(self, ranks: Sequence[RankStore]) -> PlannerState:
        """Return the objects that both planners use. These objects call the store through the guards of these ranks."""
        events = self._vllm_config.kv_events_config
        return PlannerState(
            block_tokens=self._vllm_config.cache_config.block_size,
            keys=self._keys,
            lookups=PrefixLookups(
                self._guards,
                timeout_s=self._options.lookup_timeout_s,
                counters=self._counters,
                groups=self._groups.slices,
            ),
            tier=HostTier(
                min(rank.slots for rank in ranks), keep=self._options.cpu_bytes > 0, policy=self._options.cpu_policy
            ),
            groups=self._groups,
            hand_overs=HandOvers(
                Flights(self._guards, timeout_s=self._options.lookup_timeout_s, counters=self._counters),
                self._groups,
                self._keys,
                block_tokens=self._vllm_config.cache_config.block_size,
                single_flight_s=self._options.single_flight_s,
                counters=self._counters,
                spans=self._spans,
            ),
            events=KVEvents(
                wanted=bool(events and events.enable_kv_cache_events),
                block_tokens=self._vllm_config.cache_config.block_size,
                groups=group_kinds(self._kv_cache_config),
            ),
            counters=self._counters,
            spans=self._spans,
            sharing=SharingChecks(
                len(ranks),
                checks=all(rank.checks for rank in ranks),
                name=self._options.weights_version,
                slots=min(rank.slots for rank in ranks),
            ),
        )

    def _register_again(self) -> None:
        """Inform proxies of changes now."""
        if (registered := self._registered) is not None:
            registered.update()

    def _present(self) -> tuple[str, BlockNames]:
        """Return the name of the weights, and how blocks are named. A thread of the registration calls this."""
        if (half := self._scheduler) is None:
            return self._options.weights_version, BlockNames()
        return half.state.sharing.name, half.block_names()

    def _described(self, request: Request) -> dict[str, Any]:
        """Return the part of an answer that says how this engine names its blocks, for a request that asks for it."""
        if (half := self._scheduler) is None:
            return {}
        return {OPTIONS_NAME: msgspec.to_builtins(half.block_names(self._keys.adapter(request)))}

    def _explain_mismatch(self, guard: StoreGuard) -> None:
        """Log a warning if the store has blocks of this model only under namespaces that this engine does not use."""
        info = guard.call(lambda client: client.info(), None)
        if info is None:
            return
        known = {namespace.namespace for shard in info.shards for namespace in shard.namespaces}
        if warning := explain_mismatch(guard.namespace, known):
            logger.warning("kvstore: %s", warning)

    def on_new_request(self, request: Request) -> None:
        self._never_raise(lambda: self._keys.note(request), None)  # for all requests, even before the half is made
        if half := self._scheduler:
            self._never_raise(half.notice_purge, False)
            self._never_raise(lambda: half.loads.wait(request), None)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        none: int | None = 0
        if half := self._scheduler:
            tokens = self._never_raise(lambda: half.matched_tokens(request, num_computed_tokens), none)
        else:
            tokens = None if self._start.is_coming() else 0
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if half := self._scheduler:  # may raise; if the error were caught, the request would wait for its load forever
            half.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        host, store = self._scheduler.loads.hit_sources(request) if self._scheduler else (0, 0)
        sources = {CacheHitSource.HOST: host, CacheHitSource.EXTERNAL_UNSPECIFIED: store}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        self._never_raise(self._keys.note_sessions, None)
        half = self._scheduler
        if half is None:
            return StepPlan(idle=not scheduler_output.total_num_scheduled_tokens)
        self._never_raise(half.notice_purge, False)
        plan = half.plan(scheduler_output)
        tables = self._cache.tables(scheduler_output)
        plan.saves = self._never_raise(lambda: half.saves.plan(scheduler_output, tables), None)
        self._never_raise(lambda: half.complete(plan), None)
        plan.ending = self._ending.begun and plan.idle
        self._never_raise(lambda: self._traffic.tick(time.monotonic()), None)
        return plan

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if isinstance(report := connector_output.kv_connector_worker_meta, WorkerReport) and report.stores:
            self._start.take(report.stores)
        if half := self._scheduler:
            self._never_raise(lambda: half.update(connector_output), None)
        if isinstance(stats := connector_output.kv_connector_stats, TransferStats):
            self._never_raise(lambda: self._traffic.observe(stats.data), None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if (half := self._scheduler) is None:
            return False, None
        self._never_raise(lambda: half.saves.save_rest(request, block_ids), None)
        reply = half.state.hand_overs.reply(request)
        if is_to_describe(request):
            described: dict[str, Any] = {}
            reply = {**(reply or {}), **self._never_raise(lambda: self._described(request), described)} or None
        return half.finished(request), reply

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.state.events.take() if self._scheduler else ()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.saves.holds_blocks

    def has_pending_push_work(self) -> bool:
        half = self._scheduler
        return half is not None and (
            half.state.hand_overs.ending or half.state.sharing.waits or self._ending.waits(len(half.saves.sends))
        )

    def reset_cache(self) -> bool | None:
        """Drop the engine's blocks; see `SchedulerHalf.reset`. For example, vLLM calls this when the engine gets new
        weights or goes to sleep. It calls this even if it could not reset its own cache."""
        if half := self._scheduler:
            self._never_raise(half.reset, None)
        return True

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the worker's half. The engine calls this once while it starts. Raises ValueError for a cache that cannot
        be used."""
        modules = self._vllm_config.compilation_config.static_forward_context
        layers = [modules[name] for name in kv_caches if name in modules]
        config, options = self._vllm_config, self._options
        slices = head_slices(config, options.head_shards) if options.head_shards else None
        ranges = len(slices.mine) if slices else 1
        layout = BlockLayout(kv_caches, self._kv_cache_config.num_blocks, ranges, slices=max(1, options.layer_parts))
        pages = page_fingerprint(
            modules,
            kv_caches,
            self._kv_cache_config.num_blocks,
            config.cache_config.block_size,
            config.model_config.dtype,
            ranges,
        )
        if slices and not pages.startswith(PAGE_FINGERPRINT):
            raise ValueError(
                "kvstore: head_shards cannot be used with this engine, because the layout of its pages could not be "
                "determined; see the warning in the log. Leave head_shards out"
            )
        namespace = rank_namespace(
            config,
            layout,
            layers,
            pages,
            tenant=options.tenant,
            weights=options.weights_version,
            slices=slices,
            groups=groups_digest(self._kv_cache_config),
        )
        same = replica(config)
        slots = self._pool_slots(layout, same[1])
        shared = shared_pool(layout, slots, same, functools.partial(among_replicas, same))
        if shared is None:
            slots = self._pool_slots(layout)
        fingerprints = fingerprints_of(self._engine_worker, config)
        ranks = config.parallel_config.world_size
        offer_naming(self._engine_worker)
        self._rank = namespace.rank
        self._guards = [self._guard(namespace, self._options.timeout_s, [slices.mine] if slices else [])]
        self._worker = WorkerHalf(
            self._guards[0],
            layout,
            store=RankStore(namespace, slots, slices, layout.slices, shared is not None, fingerprints is not None),
            timeout_s=self._options.timeout_s,
            replica=same,
            counters=self._counters,
            store_on_host=self._options.store_on_host,
            recompute_whole=self._groups.recompute_whole,
            shared=shared,
            weights=WeightsWatch(fingerprints, options.weights_version, alone=ranks == 1),
            number=config.parallel_config.rank,
        )
        logger.info("kvstore: blocks are stored at %s as %s", self._options.endpoint, namespace)
        logger.info(
            "kvstore: host memory of %s: %d blocks, %s",
            "this rank" if shared is None else f"these {same[1]} ranks together",
            slots,
            "the CPU tier" if self._options.cpu_bytes else "for blocks in transfer (cpu_bytes is 0: no CPU tier)",
        )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return True, because the cache is at the same addresses after a sleep, and because no code here accesses it
        while the engine sleeps."""
        return True

    def unregister_kv_caches(self) -> None:
        """Prepare for the engine's sleep, in which the memory of its cache is freed (vLLM 0.33). This waits for copies
        in progress."""
        if self._worker:
            self._never_raise(self._worker.detach, None)

    def restore_kv_caches(self) -> None:
        """Allow access to the cache again, because its memory is allocated again."""
        if self._worker:
            self._worker.attach()

    def _pool_slots(self, layout: BlockLayout, sharing: int = 1) -> int:
        """Return the number of slots of a host pool. `sharing`: the number of ranks that share the pool. Raises
        ValueError if ``cpu_bytes`` is too small."""
        block_bytes = layout.block_bytes
        if not self._options.cpu_bytes:
            config = self._vllm_config
            step_blocks = config.scheduler_config.max_num_batched_tokens // config.cache_config.block_size
            return max(MIN_SLOTS, self._options.staging(step_blocks * block_bytes, layout.on_gpu) // block_bytes)
        ranks: int = self._vllm_config.parallel_config.world_size // sharing
        slots = self._options.cpu_bytes // ranks // block_bytes
        if slots < MIN_SLOTS:
            raise ValueError(
                f"kvstore: cpu_bytes is {self._options.cpu_bytes}, which is room for {slots} blocks of {block_bytes} "
                f"bytes on each of {ranks} ranks. Expected room for at least {MIN_SLOTS} blocks (cpu_bytes="
                f"{MIN_SLOTS * ranks * block_bytes}), or 0 for no CPU tier"
            )
        return slots

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker:
            self._worker.begin_step(self._plan())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker and isinstance(kv_connector_metadata, StepPlan) and kv_connector_metadata.reusing:
            self._worker.saves.order_copies()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker:
            for load in self._plan().loads:
                self._worker.loads.load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because a request runs only after its load has ended: see "Load" in docs/vllm-inside.md."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """If blocks are in slices and this is the last layer of a slice, start to save that slice of the step's
        blocks."""
        if self._worker:
            self._worker.saves.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Start the copies out of the cache. The copies finish in the background, and the blocks are then sent."""
        if self._worker:
            self._worker.saves.save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if not self._worker:
            return None, None
        if self._plan().idle:  # before 0.30, vLLM does not call `wait_for_save` in steps without tokens
            self._worker.saves.save()
        loaded = self._worker.loads.take_loaded()
        return self._worker.saves.take_saved(), loaded

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        saved, loaded = self.get_finished(finished_req_ids)
        failed = self._worker.loads.take_failed_requests() if self._worker else set()
        return transfer_results()(saved or set(), loaded or set(), failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.loads.take_failed_block_ids() if self._worker else set()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.take_report() if self._worker else None

    # Both halves.

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Return the counts since the last call. The engine adds up the counts of all workers, and logs and exports the
        sums."""
        counters = self._counters.take()
        if self._role == KVConnectorRole.SCHEDULER:
            held_back = self._scheduler.held_back.take() if self._scheduler else []
            if not counters and not held_back:
                return None
            stats = TransferStats.of(counters, histograms={"held_back_seconds": held_back})
            self._never_raise(lambda: self._traffic.observe(stats.data), None)
            return stats
        waiting, oldest_s = 0, 0.0
        if self._worker:
            waiting, oldest_s = self._worker.saves.unsent.blocks, self._worker.saves.unsent.oldest_s
        if not counters and not waiting and not self._waiting_told:
            return None
        self._waiting_told = waiting
        gauges = {f"waiting_blocks/{self._rank}": waiting, f"oldest_waiting_seconds/{self._rank}": oldest_s}
        return TransferStats.of(counters, gauges)

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
        """Return the metrics. vLLM calls this in the front end after it has started the engine."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        allow_time(vllm_config, parse_options(ConnectorOptions, extra, "kv_connector_extra_config").timeout_s)
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Send the blocks that wait, for at most ``timeout_s`` seconds, then disconnect."""
        if self._registered is not None:
            self._never_raise(self._registered.close, None)
        self._never_raise(self._start.close, None)
        at_end = self._never_raise(self._worker.close, None) if self._worker is not None else None
        if at_end is not None:
            logger.log(
                logging.WARNING if at_end.lost else logging.INFO,
                "kvstore: at the end of this engine, %d blocks that waited were sent, and %d are lost",
                *at_end,
            )
        for guard in self._guards:
            guard.close()

    def _plan(self) -> StepPlan:
        plan = self._connector_metadata
        return plan if isinstance(plan, StepPlan) else StepPlan()

    def _guard(self, namespace: Namespace, timeout_s: float, slices: Sequence[range]) -> StoreGuard:
        return StoreGuard(
            self._options.endpoint,
            namespace,
            self._client_options,
            timeout_s=timeout_s,
            counters=self._counters,
            local=self._options.local,
            slices=slices,
            logger=logger,
        )

    def _never_raise(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception:
            logger.exception("kvstore: an error in the connector itself, treated as a miss; please report it")
            self._counters.add("defects")
            return otherwise


# `plan` defines these messages without vLLM. vLLM requires that they can be pickled and that a report has `aggregate`.
KVConnectorMetadata.register(StepPlan)
KVConnectorWorkerMetadata.register(WorkerReport)
# A MultiConnector uses this name to find the class of a child connector's statistics.
KVConnectorFactory.register_connector("KVStoreConnector", __name__, "KVStoreConnector")
