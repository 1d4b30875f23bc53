"""Converts the connector's counts into the forms in which the engine collects, exports and logs them.

Every rank and the scheduler count under the names in ``COUNTERS``, ``GAUGES`` and ``HISTOGRAMS``, and pass a
``TransferStats`` to the engine. The engine adds these up over ranks and time. It passes the sum to its log line and, in
the front end's process, to ``PromMetrics``. ``TrafficLog`` writes the connector's own log line once a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvstore.sizes import format_size
from kvstore_client.vllm.shared.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LARGEST,
    METRIC_PREFIX,
    SECONDS_BUCKETS,
    Metric,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(f"vllm.{__name__}")

STATS_LOG_INTERVAL_S = 60.0


@dataclass
class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """The counts since the last report and the newest gauges, either of one source or of several merged sources.

    data: {"counters": {name: number}, "gauges": {"name/source": number}, "histograms": {name: [number of each request,
    ...]}}. Both msgpack and pickle can encode it.
    """

    data: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def of(
        cls,
        counters: Mapping[str, float],
        gauges: Mapping[str, float] | None = None,
        histograms: Mapping[str, Sequence[float]] | None = None,
    ) -> TransferStats:
        """`counters`: the counts by name. `gauges`: the values by "name/source", where the source is the rank.
        `histograms`: the values of all requests, by name."""
        numbers = {name: list(values) for name, values in (histograms or {}).items() if values}
        return cls(data={"counters": dict(counters), "gauges": dict(gauges or {}), "histograms": numbers})

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}, "histograms": {}}

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Add the numbers of another source, or of a later interval."""
        counters = self.data["counters"]
        for name, number in other.data["counters"].items():
            counters[name] = counters.get(name, 0) + number
        self.data["gauges"].update(other.data["gauges"])
        for name, numbers in other.data["histograms"].items():
            self.data["histograms"].setdefault(name, []).extend(numbers)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for the engine's "KV Transfer metrics" log line. These are the counters, the gauges over
        all sources, and the largest value of each histogram. Numbers that are 0 are left out."""
        longest = {f"longest_{name}": max(numbers) for name, numbers in self.data["histograms"].items()}
        numbers = {**self.data["counters"], **over_sources(self.data["gauges"]), **longest}
        return {name: round(number, 3) for name, number in numbers.items() if number}

    def is_empty(self) -> bool:
        return not any(self.data.values())


def over_sources(gauges: Mapping[str, float]) -> dict[str, float]:
    """Return one value for each name, from values by "name/source". It is either the sum or the largest value of all
    sources, depending on the gauge."""
    found: dict[str, float] = {}
    for key, value in gauges.items():
        name = key.partition("/")[0]
        before = found.get(name, 0)
        found[name] = max(before, value) if name in LARGEST else before + value
    return found


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The numbers as Prometheus metrics, with the same labels as the engine's own metrics. Every metric exists from the
    start, with the value 0.

    One object serves all engines of a front end. Only the front end's thread may use it, including the constructor.
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
                name=METRIC_PREFIX + metric.name,
                documentation=metric.meaning,
                labelnames=[*labelnames, metric.label] if metric.label else labelnames,
            )
            for metric in dict.fromkeys(sample.metric for sample in COUNTERS.values())
        }
        # the metric's child, by counter name and engine index
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

        def of_each_engine(family: type, metric: Metric, **options: Any) -> dict[int, Any]:
            name = METRIC_PREFIX + metric.name
            made = family(name=name, documentation=metric.meaning, labelnames=labelnames, **options)
            children: dict[int, Any] = create_metric_per_engine(made, per_engine_labelvalues)
            return children

        self._gauges = {
            name: of_each_engine(self._gauge_cls, metric, multiprocess_mode="mostrecent")
            for name, metric in GAUGES.items()
        }
        self._histograms = {
            name: of_each_engine(self._histogram_cls, metric, buckets=SECONDS_BUCKETS)
            for name, metric in HISTOGRAMS.items()
        }
        self._last: dict[int, dict[str, float]] = {engine: {} for engine in per_engine_labelvalues}
        self._unknown: set[str] = set()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add ``TransferStats.data`` of one engine."""
        for name, number in transfer_stats_data["counters"].items():
            if (counter := self._known(self._counters, name)) is not None:
                counter[engine_idx].inc(number)
        for name, numbers in transfer_stats_data["histograms"].items():
            if (histogram := self._known(self._histograms, name)) is not None:
                for number in numbers:
                    histogram[engine_idx].observe(number)
        last = self._last[engine_idx]
        last.update(transfer_stats_data["gauges"])
        for name, value in over_sources(last).items():
            if (gauge := self._known(self._gauges, name)) is not None:
                gauge[engine_idx].set(value)

    def _known(self, metrics: Mapping[str, dict[int, Any]], name: str) -> dict[int, Any] | None:
        """Return the children of a metric by engine. If the metric does not exist, return None, and log a warning the
        first time."""
        if name not in metrics and name not in self._unknown:
            self._unknown.add(name)
            logger.warning("kvstore: %r was counted but is not a known metric, so it is not exported", name)
        return metrics.get(name)


class TrafficLog:
    """Writes one INFO line a minute about the connector's traffic, unless there was none.

    Only the thread of the scheduler's half may use it. No method blocks.
    """

    def __init__(self, now: float) -> None:
        """`now`: the present time of `time.monotonic`, here and in `tick`."""
        self._since = now
        self._stats = TransferStats()

    def observe(self, data: Mapping[str, Mapping[str, float]]) -> None:
        """Add `TransferStats.data` of the ranks or of the scheduler. The data is copied."""
        self._stats.aggregate(TransferStats.of(data["counters"], data["gauges"]))

    def tick(self, now: float) -> None:
        """Write the line if a minute has passed. This is cheap enough to be called in every step."""
        seconds = now - self._since
        if seconds < STATS_LOG_INTERVAL_S:
            return
        counters, gauges = self._stats.data["counters"], self._stats.data["gauges"]
        if any(counters.values()):
            waiting = over_sources(gauges).get("waiting_blocks", 0)
            logger.info("kvstore, last %.0f s: %s", seconds, traffic_text(counters, waiting))
        self._since = now
        self._stats = TransferStats.of({}, gauges)


def traffic_text(counters: Mapping[str, float], waiting_blocks: float) -> str:
    """Return the text of the line. It always has the hits, the traffic, the waiting and dropped blocks, and the failed
    calls. It has the counts of other problems only if there were any."""

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
        "unkept_blocks": "promised blocks that did not come",
        "unpromised_requests": "hand-overs without a promise",
        "checksum_errors": "checksum errors",
        "lookup_timeouts": "lookups timed out",
        "skipped_lookups": "lookups given up",
        "declined_tokens": "tokens computed sooner",
        "refused_requests": "requests with wrong options",
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
