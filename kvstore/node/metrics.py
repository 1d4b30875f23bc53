"""Prometheus metrics of a node. Each scrape queries the state of every shard, so the metrics are always current.

A shard that does not answer has `kvstore_shard_up 0` and no other metrics.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import kvstore
from kvstore.node.health import Health
from kvstore.node.processes import process_use
from kvstore.node.status import model_of
from kvstore.shard.timing import DISK_VERBS, VERBS
from kvstore.shard.turns import STAGES
from kvstore.wire import PROTOCOL_VERSION, DiskInfo, ShardInfo
from kvstore.wire.status import REQUEST_BOUNDS_S

if TYPE_CHECKING:
    from kvstore.node.registration_status import RegistrationStatus
    from kvstore.node.tls import TLSUse

_BUILD: Final = {
    "version": kvstore.__version__,
    "protocol": str(PROTOCOL_VERSION),
    "python": platform.python_version(),
}


@dataclass(frozen=True)
class _Family:
    """One metric: its name, its help text, and its type. The dict key names the field that has its value."""

    name: str
    help: str
    counter: bool = False


_SHARD: Final[dict[str, _Family]] = {
    "uptime_s": _Family("kvstore_uptime_seconds", "Seconds since the shard process started."),
    "memory_limit_bytes": _Family("kvstore_memory_limit_bytes", "Block memory the shard may use."),
    "memory_used_bytes": _Family("kvstore_memory_used_bytes", "Segments that belong to a namespace, in bytes."),
    "rss_bytes": _Family("kvstore_resident_bytes", "Resident memory of the shard process."),
    "held_limit_bytes": _Family("kvstore_held_limit_bytes", "The most that the shard holds for its clients."),
    "index_bytes": _Family("kvstore_index_bytes", "Memory of the indexes of both tiers."),
    "connections": _Family("kvstore_connections", "Open client connections."),
    "unauthorized": _Family("kvstore_unauthorized_requests", "Requests that their principal may not make.", True),
    "failed_logins": _Family("kvstore_failed_logins", "Logins with a token that is not valid.", True),
    "streams": _Family("kvstore_streams", "GETs in progress."),
    "sets": _Family("kvstore_set_requests", "SET requests.", True),
    "gets": _Family("kvstore_get_requests", "GET requests.", True),
    "lookups": _Family("kvstore_lookup_requests", "CONTAINS and MATCH_PREFIX requests.", True),
    "hits": _Family("kvstore_shard_hit_blocks", "Blocks asked for by GET and sent, of all namespaces.", True),
    "misses": _Family("kvstore_shard_missed_blocks", "Blocks asked for by GET and not there, of all namespaces.", True),
    "created": _Family("kvstore_shard_created_blocks", "Blocks stored, of all namespaces.", True),
    "evicted": _Family("kvstore_shard_evicted_blocks", "Blocks evicted from memory, of all namespaces.", True),
    "bytes_in": _Family("kvstore_received_bytes", "Bytes received from clients, or copied from their memory.", True),
    "bytes_out": _Family("kvstore_sent_bytes", "Bytes sent to clients, or lent to them.", True),
    "lent_blocks": _Family("kvstore_lent_blocks", "Blocks that clients on this host read in shared memory."),
    "lent_bytes": _Family("kvstore_lent_bytes", "The same in bytes; at most half of the shard's memory."),
    "transient_bytes": _Family("kvstore_transient_bytes", "Segments of transient blocks, in bytes."),
    "transient_limit_bytes": _Family("kvstore_transient_limit_bytes", "The most that these may be."),
    "longest_turn_s": _Family("kvstore_longest_turn_seconds", "The longest turn of the shard's loop since its start."),
    "errors": _Family("kvstore_errors", "Requests refused and connections closed for a fault of the client.", True),
}
_NAMESPACE: Final[dict[str, _Family]] = {
    "blocks": _Family("kvstore_blocks", "Blocks that can be read."),
    "memory_bytes": _Family("kvstore_namespace_memory_bytes", "Segments of the namespace, in bytes."),
    "pinned": _Family("kvstore_pinned_blocks", "Blocks kept from eviction by a pin."),
    "transient_blocks": _Family("kvstore_transient_blocks", "Transient blocks that can be read."),
    "promised": _Family("kvstore_promised_blocks", "Blocks that clients have promised to set."),
    "awaited": _Family("kvstore_awaited_blocks", "Blocks that are not there yet and that clients wait for."),
    "hits": _Family("kvstore_hit_blocks", "Blocks asked for by GET and sent.", True),
    "misses": _Family("kvstore_missed_blocks", "Blocks asked for by GET and not there.", True),
    "created": _Family("kvstore_created_blocks", "Blocks stored.", True),
    "evicted": _Family("kvstore_evicted_blocks", "Blocks evicted from memory to make room.", True),
    "disk_blocks": _Family("kvstore_namespace_disk_blocks", "Blocks on disk."),
    "disk_bytes": _Family("kvstore_namespace_disk_bytes", "Segments on disk of the namespace, in bytes."),
    "disk_evicted": _Family("kvstore_namespace_disk_evicted_blocks", "Blocks evicted from disk to make room.", True),
}
_DISK: Final[dict[str, _Family]] = {
    "limit_bytes": _Family("kvstore_disk_limit_bytes", "What the shard may take on disk."),
    "used_bytes": _Family("kvstore_disk_used_bytes", "What the shard's segment files take on disk."),
    "blocks": _Family("kvstore_disk_blocks", "Blocks on disk."),
    "evicted": _Family("kvstore_disk_evicted_blocks", "Blocks evicted from disk to make room.", True),
    "dirty_blocks": _Family("kvstore_disk_dirty_blocks", "Blocks in memory that wait to be written."),
    "dirty_bytes": _Family("kvstore_disk_dirty_bytes", "Bytes in memory that wait to be written."),
    "behind": _Family("kvstore_disk_behind", "1 while clients that set wait for the disk to catch up."),
    "written_blocks": _Family("kvstore_disk_written_blocks", "Blocks written from memory to disk.", True),
    "written_bytes": _Family("kvstore_disk_written_bytes", "Bytes written from memory to disk.", True),
    "skipped_blocks": _Family("kvstore_disk_skipped_blocks", "Blocks not written: no room on disk.", True),
    "fetched_blocks": _Family("kvstore_disk_fetched_blocks", "Blocks read from disk into memory.", True),
    "fetched_bytes": _Family("kvstore_disk_fetched_bytes", "Bytes read from disk into memory.", True),
    "corrupt_blocks": _Family("kvstore_disk_corrupt_blocks", "Blocks found damaged on disk, and dropped.", True),
    "recovered_blocks": _Family("kvstore_disk_recovered_blocks", "Blocks found on disk at the start."),
    "lost_blocks": _Family("kvstore_disk_lost_blocks", "Blocks not found again at the start: damage, expiry, no file."),
    "recovery_s": _Family("kvstore_disk_recovery_seconds", "Seconds from the start until they could be read."),
    "warming": _Family("kvstore_disk_warming", "1 while the hottest blocks are being brought to memory."),
    "scrub_passes": _Family("kvstore_disk_scrub_passes", "Complete passes of the scrubber.", True),
    "scrubbed_blocks": _Family("kvstore_disk_scrubbed_blocks", "Blocks the scrubber checked.", True),
    "scrubbed_bytes": _Family("kvstore_disk_scrubbed_bytes", "Bytes the scrubber checked.", True),
    "scrub_corrupt_blocks": _Family("kvstore_disk_scrub_corrupt_blocks", "Damaged blocks the scrubber found.", True),
}


class NodeCollector(Collector):
    """Collects the metrics of a node and its shards at each scrape. Any thread; blocks for up to `VERDICT_S`."""

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
            yield from _tls(node.tls())
        yield from _families(_SHARD, ["shard"], [((str(shard.shard),), shard) for shard in shards])
        slow = CounterMetricFamily(
            "kvstore_slow_turns",
            "Turns of the shard's loop that took over 50 ms, by the stage that took most of their time.",
            labels=["shard", "stage"],
        )
        for shard in shards:
            for stage in STAGES:
                slow.add_metric([str(shard.shard), stage], shard.slow_turns.get(stage, 0))
        yield slow
        held = GaugeMetricFamily(
            "kvstore_held_bytes",
            "Memory beside blocks and index that the shard holds for its clients, by what holds it.",
            labels=["shard", "holder"],
        )
        for shard in shards:
            for holder, size in shard.held_bytes.items():
                held.add_metric([str(shard.shard), holder], size)
        yield held
        refused = CounterMetricFamily(
            "kvstore_refused_requests", "Requests refused, by the limit that was reached.", labels=["shard", "limit"]
        )
        for shard in shards:
            for limit, requests in shard.refused.items():
                refused.add_metric([str(shard.shard), limit], requests)
        yield refused
        yield _request_times(shards)
        yield from _tenants(shards)
        yield from _processes(shards)
        disks = [(str(shard.shard), shard.disk) for shard in shards if shard.disk is not None]
        yield _in_state("kvstore_disk_up", "1 while the disk tier is on, 0 while it recovers or is off.", "on", disks)
        yield _in_state(
            "kvstore_disk_recovering", "1 until it is known what an earlier run left on disk.", "recovering", disks
        )
        yield from _families(_DISK, ["shard"], [((shard,), disk) for shard, disk in disks])
        of_namespaces = [
            ((str(shard.shard), namespace.id, model_of(namespace)), namespace)
            for shard in shards
            for namespace in shard.namespaces
        ]
        yield from _families(_NAMESPACE, ["shard", "namespace", "model"], of_namespaces)


def _request_times(shards: Sequence[ShardInfo]) -> Metric:
    metric = HistogramMetricFamily(
        "kvstore_request_seconds",
        "Seconds from a request's arrival to its reply, by verb; tier disk: those that waited for the disk.",
        labels=["shard", "verb", "tier"],
    )
    bounds = [*(str(bound) for bound in REQUEST_BOUNDS_S), "+Inf"]
    for shard in shards:
        tiers = [("memory", verb) for verb in VERBS] + [("disk", verb) for verb in DISK_VERBS if shard.disk]
        counted = {(row.tier, row.verb): row for row in shard.requests}
        for tier, verb in tiers:
            row = counted.get((tier, verb))
            counts = accumulate(row.counts) if row else repeat(0)
            metric.add_metric(
                [str(shard.shard), verb, tier], list(zip(bounds, counts, strict=False)), row.seconds if row else 0.0
            )
    return metric


def _tenants(shards: Sequence[ShardInfo]) -> Iterable[Metric]:
    """What each tenant takes, and what its limits refused; nothing on a server without logins."""
    labels = ["shard", "tenant"]
    gauges = {
        name: GaugeMetricFamily(f"kvstore_tenant_{name}", help_, labels=labels)
        for name, help_ in (
            ("memory_bytes", "Block memory of the tenant's namespaces."),
            ("memory_guaranteed_bytes", "What the shard guarantees it of that."),
            ("disk_bytes", "What its namespaces have on disk."),
            ("connections", "Connections of the tenant."),
        )
    }
    refused = CounterMetricFamily(
        "kvstore_tenant_refused",
        "Requests, connections and pins that a limit of the tenant refused.",
        labels=[*labels, "limit"],
    )
    for shard in shards:
        for tenant in shard.tenants:
            for name, gauge in gauges.items():
                gauge.add_metric([str(shard.shard), tenant.tenant], getattr(tenant, name))
            for limit, count in tenant.refused.items():
                refused.add_metric([str(shard.shard), tenant.tenant, limit], count)
    yield from (*gauges.values(), refused)


def _processes(shards: Sequence[ShardInfo]) -> Iterable[Metric]:
    """What the shards' processes take; `process_…` are those of this process, the supervisor."""
    used = CounterMetricFamily("kvstore_cpu_seconds", "Processor time of the shard's process.", labels=["shard"])
    open_fds = GaugeMetricFamily("kvstore_open_fds", "Open descriptors of the shard's process.", labels=["shard"])
    max_fds = GaugeMetricFamily("kvstore_max_fds", "The most descriptors that it may open.", labels=["shard"])
    for shard in shards:
        use = process_use(shard.pid)
        if use is not None:
            used.add_metric([str(shard.shard)], use.cpu_s)
            open_fds.add_metric([str(shard.shard)], use.open_fds)
            max_fds.add_metric([str(shard.shard)], use.max_fds)
    yield from (used, open_fds, max_fds)


