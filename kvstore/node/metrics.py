"""Prometheus metrics of a node. Each scrape queries the state of every shard, so the metrics are always current.

A shard that does not answer has `kvstore_shard_up 0` and no other metrics. The rows of INFO's fields
(`kvstore.wire.status`) define the metrics of these fields. The other metrics are defined here.
"""

from __future__ import annotations

import collections
import heapq
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import accumulate, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import kvstore
from kvstore.node.health import Health, RegistrationStatus
from kvstore.node.status import model_of
from kvstore.wire import PROTOCOL_VERSION, VERBS, DiskInfo, NamespaceInfo, ShardInfo
from kvstore.wire.status import REQUEST_BOUNDS_S, Counter, Gauge, TenantInfo, fields_of

if TYPE_CHECKING:
    from kvstore.node.tls import TLSUse

_BUILD: Final = {
    "version": kvstore.__version__,
    "protocol": str(PROTOCOL_VERSION),
    "python": platform.python_version(),
}
MOST_NAMESPACES: Final = 200
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_MAX_FDS: Final = re.compile(r"^Max open files\s+(\d+)", re.MULTILINE)


class ProcessUse(msgspec.Struct, frozen=True):
    """The resources that one process uses now. These metrics are for the shards' processes. The metrics `process_…` are
    for the supervisor."""

    cpu_s: Annotated[float, Counter("", "kvstore_cpu_seconds", "Processor time of the shard's process.")]
    open_fds: Annotated[int, Gauge("", "kvstore_open_fds", "Open descriptors of the shard's process.")]
    max_fds: Annotated[int, Gauge("", "kvstore_max_fds", "The limit of open descriptors.")]  # 0 if unlimited


class TLSProcess(msgspec.Struct, frozen=True):
    """The TLS process of a shard."""

    up: Annotated[bool, Gauge("", "kvstore_tls_up", "1 when the shard's TLS process accepts connections.")]
    connections: Annotated[int, Gauge("", "kvstore_tls_connections", "Open TLS connections.")]
    handshakes: Annotated[int, Counter("", "kvstore_tls_handshakes", "TLS handshakes that were done.")]
    failed: Annotated[
        int, Counter("", "kvstore_tls_failed_handshakes", "Connections that ended before their handshake was done.")
    ]
    cpu_s: Annotated[float | None, Counter("", "kvstore_tls_cpu_seconds", "Processor time of the TLS process.")]


def process_use(pid: int) -> ProcessUse | None:
    """Return the resources that a process uses, read from /proc without a request to the process. Return None if the
    process is gone or belongs to another user."""
    folder = Path("/proc") / str(pid)
    try:
        # The second field is the program's name in parentheses, which may contain anything.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        open_fds = len(os.listdir(folder / "fd"))
        limit = _MAX_FDS.search((folder / "limits").read_text())
    except OSError:
        return None
    return ProcessUse((int(fields[11]) + int(fields[12])) / _TICKS_PER_S, open_fds, int(limit[1]) if limit else 0)


class NodeCollector(Collector):
    """Collects the metrics of a node and its shards at each scrape. Thread-safe. Blocks for up to `VERDICT_S`
    seconds."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics, with current values."""
        node = self._health.node
        yield InfoMetricFamily("kvstore_build", "Versions of the server, of its protocol and of Python.", value=_BUILD)
        up = GaugeMetricFamily("kvstore_shard_up", "1 when the shard answers.", labels=["shard"])
        shards: list[ShardInfo] = []
        for number, state in enumerate(self._health.shards()):
            up.add_metric([str(number)], not isinstance(state, str))
            if not isinstance(state, str):
                shards.append(state)
        yield up
        restarts = CounterMetricFamily("kvstore_shard_restarts", "Shards that died and were started again.")
        restarts.add_metric([], node.restarts())
        yield restarts
        if node.cluster is not None:
            yield from _cluster_metrics(node.cluster())
        if node.tls is not None:
            processes = [((str(shard),), _tls_process(process)) for shard, process in enumerate(node.tls())]
            yield from _families(TLSProcess, ["shard"], processes)
        yield from _families(ShardInfo, ["shard"], [((str(shard.shard),), shard) for shard in shards])
        yield _request_times(shards)
        of_tenants = [((str(shard.shard), tenant.tenant), tenant) for shard in shards for tenant in shard.tenants]
        yield from _families(TenantInfo, ["shard", "tenant"], of_tenants)
        uses = [((str(shard.shard),), use) for shard in shards if (use := process_use(shard.pid)) is not None]
        yield from _families(ProcessUse, ["shard"], uses)
        disks = [(str(shard.shard), shard.disk) for shard in shards if shard.disk is not None]
        for state, name, help_ in (
            ("on", "up", "1 while the disk tier is on, 0 while it recovers, is out of space, or is off."),
            ("recovering", "recovering", "1 until it is known what an earlier run left on disk."),
        ):
            in_state = {shard: disk.state == state for shard, disk in disks}
            yield _gauges(f"kvstore_disk_{name}", help_, "shard", in_state)
        yield from _families(DiskInfo, ["shard"], [((shard,), disk) for shard, disk in disks])
        shown, left_out = _largest(shards)
        help_ = f"Namespaces beyond the {MOST_NAMESPACES} with the most memory, which have no metrics of their own."
        yield GaugeMetricFamily("kvstore_namespaces_left_out", help_, value=left_out)
        of_namespaces = [
            ((str(shard.shard), namespace.id, model_of(namespace)), namespace)
            for shard in shards
            for namespace in shard.namespaces
            if namespace.id in shown
        ]
        yield from _families(NamespaceInfo, ["shard", "namespace", "model"], of_namespaces)


