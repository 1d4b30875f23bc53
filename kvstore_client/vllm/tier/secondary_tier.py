"""``KVStoreTier``: kvstore as a secondary tier of vLLM's own tiered KV offloading.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 68719476736,
        "secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore_client.vllm.tier",
                             "endpoint": "tcp://127.0.0.1:7070"}]}}'

vLLM moves chunks of blocks between the GPU and its CPU tier. Every chunk that enters the CPU tier is offered to this
tier, and chunks that the CPU tier lacks are looked up here. Chunks go between the CPU tier's rows and the socket
without a copy. The framework pins the rows of a job until this tier reports the job, so a job is reported only when no
thread can touch its rows any more.

All calls come from the scheduler's thread. None blocks, except ``drain_jobs`` and ``shutdown``, where the framework
wants the tier to wait. Once the engine runs, a failure of the store does not raise: it is a miss or a failed job.

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
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore_client.engine.guard import Counters, StoreGuard
from kvstore_client.engine.jobs import Within
from kvstore_client.engine.transfer_in import TransferIn
from kvstore_client.engine.transfer_out import BlockOut, SendOutcome, TransferOut
from kvstore_client.vllm.shared.metrics import COUNTERS, GAUGES, PREFIX
from kvstore_client.vllm.shared.store_options import parse_options
from kvstore_client.vllm.tier.chunk_keys import ChunkKeys, shared
from kvstore_client.vllm.tier.chunk_lookups import ChunkLookups
from kvstore_client.vllm.tier.chunk_namespace import check_chunks, chunk_namespace, engine_configs
from kvstore_client.vllm.tier.options import TierOptions

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy.typing as npt
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

    from kvstore_client.engine.jobs import Rows

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only the loggers below its own

T = TypeVar("T")

# The share of the CPU tier that may wait to be sent. Waiting chunks are pinned there, as many again can be on the wire,
# and the engine needs the rest.
WAITING_SHARE = 0.25
# The connector's counters that apply to a tier: those of lookups, transfers and their failures.
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
    """A job of chunks on their way out. It is reported once `TransferOut` has named the outcome of every chunk."""

    unnamed: int  # chunks whose outcome is not known yet
    began: float
    stored: int = 0
    lost: int = 0  # dropped or failed


@dataclass
class LoadJob:
    """A job of chunks on their way in. A transfer's thread writes it until it is finished; the scheduler's thread reads
    it after that."""

    job_id: JobId
    keys: Sequence[OffloadKey]
    names: Sequence[bytes]
    request_id: str
    began: float
    loaded: list[int] = field(default_factory=list)  # indices of keys

    def arrived(self, first: int, hits: npt.NDArray[np.bool_]) -> bool:
        self.loaded += (np.flatnonzero(hits) + first).tolist()
        return True


def _never_raises(otherwise: T) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return ``otherwise`` when a method raises: a defect of ours is a miss too, and the engine goes on."""

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
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,
    ) -> None:
        """Connects. If the store is out of reach, that is logged, and the store is used as soon as it is up. Raises
        ValueError for options or an engine that cannot work; the engine then stops with the message."""
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
        self._most_waiting = given.waiting_chunks or max(1, int(len(self._rows) * WAITING_SHARE))
        self._out = TransferOut(self._guard, limit=self._most_waiting, counters=self._counters, done=self._sent)
        self._in = TransferIn(self._guard, counters=self._counters)
        self._stores: dict[JobId, StoreJob] = {}  # only used by the scheduler's thread
        self._named: deque[Sequence[tuple[Hashable, SendOutcome]]] = deque()  # from the transfer's thread
        self._loads: deque[LoadJob] = deque()  # finished ones, from the transfer's threads
        self._unstarted: list[JobResult] = []
        self._keys = ChunkKeys(engine.model_config, trust_media_ids=given.trust_media_ids)
        self._weights_version = given.weights_version
        self._generation = lookup_guard.generation  # of the namespace, in which the engine's caches were filled
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
        """Each chunk is offered only once, when it enters the CPU tier; from then on every engine can read it from the
        store."""
        self._note(req_context)
        return RequestOffloadingContext()

    @_never_raises(None)
    def _note(self, req_context: ReqContext) -> None:
        self._keys.note(req_context)

    @_never_raises(None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)

    # Transfers. The framework itself keeps the engine stepping while jobs are under way, so has_pending_work is the
    # base's.

    def submit_store(self, job_metadata: TransferJob) -> None:
        job_id = job_metadata.job_id
        try:
            rows = self._open_rows()
            # Of a job larger than the queue only the head is queued.
            keys = self._keys.of(job_metadata.keys, job_metadata.req_context)
            wanted = [(key, int(chunk)) for key, chunk in zip(keys, job_metadata.chunk_ids, strict=True) if key]
            names = [key for key, _ in wanted[: self._most_waiting]]
            blocks = [rows[chunk] for _, chunk in wanted[: self._most_waiting]]
        except Exception:  # no chunk was handed on, so the rows are free
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
        # A job's chunks are of one chain.
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
            if len(job.names) < len(names) or self._is_outdated():  # what was found a moment ago; it is computed
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
        """Give up the chunks that wait, forget what the store was found to have, and wait for the jobs that are on the
        wire. Each call of the store has a deadline, so this ends.

        The framework is about to empty its caches, as it does when the engine gets new weights, and does not tell a
        tier why. So from now on no chunk stored before is found, and only this engine finds the chunks it stores,
        unless the operator has named the weights, and so promised that this engine never gets others.
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

    # Metrics: those of the connector that apply to a tier. The framework adds its own for every tier.

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        counters = {
            PREFIX + metric.name: OffloadingCounterMetadata(metric.meaning, (metric.label,) if metric.label else ())
            for metric in dict.fromkeys(COUNTERS[name].metric for name in TIER_COUNTERS)
        }
        gauge = GAUGES["waiting_blocks"]
        return {**counters, PREFIX + gauge.name: OffloadingGaugeMetadata(gauge.meaning)}

    @_never_raises(None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        for name, amount in self._counters.take().items():
            if name in TIER_COUNTERS:
                metric, label_value = COUNTERS[name]
                stats.increase_counter(PREFIX + metric.name, amount, (label_value,) if metric.label else ())
        stats.set_gauge(PREFIX + GAUGES["waiting_blocks"].name, self._out.waiting)
        return stats

    @_never_raises(None)
    def shutdown(self) -> None:
        """Send the chunks that wait, for at most the time of one call; then end all that could touch the rows."""
        self._out.close(self._timeout_s)
        self._guard.close()  # loads under way end now
        self._in.close()
        self._lookup_guard.close()
        self._lookups.close()
        self._rows = None

    # Internals.

    def _sent(self, named: Sequence[tuple[Hashable, SendOutcome]]) -> None:
        self._named.append(named)

    def _name(self, job_id: JobId, outcome: SendOutcome) -> list[JobResult]:
        """Count the outcome of one chunk. -> the job's result if that was its last chunk."""
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
        if not complete:  # else the same request would be promised the missing chunks again and again
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
        """Whether the engine's caches may have chunks from before a purge: only vLLM can empty those, and says so with
        `drain_jobs`. Until then nothing is shared."""
        now = self._lookup_guard.generation
        if self._generation < 0:  # the store was not reached before
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
    """The CPU tier's chunks as rows (chunks, chunk_bytes), uint8, over the same memory. Raises ValueError for memory of
    another form.

    The rows use a memoryview of their own: the framework releases the one it passed, which must then have no user.
    """
    contiguous = view.ndim == 2 and view.c_contiguous and view.itemsize == 1
    if not contiguous or view.readonly:
        raise ValueError(
            f"kvstore: the CPU tier's memory has shape {view.shape}, strides {view.strides} and items of "
            f"{view.itemsize} bytes; expected writable rows of bytes, one a chunk, without gaps"
        )
    rows: Rows = np.asarray(memoryview(view)).view(np.uint8)
    return rows