def _tls(processes: Sequence[TLSUse]) -> Iterable[Metric]:
    """The process of each shard that encrypts for it."""
    up = GaugeMetricFamily("kvstore_tls_up", "1 when the shard's TLS process accepts connections.", labels=["shard"])
    connections = GaugeMetricFamily("kvstore_tls_connections", "Open TLS connections.", labels=["shard"])
    done = CounterMetricFamily("kvstore_tls_handshakes", "TLS handshakes that were done.", labels=["shard"])
    failed = CounterMetricFamily(
        "kvstore_tls_failed_handshakes", "Connections that ended before their handshake was done.", labels=["shard"]
    )
    used = CounterMetricFamily("kvstore_tls_cpu_seconds", "Processor time of the TLS process.", labels=["shard"])
    for shard, process in enumerate(processes):
        labels = [str(shard)]
        up.add_metric(labels, process.up)
        connections.add_metric(labels, process.counts.connections if process.up else 0)
        done.add_metric(labels, process.counts.handshakes)
        failed.add_metric(labels, process.counts.failed)
        use = process_use(process.pid) if process.pid else None
        if use is not None:
            used.add_metric(labels, use.cpu_s)
    yield from (up, connections, done, failed, used)


def _cluster_metrics(status: RegistrationStatus) -> Iterable[Metric]:
    for name, help_, value in (
        ("registered", "1 while the node is registered in etcd, as far as it knows.", status.registered),
        ("epoch", "The revision of etcd that the node's member list is of.", status.epoch),
        ("directory_up", "1 while etcd answers the node.", status.directory_up),
    ):
        yield GaugeMetricFamily(f"kvstore_cluster_{name}", help_, value=float(value))
    for name, help_, value in (
        ("directory_errors", "Requests to etcd that failed.", status.directory_errors),
        ("changes", "Changes of the node's member list.", status.changes),
    ):
        yield CounterMetricFamily(f"kvstore_cluster_{name}", help_, value=float(value))
    state = GaugeMetricFamily("kvstore_cluster_state", "1 for the state that the node is in.", labels=["state"])
    members = GaugeMetricFamily("kvstore_cluster_members", "Members in the node's member list.", labels=["state"])
    for each in ("joining", "serving", "draining", "out"):
        state.add_metric([each], status.state == each)
        if each != "out":
            members.add_metric([each], sum(member.state == each for member in status.nodes))
    yield state
    yield members
    drained = GaugeMetricFamily(
        "kvstore_drain_blocks", "Blocks that a drain copies to other nodes, by what became of them.", labels=["what"]
    )
    if status.drain is not None:
        drain = status.drain
        drained.add_metric(["to_move"], drain.total - drain.done)
        for what in ("moved", "present", "failed"):
            drained.add_metric([what], getattr(drain, what))
    yield drained
    filled = GaugeMetricFamily(
        "kvstore_fill_blocks", "Blocks that are copied to nodes that joined, by what became of them.", labels=["what"]
    )
    if status.fill is not None:
        fill = status.fill
        for what, blocks in (
            ("to_copy", fill.total - fill.done),
            ("copied", fill.moved),
            ("present", fill.present),
            ("failed", fill.failed),
        ):
            filled.add_metric([what], blocks)
    yield filled


def _in_state(name: str, help_: str, state: str, disks: Sequence[tuple[str, DiskInfo]]) -> Metric:
    metric = GaugeMetricFamily(name, help_, labels=["shard"])
    for shard, disk in disks:
        metric.add_metric([shard], disk.state == state)
    return metric


def _families(
    families: dict[str, _Family], labels: list[str], rows: Sequence[tuple[tuple[str, ...], object]]
) -> Iterable[Metric]:
    for field, family in families.items():
        kind = CounterMetricFamily if family.counter else GaugeMetricFamily
        metric = kind(family.name, family.help, labels=labels)
        for values, row in rows:
            metric.add_metric(values, getattr(row, field))
        yield metric
