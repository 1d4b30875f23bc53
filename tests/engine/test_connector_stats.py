"""vLLM's own code collects, logs and exports the connector's metrics."""

from __future__ import annotations

import ast
import logging
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest

import kvstore_client
from kvstore_client.engine import transfer_out

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    pytest.importorskip("vllm")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from kvstore_client.vllm.connector.stats import PromMetrics, TrafficLog, TransferStats
    from kvstore_client.vllm.shared.metrics import COUNTERS, GAUGES, HISTOGRAMS

TRANSFER_CONFIG = KVTransferConfig(
    kv_connector="KVStoreConnector",
    kv_connector_module_path="kvstore_client.vllm.connector",
    kv_role="kv_both",
    kv_connector_extra_config={"endpoint": "tcp://127.0.0.1:7070"},
)


@pytest.fixture
def prometheus() -> Any:
    """Exports the stats of two engines through the default registry, which is filled and cleared in vLLM's way."""
    unregister_vllm_metrics()
    config = SimpleNamespace(kv_transfer_config=TRANSFER_CONFIG, shutdown_timeout=0)
    labels: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    yield KVConnectorProm(config, ["model_name", "engine"], labels)  # type: ignore[arg-type]
    unregister_vllm_metrics()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Collects the messages of our logger, which vLLM separates from the root logger."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.kvstore_client")
    return caplog


def exported(name: str, **labels: str) -> float | None:
    labels = {"model_name": "tiny", "engine": "0", **labels}
    return prometheus_client.REGISTRY.get_sample_value(f"vllm:kvstore_{name}", labels)


def test_counters_add_up_and_gauges_keep_each_sources_latest() -> None:
    rank0 = TransferStats.of({"dropped_blocks": 2, "transfer_out_seconds": 0.5}, {"waiting_blocks/0": 7})
    rank1 = TransferStats.of({"dropped_blocks": 1}, {"waiting_blocks/1": 5})
    later = TransferStats.of({"lookups": 1}, {"waiting_blocks/0": 3})
    total = rank0.aggregate(rank1).aggregate(later)
    assert total.data == {
        "counters": {"dropped_blocks": 3, "transfer_out_seconds": 0.5, "lookups": 1},
        "gauges": {"waiting_blocks/0": 3, "waiting_blocks/1": 5},
        "histograms": {},
    }
    assert total.reduce() == {"dropped_blocks": 3, "transfer_out_seconds": 0.5, "lookups": 1, "waiting_blocks": 8}


def test_stats_survive_both_transports_between_the_engines_processes() -> None:
    stats = TransferStats.of({"lookups": 2}, {"waiting_blocks/0": 1}, {"held_back_seconds": [0.1, 0.0]})
    assert pickle.loads(pickle.dumps(stats)).data == stats.data
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict())) == stats.data


def test_stats_are_empty_until_something_is_counted() -> None:
    assert TransferStats().is_empty()
    assert not TransferStats.of({"lookups": 1}).is_empty()
    assert not TransferStats.of({}, {"waiting_blocks/0": 0}).is_empty(), "a queue that emptied is news"
    assert not TransferStats.of({}, histograms={"held_back_seconds": [0.0]}).is_empty()
    assert TransferStats.of({}, histograms={"held_back_seconds": []}).is_empty()
    stats = TransferStats.of({"lookups": 1})
    stats.reset()
    assert stats.is_empty()


def test_the_engines_log_line_has_the_nonzero_values() -> None:
    collected = KVConnectorLogging(TRANSFER_CONFIG)
    collected.observe(TransferStats.of({"lookups": 2, "defects": 0}, {"waiting_blocks/0": 4}).to_dict())
    held_back = {"held_back_seconds": [0.1, 0.5, 0.0]}
    collected.observe(TransferStats.of({"transfer_in_seconds": 0.12345}, {"waiting_blocks/0": 0}, held_back).to_dict())
    lines: list[str] = []
    collected.log(lambda form, *parts: lines.append(form % parts))
    assert lines == ["KV Transfer metrics: lookups=2, transfer_in_seconds=0.123, longest_held_back_seconds=0.5"]


def test_every_metric_is_exported_from_the_start(prometheus: KVConnectorProm) -> None:
    assert isinstance(prometheus.prom_metrics, PromMetrics)
    for metric, value in COUNTERS.values():
        assert exported(metric.name, **({metric.label: value} if metric.label else {})) == 0, metric
    for metric in GAUGES.values():
        assert exported(metric.name) == 0, metric
    for metric in HISTOGRAMS.values():
        assert exported(f"{metric.name}_count") == 0, metric


def test_values_reach_their_metric_and_engine(prometheus: KVConnectorProm) -> None:
    prometheus.observe(TransferStats.of({"hit_tokens_cpu": 64, "hit_tokens_store": 32}).to_dict(), 0)
    prometheus.observe(TransferStats.of({"hit_tokens_store": 32, "transfer_in_bytes": 1e6}).to_dict(), 0)
    prometheus.observe(TransferStats.of({"hit_tokens_store": 96}).to_dict(), 1)
    assert exported("hit_tokens_total", tier="cpu") == 64
    assert exported("hit_tokens_total", tier="store") == 64
    assert exported("hit_tokens_total", tier="store", engine="1") == 96
    assert exported("transfer_bytes_total", direction="in") == 1e6


