"""What the connector counted, in the forms the engine collects, exports and logs.

Every rank and the scheduler count by the names of ``COUNTERS`` and ``GAUGES`` and hand a ``TransferStats`` to the
engine, which adds them up over ranks and time and gives the sum to its log line and to ``PromMetrics``, in the front
end's process. ``TrafficLog`` writes our own line a minute.

The metrics are named ``vllm:kvstore_…`` although they are ours: when an engine is made again in one process, vLLM
clears the registry of names that begin with ``vllm:``, and any other would be registered twice, which is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvstore.sizes import format_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(f"vllm.{__name__}")

LOG_INTERVAL_S = 60.0


class Metric(NamedTuple):
    """A name for the engine's metrics page, without the prefix, and what the number means."""

    name: str
    meaning: str
    label: str = ""  # the one label beside the engine's own, if any


class Sample(NamedTuple):
    """Where a counter goes: a metric, and the value of its label."""

    metric: Metric
    label_value: str = ""


HIT_TOKENS: Final = Metric(
    "hit_tokens_total", "Prompt tokens loaded instead of computed, by the tier that had them.", "tier"
)
TRANSFER_BLOCKS: Final = Metric("transfer_blocks_total", "Blocks moved between host memory and the store.", "direction")
TRANSFER_BYTES: Final = Metric("transfer_bytes_total", "Bytes moved between host memory and the store.", "direction")
TRANSFER_SECONDS: Final = Metric(
    "transfer_seconds_total", "Time spent in calls that moved blocks, summed over threads and ranks.", "direction"
)
SWAP_BLOCKS: Final = Metric(
    "swap_blocks_total", "Blocks moved between the engine's cache and host memory.", "direction"
)
SWAP_BYTES: Final = Metric("swap_bytes_total", "Bytes moved between the engine's cache and host memory.", "direction")
SWAP_SECONDS: Final = Metric(
    "swap_seconds_total", "Time spent moving blocks between the engine's cache and host memory.", "direction"
)

COUNTERS: Final[Mapping[str, Sample]] = {
    "hit_tokens_cpu": Sample(HIT_TOKENS, "cpu"),
    "hit_tokens_store": Sample(HIT_TOKENS, "store"),
    "transfer_in_blocks": Sample(TRANSFER_BLOCKS, "in"),
    "transfer_out_blocks": Sample(TRANSFER_BLOCKS, "out"),
    "transfer_in_bytes": Sample(TRANSFER_BYTES, "in"),
    "transfer_out_bytes": Sample(TRANSFER_BYTES, "out"),
    "transfer_in_seconds": Sample(TRANSFER_SECONDS, "in"),
    "transfer_out_seconds": Sample(TRANSFER_SECONDS, "out"),
    "swap_in_blocks": Sample(SWAP_BLOCKS, "in"),
    "swap_out_blocks": Sample(SWAP_BLOCKS, "out"),
    "swap_in_bytes": Sample(SWAP_BYTES, "in"),
    "swap_out_bytes": Sample(SWAP_BYTES, "out"),
    "swap_in_seconds": Sample(SWAP_SECONDS, "in"),
    "swap_out_seconds": Sample(SWAP_SECONDS, "out"),
    "present_blocks": Sample(Metric("present_blocks_total", "Blocks not sent because the store had them.")),
    "dropped_blocks": Sample(Metric("dropped_blocks_total", "Blocks not sent because too many waited; oldest first.")),
    "unsaved_blocks": Sample(
        Metric("unsaved_blocks_total", "Blocks the store did not take, or could not be asked to.")
    ),
    "missed_blocks": Sample(Metric("missed_blocks_total", "Blocks the store had when asked and did not deliver.")),
    "checksum_errors": Sample(Metric("checksum_errors_total", "Blocks that arrived damaged; each counts as missed.")),
    "lookups": Sample(Metric("lookups_total", "Questions to the store how much it has of a prompt.")),
    "lookup_timeouts": Sample(
        Metric("lookup_timeouts_total", "Lookups not answered in lookup_timeout_s, which count as nothing found.")
    ),
    "skipped_lookups": Sample(Metric("skipped_lookups_total", "Lookups not made because too many were under way.")),
    "failed_loads": Sample(Metric("failed_loads_total", "Requests that computed what a load should have brought.")),
    "failed_calls": Sample(Metric("failed_calls_total", "Calls of the store that failed, each one a miss.")),
    "defects": Sample(
        Metric("defects_total", "Errors of the connector itself, treated as misses. Please report them.")
    ),
}

# Counted at several places at once: each source's last value counts, and the metric is their sum.
GAUGES: Final[Mapping[str, Metric]] = {
    "waiting_blocks": Metric("waiting_blocks", "Blocks in host memory that wait to be sent to the store."),
}


@dataclass
class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report and the newest gauges, of one source or of many put together.

    data: {"counters": {name: number}, "gauges": {"name/source": number}}, which msgpack and pickle can carry.
    """

    data: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def of(cls, counters: Mapping[str, float], gauges: Mapping[str, float] | None = None) -> TransferStats:
        """gauges: "name/source" -> value, where the source names the rank."""
        return cls(data={"counters": dict(counters), "gauges": dict(gauges or {})})

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Put another source's, or a later interval's, numbers to these."""
        counters = self.data["counters"]
        for name, number in other.data["counters"].items():
            counters[name] = counters.get(name, 0) + number
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers of the engine's "KV Transfer metrics" log line: what is not 0, gauges summed over sources."""
        numbers = {**self.data["counters"], **sum_over_sources(self.data["gauges"])}
        return {name: round(number, 3) for name, number in numbers.items() if number}

    def is_empty(self) -> bool:
        return not self.data["counters"] and not self.data["gauges"]


