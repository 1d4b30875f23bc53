"""``KVStoreTier``: kvstore as a secondary tier of vLLM's own tiered KV offloading.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 68719476736,
        "secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore_client.vllm.tier",
                             "endpoint": "tcp://127.0.0.1:7070"}]}}'

vLLM moves chunks of blocks between the GPU and its CPU tier. Every chunk that enters the CPU tier is offered to this
tier, and chunks that the CPU tier lacks are looked up here. Chunks are sent from and received into the CPU tier's rows
without a further copy. The framework pins the rows of a job until this tier reports the job. So a job is reported only
when no thread can touch its rows any more.

All calls come from the scheduler's thread. Only ``drain_jobs`` and ``shutdown`` block, because the framework expects
the tier to wait in these calls. Once the engine runs, a failure of the store raises no error, but counts as a miss or a
failed job.

Over 400 lines because vLLM wants one class for lookups and transfers.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, SecondaryTierManager, TransferJob

from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import Within
from kvstore_client.engine.transfer_in import TransferIn
from kvstore_client.engine.transfer_out import BlockOut, SendOutcome, TransferOut
from kvstore_client.vllm.shared.metrics import COUNTERS, GAUGES, METRIC_PREFIX
from kvstore_client.vllm.shared.releases import CacheHitSource
from kvstore_client.vllm.shared.store_options import parse_options
from kvstore_client.vllm.tier.chunk_keys import ChunkKeys, shared
from kvstore_client.vllm.tier.chunk_lookups import ChunkLookups
from kvstore_client.vllm.tier.chunk_namespace import check_chunks, chunk_namespace, engine_configs
from kvstore_client.vllm.tier.options import TierOptions

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy.typing as npt
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

    from kvstore_client.engine.jobs import Rows

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only the lines of loggers below its own

T = TypeVar("T")

# The share of the CPU tier that may wait to be sent. Waiting chunks are pinned there, and the same number of chunks can
# be in transfer at the same time. The engine needs the rest.
TIER_WAITING_SHARE = 0.25
# The connector's counters that apply to a tier, which are those of lookups, of transfers and of their failures.
TIER_COUNTERS = frozenset(
    {
        "transfer_in_blocks",
        "transfer_out_blocks",
        "transfer_in_bytes",
        "transfer_out_bytes",
        "transfer_in_seconds",
        "transfer_out_seconds",
        "present_blocks",
        "dropped_blocks",
        "unsaved_blocks",
        "missed_blocks",
        "checksum_errors",
        "lookups",
        "lookup_timeouts",
        "failed_calls",
        "defects",
    }
)


@dataclass
class StoreJob:
    """A job of chunks to send. It is reported once `TransferOut` has reported the outcome of every chunk."""

    unnamed: int  # chunks whose outcome is not known yet
    began: float
    stored: int = 0
    lost: int = 0  # dropped or failed


@dataclass
class LoadJob:
    """A job of chunks to load. A transfer's thread writes this object until the job is finished. After that, the
    scheduler's thread reads it."""

    job_id: JobId
    keys: Sequence[OffloadKey]
    names: Sequence[bytes]
    request_id: str
    began: float
    loaded: list[int] = field(default_factory=list)  # indices into `keys`

    def arrived(self, first: int, hits: npt.NDArray[np.bool_]) -> bool:
        self.loaded += (np.flatnonzero(hits) + first).tolist()
        return True