def test_each_request_is_in_its_engines_histogram(prometheus: KVConnectorProm) -> None:
    stats = TransferStats.of({}, histograms={"held_back_seconds": [0.0, 0.3]})
    prometheus.observe(stats.aggregate(TransferStats.of({}, histograms={"held_back_seconds": [2.0]})).to_dict(), 1)
    assert exported("held_back_seconds_count") == 0
    assert exported("held_back_seconds_count", engine="1") == 3
    assert exported("held_back_seconds_sum", engine="1") == pytest.approx(2.3)
    assert exported("held_back_seconds_bucket", engine="1", le="0.5") == 2


def test_a_gauge_is_the_sum_of_the_ranks_latest_values(prometheus: KVConnectorProm) -> None:
    prometheus.observe(TransferStats.of({}, {"waiting_blocks/0": 7, "waiting_blocks/1": 5}).to_dict())
    assert exported("waiting_blocks") == 12
    prometheus.observe(TransferStats.of({}, {"waiting_blocks/1": 0}).to_dict())
    assert exported("waiting_blocks") == 7


def test_the_oldest_waiting_block_of_all_ranks_counts(prometheus: KVConnectorProm) -> None:
    ages = TransferStats.of({}, {"oldest_waiting_seconds/0": 0.5, "oldest_waiting_seconds/1": 2.5})
    prometheus.observe(ages.to_dict())
    assert exported("oldest_waiting_seconds") == 2.5
    assert ages.reduce() == {"oldest_waiting_seconds": 2.5}
    prometheus.observe(TransferStats.of({}, {"oldest_waiting_seconds/1": 0.0}).to_dict())
    assert exported("oldest_waiting_seconds") == 0.5


def test_a_recreated_engine_exports_again(prometheus: KVConnectorProm) -> None:
    unregister_vllm_metrics()
    config = SimpleNamespace(kv_transfer_config=TRANSFER_CONFIG, shutdown_timeout=0)
    again = KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"]})  # type: ignore[arg-type]
    again.observe(TransferStats.of({"lookups": 1}).to_dict())
    assert exported("lookups_total") == 1


def test_an_unexported_name_is_logged_once(prometheus: KVConnectorProm, said: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        prometheus.observe(
            TransferStats.of({"novelties": 1, "lookups": 1}, {"heights/0": 1}, {"ages": [1.0]}).to_dict()
        )
    assert [record.args for record in said.records] == [("novelties",), ("ages",), ("heights",)]
    assert exported("lookups_total") == 2


def counted_names() -> set[str]:
    """Return the names of all counters: those in calls of ``counters.add`` in the client's sources, and those in a
    table."""
    names = set(transfer_out._OUTCOME_COUNTERS.values())
    for file in Path(kvstore_client.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add":
                where = ast.unparse(node.func.value)
                if where.endswith("counters") and isinstance(node.args[0], ast.Constant):
                    names.add(node.args[0].value)
    return names


def test_everything_the_connector_counts_is_exported() -> None:
    names = counted_names()
    assert {"lookups", "failed_calls", "transfer_in_bytes"} <= names, "the search itself works"
    assert names <= COUNTERS.keys()


def test_a_minute_with_traffic_is_one_line(said: pytest.LogCaptureFixture) -> None:
    log = TrafficLog(now=100.0)
    hits = {"hit_tokens_cpu": 8000.0, "hit_tokens_store": 4400.0}
    log.observe(TransferStats.of({**hits, "transfer_in_bytes": 3 << 30, "transfer_in_seconds": 2}).data)
    log.observe(TransferStats.of({"transfer_out_bytes": 1 << 29}, {"waiting_blocks/0": 3, "waiting_blocks/1": 2}).data)
    log.tick(159.0)
    assert not said.messages
    log.tick(160.0)
    assert said.messages == [
        "kvstore, last 60 s: 12 400 tokens hit (cpu 8 000, store 4 400), in 3.0 GiB at 1.5 GiB/s, out 512.0 MiB, "
        "waiting 5 blocks, dropped 0, failed 0"
    ]


def test_troubles_are_named_when_there_are_some(said: pytest.LogCaptureFixture) -> None:
    log = TrafficLog(now=0.0)
    log.observe(TransferStats.of({"dropped_blocks": 1200, "checksum_errors": 1, "lookup_timeouts": 2}).data)
    log.tick(60.0)
    assert said.messages[0].endswith("dropped 1 200, failed 0, 1 checksum errors, 2 lookups timed out")


def test_a_minute_without_traffic_is_no_line_but_keeps_the_queue(said: pytest.LogCaptureFixture) -> None:
    log = TrafficLog(now=0.0)
    log.observe(TransferStats.of({"lookups": 1}, {"waiting_blocks/0": 3}).data)
    log.tick(60.0)
    log.tick(120.0)
    log.observe(TransferStats.of({"lookups": 1}).data)
    log.tick(180.0)
    assert len(said.messages) == 2
    assert "waiting 3 blocks" in said.messages[1]


def test_observing_stats_does_not_change_them(said: pytest.LogCaptureFixture) -> None:
    log = TrafficLog(now=0.0)
    stats = TransferStats.of({"lookups": 1})
    log.observe(stats.data)
    log.observe(stats.data)
    assert stats.data["counters"] == {"lookups": 1}