def _largest(shards: Sequence[ShardInfo]) -> tuple[Set[str], int]:
    """Return the namespaces that have their own metrics, and the number of the others. Not all namespaces have their
    own metrics, because clients can make any number of them."""
    memory = collections.Counter[str]()
    for shard in shards:
        for namespace in shard.namespaces:
            memory[namespace.id] += namespace.memory_bytes
    largest = heapq.nsmallest(MOST_NAMESPACES, memory, key=lambda id_: (-memory[id_], id_))
    return set(largest), len(memory) - len(largest)


def _request_times(shards: Sequence[ShardInfo]) -> Metric:
    metric = HistogramMetricFamily(
        "kvstore_request_seconds",
        "Seconds from a request's arrival to its reply, by verb; tier disk: those that waited for the disk.",
        labels=["shard", "verb", "tier"],
    )
    bounds = [*(str(bound) for bound in REQUEST_BOUNDS_S), "+Inf"]
    for shard in shards:
        tiers = [("memory", verb.name) for verb in VERBS.values() if verb.timed]
        tiers += [("disk", verb.name) for verb in VERBS.values() if verb.disk and shard.disk]
        counted = {(row.tier, row.verb): row for row in shard.requests}
        for tier, verb in tiers:
            row = counted.get((tier, verb))
            counts = accumulate(row.counts) if row else repeat(0)
            metric.add_metric(
                [str(shard.shard), verb, tier], list(zip(bounds, counts, strict=False)), row.seconds if row else 0.0
            )
    return metric


def _tls_process(process: TLSUse) -> TLSProcess:
    counts, use = process.counts, process_use(process.pid) if process.pid else None
    connections = counts.connections if process.up else 0
    return TLSProcess(process.up, connections, counts.handshakes, counts.failed, use.cpu_s if use is not None else None)


def _cluster_metrics(status: RegistrationStatus) -> Iterable[Metric]:
    for name, help_, value in (
        ("registered", "1 while the node is registered in etcd, as far as it knows.", status.registered),
        ("epoch", "The revision of etcd of the node's member list.", status.epoch),
        ("directory_up", "1 while etcd answers the node.", status.directory_up),
    ):
        yield GaugeMetricFamily(f"kvstore_cluster_{name}", help_, value=float(value))
    for name, help_, value in (
        ("directory_errors", "Requests to etcd that failed.", status.directory_errors),
        ("changes", "Changes of the node's member list.", status.changes),
    ):
        yield CounterMetricFamily(f"kvstore_cluster_{name}", help_, value=float(value))
    states, drain, fill = ("joining", "serving", "draining", "out"), status.drain, status.fill
    yield _gauges(
        *("kvstore_cluster_state", "1 for the state that the node is in.", "state"),
        {each: status.state == each for each in states},
    )
    yield _gauges(
        *("kvstore_cluster_members", "Members in the node's member list.", "state"),
        {each: sum(member.state == each for member in status.nodes) for each in states[:-1]},
    )
    yield _gauges(
        *("kvstore_drain_blocks", "Blocks that a drain copies to other nodes, by outcome.", "what"),
        {"to_move": drain.total - drain.done, "moved": drain.moved, "present": drain.present, "failed": drain.failed}
        if drain is not None
        else {},
    )
    yield _gauges(
        *("kvstore_fill_blocks", "Blocks that are copied to nodes that joined, by outcome.", "what"),
        {"to_copy": fill.total - fill.done, "copied": fill.moved, "present": fill.present, "failed": fill.failed}
        if fill is not None
        else {},
    )


def _gauges(name: str, help_: str, label: str, values: Mapping[str, float]) -> Metric:
    metric = GaugeMetricFamily(name, help_, labels=[label])
    for key, value in values.items():
        metric.add_metric([key], value)
    return metric


def _families(
    struct: type[msgspec.Struct], labels: Sequence[str], rows: Sequence[tuple[tuple[str, ...], msgspec.Struct]]
) -> Iterable[Metric]:
    """Yield a metric for each field that has one. The metric has a value for each row, with the row's labels, except
    where the value is None."""
    for field in fields_of(struct):
        if field.metric:
            kind = CounterMetricFamily if field.counter else GaugeMetricFamily
            metric = kind(field.metric, field.help, labels=[*labels, field.label] if field.label else labels)
            for of, row in rows:
                value = getattr(row, field.name)
                if field.label:
                    for key, number in value.items():
                        metric.add_metric([*of, key], number)
                elif value is not None:
                    metric.add_metric(of, value)
            yield metric
