"""What a Prometheus server would scrape from a real node."""

from __future__ import annotations

import re
import urllib.request

from harness import MakeNamespace, StartServer, blocks_of, make_keys, wait_until
from prometheus_client.parser import text_string_to_metric_families

from kvstore_client import KVStoreClient


def scrape(port: int) -> dict[tuple[str, str], float]:
    """(metric, shard) -> value, summed over other labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name, sample.labels.get("shard", "")
            values[name] = values.get(name, 0) + sample.value
    return values


def metrics_port(log: str) -> int:
    found = re.search(r"metrics at http://[^:]+:(\d+)/metrics", log)
    assert found, log
    return int(found[1])


def test_a_scrape_tells_blocks_hits_misses_and_bytes(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--metrics-port", "0")
    port = metrics_port(server.log_text())
    keys = make_keys(10)
    with KVStoreClient(server.endpoint, new_namespace(4096)) as client:
        client.set(keys[:8], blocks_of(keys[:8], 4096))
        assert client.get(keys).hit == 8
        values = scrape(port)
    assert values["kvstore_shard_up", "0"] == 1
    assert values["kvstore_blocks", "0"] == 8
    assert values["kvstore_hit_blocks_total", "0"] == 8
    assert values["kvstore_missed_blocks_total", "0"] == 2
    assert values["kvstore_received_bytes_total", "0"] > 8 * 4096
    assert values["kvstore_memory_limit_bytes", "0"] == 64 << 20


def test_a_dead_shard_is_down_in_the_metrics_until_it_is_back(start_server: StartServer) -> None:
    server = start_server("--shards", "2", "--metrics-port", "0")
    port = metrics_port(server.log_text())
    assert scrape(port)["kvstore_shard_up", "1"] == 1
    server.shards()[1].kill()
    values = wait_until(
        lambda: (found := scrape(port)).get(("kvstore_shard_restarts_total", "")) == 1 and found,
        what="the restart is counted",
    )
    assert values["kvstore_shard_up", "0"] == 1
    wait_until(lambda: scrape(port)["kvstore_shard_up", "1"] == 1, what="shard 1 answers again")