def sum_over_sources(gauges: Mapping[str, float]) -> dict[str, float]:
    """ "name/source" -> value as name -> sum."""
    sums: dict[str, float] = {}
    for key, value in gauges.items():
        name = key.partition("/")[0]
        sums[name] = sums.get(name, 0) + value
    return sums


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The numbers as Prometheus metrics, labelled like the engine's own. Every metric is there from the start, as 0.

    Thread: the front end's, which also makes it; one for all engines of a front end.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        families = {
            metric: self._counter_cls(
                name=f"vllm:kvstore_{metric.name}",
                documentation=metric.meaning,
                labelnames=[*labelnames, metric.label] if metric.label else labelnames,
            )
            for metric in dict.fromkeys(sample.metric for sample in COUNTERS.values())
        }
        # counter name -> engine index -> the metric's child
        self._counters = {
            name: create_metric_per_engine(
                families[metric],
                {
                    engine: [*values, label_value] if metric.label else values
                    for engine, values in per_engine_labelvalues.items()
                },
            )
            for name, (metric, label_value) in COUNTERS.items()
        }
        self._gauges = {
            name: create_metric_per_engine(
                self._gauge_cls(
                    name=f"vllm:kvstore_{metric.name}",
                    documentation=metric.meaning,
                    labelnames=labelnames,
                    multiprocess_mode="mostrecent",
                ),
                per_engine_labelvalues,
            )
            for name, metric in GAUGES.items()
        }
        self._last: dict[int, dict[str, float]] = {engine: {} for engine in per_engine_labelvalues}
        self._unknown: set[str] = set()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add ``TransferStats.data`` of one engine."""
        for name, number in transfer_stats_data["counters"].items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(number)
            else:
                self._warn_once(name)
        last = self._last[engine_idx]
        last.update(transfer_stats_data["gauges"])
        for name, value in sum_over_sources(last).items():
            if name in self._gauges:
                self._gauges[name][engine_idx].set(value)
            else:
                self._warn_once(name)

    def _warn_once(self, name: str) -> None:
        if name not in self._unknown:
            self._unknown.add(name)
            logger.warning("kvstore: %r was counted, which is no known metric; it is not exported", name)


class TrafficLog:
    """One INFO line a minute about what the connector did, when it did anything.

    Owned by the scheduler's half and used in its thread only; never blocks.
    """

    def __init__(self, now: float) -> None:
        """now: ``time.monotonic()``, here and in ``tick``."""
        self._since = now
        self._stats = TransferStats()

    def observe(self, data: Mapping[str, Mapping[str, float]]) -> None:
        """Add ``TransferStats.data`` of the ranks or of the scheduler; it is copied."""
        self._stats.aggregate(TransferStats.of(data["counters"], data["gauges"]))

    def tick(self, now: float) -> None:
        """Write the line if a minute is over. Cheap: call it every step."""
        seconds = now - self._since
        if seconds < LOG_INTERVAL_S:
            return
        counters, gauges = self._stats.data["counters"], self._stats.data["gauges"]
        if any(counters.values()):
            waiting = sum_over_sources(gauges).get("waiting_blocks", 0)
            logger.info("kvstore, last %.0f s: %s", seconds, traffic_text(counters, waiting))
        self._since = now
        self._stats = TransferStats.of({}, gauges)


def traffic_text(counters: Mapping[str, float], waiting_blocks: float) -> str:
    """The numbers an operator asks for first; troubles beyond the usual two appear only when there are some."""

    def count(name: str) -> float:
        return counters.get(name, 0)

    cpu, store = count("hit_tokens_cpu"), count("hit_tokens_store")
    parts = [
        f"{_grouped(cpu + store)} tokens hit (cpu {_grouped(cpu)}, store {_grouped(store)})",
        f"in {_traffic(count('transfer_in_bytes'), count('transfer_in_seconds'))}",
        f"out {_traffic(count('transfer_out_bytes'), count('transfer_out_seconds'))}",
        f"waiting {_grouped(waiting_blocks)} blocks",
        f"dropped {_grouped(count('dropped_blocks'))}",
        f"failed {_grouped(count('failed_calls'))}",
    ]
    troubles = {
        "unsaved_blocks": "blocks not taken",
        "missed_blocks": "blocks missed",
        "checksum_errors": "checksum errors",
        "lookup_timeouts": "lookups timed out",
        "skipped_lookups": "lookups skipped",
        "failed_loads": "requests computed after all",
        "defects": "defects",
    }
    parts += [f"{_grouped(count(name))} {words}" for name, words in troubles.items() if count(name)]
    return ", ".join(parts)


def _grouped(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")


def _traffic(transferred_bytes: float, seconds: float) -> str:
    rate = f" at {format_size(transferred_bytes / seconds)}/s" if transferred_bytes and seconds else ""
    return f"{format_size(transferred_bytes)}{rate}"