def _never_raises(otherwise: T) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Make a method return ``otherwise`` if it raises an exception. So a defect of the tier is also treated as a miss,
    and the engine goes on."""

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def call(self: KVStoreTier, *args: Any, **kwargs: Any) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self._defect()
                return otherwise

        return call

    return decorate


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """One engine's access to the store. See the module's docstring for threads, blocking and failures."""

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source: ClassVar[Any] = CacheHitSource and CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: CPUOffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,
    ) -> None:
        """Connect. If the store is out of reach, this is logged, and the store is used as soon as it is up. Raises
        ValueError for invalid options or an unsuitable engine. The engine then stops with the message of the error."""
        if not hasattr(SecondaryTierManager, "block_size_bytes"):
            raise ValueError(
                "kvstore: this release of vLLM gives tiers too little to name their chunks. Use vLLM 0.31 or later, or "
                "KVStoreConnector instead of KVStoreTier"
            )
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        given = parse_options(TierOptions, options, f"secondary_tiers, {tier_type}")
        self.locality = Locality(given.locality)
        self._timeout_s = given.timeout_s
        self._rows: Rows | None = _rows_of(primary_kv_view)
        engine, cache = engine_configs()
        check_chunks(engine, cache, self.block_size_bytes)
        self.namespace = chunk_namespace(
            offloading_spec.config,
            engine,
            cache,
            chunk_bytes=self.block_size_bytes,
            page_bytes=offloading_spec.cpu_page_size_per_worker,
            tenant=given.tenant,
            weights=given.weights_version,
        )
        self._counters = Counters()
        client = given.client
        self._guard, lookup_guard = (
            StoreGuard(
                given.endpoint,
                self.namespace,
                client,
                timeout_s=timeout_s,
                counters=self._counters,
                local=given.local,
                logger=logger,
            )
            for timeout_s in (given.timeout_s, given.lookup_timeout_s)
        )
        self._lookup_guard = lookup_guard
        self._lookups = ChunkLookups(lookup_guard, timeout_s=given.lookup_timeout_s, counters=self._counters)
        self._most_waiting = given.waiting_chunks or max(1, int(len(self._rows) * TIER_WAITING_SHARE))
        self._out = TransferOut(self._guard, limit=self._most_waiting, counters=self._counters, done=self._sent)
        self._in = TransferIn(self._guard, counters=self._counters)
        self._stores: dict[JobId, StoreJob] = {}  # only the scheduler's thread uses it
        self._named: deque[Sequence[tuple[Hashable, SendOutcome]]] = deque()  # filled by the transfer's thread
        self._loads: deque[LoadJob] = deque()  # finished loads, filled by the transfer's threads
        self._unstarted: list[JobResult] = []
        self._keys = ChunkKeys(engine.model_config, trust_media_ids=given.trust_media_ids)
        self._weights_version = given.weights_version
        self._generation = lookup_guard.generation  # the namespace's generation in which the caches were filled
        self._told_purged = False
        logger.info("kvstore: chunks are stored at %s as %s", given.endpoint, self.namespace)

    # Lookups.

    @_never_raises(LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        [name] = self._keys.of((key,), req_context)
        found = self._lookups.find(name, req_context.req_id) if name is not None and not self._is_outdated() else False
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    @_never_raises(None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._lookups.touch(shared(self._keys.of(keys, req_context)))

    @_never_raises(None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._keys.note_sessions()
        self._lookups.end_step()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return vLLM's default: each chunk is offered to this tier only once, when it enters the CPU tier. Every
        engine can then read it from the store."""
        self._note(req_context)
        return RequestOffloadingContext()

    @_never_raises(None)
    def _note(self, req_context: ReqContext) -> None:
        self._keys.note(req_context)

    @_never_raises(None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)

    # Transfers. The framework itself keeps the engine running steps while jobs are in progress, so the base class's
    # has_pending_work is right.

    def submit_store(self, job_metadata: TransferJob) -> None:
        job_id = job_metadata.job_id
        try:
            rows = self._open_rows()
            # If a job is larger than the queue, only its head is queued.
            keys = self._keys.of(job_metadata.keys, job_metadata.req_context)
            wanted = [(key, int(chunk)) for key, chunk in zip(keys, job_metadata.chunk_ids, strict=True) if key]
            names = [key for key, _ in wanted[: self._most_waiting]]
            blocks = [rows[chunk] for _, chunk in wanted[: self._most_waiting]]
        except Exception:  # no chunk was queued, so no thread uses the rows
            self._defect()
            self._unstarted.append(JobResult(job_id=job_id, success=False))
            return
        if self._is_outdated():
            names = []
        surplus = len(wanted) - len(names)
        self._counters.add("dropped_blocks", surplus)
        if not names:
            self._unstarted.append(JobResult(job_id=job_id, success=True))
            return
        self._stores[job_id] = StoreJob(unnamed=len(names), began=time.monotonic(), lost=surplus)
        # All chunks of a job are in one chain.
        parents = [None, *names[:-1]]
        generation = self._generation if self._generation >= 0 else None
        self._out.put(
            BlockOut(name, block, job_id, parent, generation=generation)
            for name, block, parent in zip(names, blocks, parents, strict=True)
        )

    def submit_load(self, job_metadata: TransferJob) -> None:
        job_id, request_id = job_metadata.job_id, job_metadata.req_context.req_id
        now = time.monotonic()
        try:
            names = self._keys.of(job_metadata.keys, job_metadata.req_context)
            job = LoadJob(job_id, list(job_metadata.keys), shared(names), request_id, now)
            if len(job.names) < len(names) or self._is_outdated():  # found, but no longer shared: computed instead
                self._unstarted.append(JobResult(job_id=job_id, success=False))
                return
            slots = [int(chunk) for chunk in job_metadata.chunk_ids]
            rows = self._open_rows()
        except Exception:
            self._defect()
            self._unstarted.append(JobResult(job_id=job_id, success=False))
            return
        done = functools.partial(self._loads.append, job)
        self._in.submit(job.names, rows, slots, within=Within(self._timeout_s), arrived=job.arrived, done=done)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self._unstarted = self._unstarted, []
        while self._named:
            for job_id, outcome in self._named.popleft():
                results += self._name(job_id, outcome)
        while self._loads:
            results.append(self._loaded(self._loads.popleft()))
        return results

    def drain_jobs(self) -> None:
        """Drop the chunks that wait, forget the answers of lookups, and wait for the transfers in progress. Each call
        to the store has a deadline, so the wait ends.

        The framework is about to empty its caches. It does so when the engine gets new weights, for example, but does
        not pass the reason to a tier. So from now on, no chunk that was stored before is found, and only this engine
        finds the chunks that it stores. This does not apply if the operator has named the weights, and so has promised
        that they never change in this engine.
        """
        self._generation, self._told_purged = self._lookup_guard.generation, False
        began = time.monotonic()
        self._out.discard(lambda _: True)
        self._lookups.distrust()
        while not (self._out.drain(self._timeout_s) and self._in.drain(self._timeout_s)):
            logger.warning(
                "kvstore: still waiting for %d chunks on their way to the store and %d loads, after %.0f s",
                self._out.waiting,
                self._in.waiting,
                time.monotonic() - began,
            )
        if self._weights_version:
            return
        if self._keys.forget():
            logger.warning(
                "kvstore: the engine's cache was reset, perhaps for new weights, so from now on it shares no chunks "
                "with other engines; restart it to share again. If the weights never change while the engine runs, "
                "name them with the option weights_version"
            )

    # Metrics: those of the connector that apply to a tier. The framework adds its own metrics for every tier.

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        counters = {
            METRIC_PREFIX + metric.name: OffloadingCounterMetadata(
                metric.meaning, (metric.label,) if metric.label else ()
            )
            for metric in dict.fromkeys(COUNTERS[name].metric for name in TIER_COUNTERS)
        }
        gauge = GAUGES["waiting_blocks"]
        return {**counters, METRIC_PREFIX + gauge.name: OffloadingGaugeMetadata(gauge.meaning)}

    @_never_raises(None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        for name, amount in self._counters.take().items():
            if name in TIER_COUNTERS:
                metric, label_value = COUNTERS[name]
                stats.increase_counter(METRIC_PREFIX + metric.name, amount, (label_value,) if metric.label else ())
        stats.set_gauge(METRIC_PREFIX + GAUGES["waiting_blocks"].name, self._out.waiting)
        return stats

    @_never_raises(None)
    def shutdown(self) -> None:
        """Send the waiting chunks for at most ``timeout_s``. Then end every thread that could use the rows."""
        self._out.close(self._timeout_s)
        self._guard.close()  # ends the loads in progress
        self._in.close()
        self._lookup_guard.close()
        self._lookups.close()
        self._rows = None

    # Internals.

    def _sent(self, named: Sequence[tuple[Hashable, SendOutcome]]) -> None:
        self._named.append(named)

    def _name(self, job_id: JobId, outcome: SendOutcome) -> list[JobResult]:
        """Count the outcome of one chunk. Return a list with the job's result if it was the job's last chunk, else an
        empty list."""
        job = self._stores[job_id]
        job.unnamed -= 1
        job.stored += outcome is SendOutcome.STORED
        job.lost += outcome in (SendOutcome.DROPPED, SendOutcome.FAILED)
        if job.unnamed:
            return []
        del self._stores[job_id]
        return [
            JobResult(
                job_id=job_id,
                success=not job.lost,
                transfer_time=time.monotonic() - job.began,
                transfer_bytes=job.stored * self.block_size_bytes,
            )
        ]

    def _loaded(self, job: LoadJob) -> JobResult:
        complete = len(job.loaded) == len(job.keys)
        if not complete:  # otherwise the same request would find the missing chunks again and again
            missing = set(range(len(job.keys))).difference(job.loaded)
            self._lookups.deny([job.names[index] for index in missing], job.request_id)
        return JobResult(
            job_id=job.job_id,
            success=complete,
            successful_keys=None if complete else tuple(job.keys[index] for index in job.loaded),
            transfer_time=time.monotonic() - job.began,
            transfer_bytes=len(job.loaded) * self.block_size_bytes,
        )

    def _is_outdated(self) -> bool:
        """Return whether the engine's caches may have chunks from before a purge. Only vLLM can empty these caches, and
        it then calls `drain_jobs`. Until then, nothing is shared."""
        now = self._lookup_guard.generation
        if self._generation < 0:  # the store has been out of reach until now
            self._generation = now
        if self._generation == now:
            return False
        if not self._told_purged:
            self._told_purged = True
            logger.warning(
                "kvstore: the store was purged, and vLLM's own caches may have chunks from before, so this engine "
                "shares nothing until they are reset: POST /reset_prefix_cache?reset_external=true"
            )
        return True

    def _open_rows(self) -> Rows:
        if self._rows is None:
            raise RuntimeError("this tier was shut down")
        return self._rows

    def _defect(self) -> None:
        logger.exception("kvstore: an error in the tier itself, treated as a miss; please report it")
        self._counters.add("defects")


def _rows_of(view: memoryview) -> Rows:
    """Return a (chunks, chunk_bytes) array of uint8 over the memory of the CPU tier. Raises ValueError for memory of
    another form.

    The array uses a memoryview of its own, because nothing may use the framework's view when the framework releases it.
    """
    contiguous = view.ndim == 2 and view.c_contiguous and view.itemsize == 1
    if not contiguous or view.readonly:
        raise ValueError(
            f"kvstore: the CPU tier's memory has shape {view.shape}, strides {view.strides} and items of "
            f"{view.itemsize} bytes; expected writable memory with one row of bytes for each chunk, without gaps"
        )
    rows: Rows = np.asarray(memoryview(view)).view(np.uint8)
    return rows
