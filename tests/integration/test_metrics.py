"""The metrics that a Prometheus server would scrape from a real node."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvstore.node.metrics import MOST_NAMESPACES
from kvstore.shard.account import LIMITS
from kvstore_client import KVStoreClient
from tests.support.harness import (
    ROOT,
    MakeNamespace,
    Server,
    StartServer,
    blocks_of,
    make_keys,
    make_namespace,
    wait_until,
)


def scrape_text(server: Server) -> str:
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def scrape(server: Server) -> dict[tuple[str, str], float]:
    """Return (metric, shard) -> value, summed over the other labels."""
    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(scrape_text(server)):
        for sample in family.samples:
            name = sample.name, sample.labels.get("shard", "")
            values[name] = values.get(name, 0) + sample.value
    return values


def test_a_scrape_has_blocks_hits_misses_and_bytes(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--http", "127.0.0.1:0")
    keys = make_keys(10)
    with KVStoreClient(server.endpoint, new_namespace(4096)) as client:
        client.set(keys[:8], blocks_of(keys[:8], 4096))
        assert client.get(keys).hit == 8
        values = scrape(server)

        def has_computed() -> bool:
            client.get(keys)
            return scrape(server)["kvstore_cpu_seconds_total", "0"] > 0  # in hundredths

        wait_until(has_computed)
    assert values["kvstore_shard_up", "0"] == 1
    assert values["kvstore_build_info", ""] == 1
    assert values["process_resident_memory_bytes", ""] > 1 << 20  # the supervisor's memory
    assert values["process_open_fds", ""] > 3
    assert values["kvstore_blocks", "0"] == 8
    assert values["kvstore_hit_blocks_total", "0"] == 8
    assert values["kvstore_missed_blocks_total", "0"] == 2
    assert values["kvstore_received_bytes_total", "0"] > 8 * 4096
    assert values["kvstore_memory_limit_bytes", "0"] == 64 << 20
    assert 3 < values["kvstore_open_fds", "0"] < values["kvstore_max_fds", "0"]


def test_a_scrape_has_request_times(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--http", "127.0.0.1:0")
    keys = make_keys(8)
    with KVStoreClient(server.endpoint, new_namespace(4096)) as client:
        client.set(keys, blocks_of(keys, 4096), deferred=False)
        for _ in range(3):
            assert client.get(keys).hit == 8
        assert client.match_prefix(keys) == 8
        client.contains(keys)
        client.delete(keys)
    # A scrape may get an answer that was requested before these calls.
    counts = wait_until(
        lambda: (found := request_times(server))["delete", "memory"][0] and found, what="a fresh scrape"
    )
    of_memory = {verb: count for (verb, tier), (count, _) in counts.items() if tier == "memory"}
    assert of_memory == {
        **{"set": 1, "get": 3, "match_prefix": 1, "contains": 1, "delete": 1},
        **{"expire": 0, "promise": 0, "withdraw": 0},
    }
    assert {tier for _, tier in counts} == {"memory"}  # the server has no disk tier
    assert 0 < counts["get", "memory"][1] < 3


def request_times(server: Server) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (verb, tier) -> the number of requests and their total seconds. Checks that the buckets agree with
    them."""
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    found: dict[tuple[str, str], dict[str, float]] = {}
    for sample in families["kvstore_request_seconds"].samples:
        row = found.setdefault((sample.labels["verb"], sample.labels["tier"]), {})
        row[sample.name.rpartition("_")[2] + sample.labels.get("le", "")] = sample.value
    for row in found.values():
        buckets = [value for name, value in row.items() if name.startswith("bucket")]
        assert buckets == sorted(buckets) and row["bucket+Inf"] == row["count"]
    return {each: (row["count"], row["sum"]) for each, row in found.items()}


def test_a_scrape_has_transfers_between_the_tiers(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    disk = ("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB")
    server = start_server("--http", "127.0.0.1:0", *disk, memory="8MiB", segment="1MiB")
    namespace = new_namespace(65536)
    keys = make_keys(256)  # twice as many as fit into memory
    with KVStoreClient(server.endpoint, namespace) as client:
        for at in range(0, len(keys), 16):
            client.set(keys[at : at + 16], blocks_of(keys[at : at + 16], 65536))
        values = wait_until(
            lambda: (found := scrape(server))["kvstore_disk_written_blocks_total", "0"] == 256 and found,
            what="every block is written",
        )
        assert values["kvstore_disk_up", "0"] == 1 and values["kvstore_disk_recovering", "0"] == 0
        assert values["kvstore_disk_written_bytes_total", "0"] == 256 * 65536
        assert values["kvstore_disk_blocks", "0"] == values["kvstore_namespace_disk_blocks", "0"] == 256
        assert values["kvstore_disk_limit_bytes", "0"] == 64 << 20
        assert 256 * 65536 <= values["kvstore_disk_used_bytes", "0"] <= 64 << 20
        assert values["kvstore_namespace_disk_bytes", "0"] == values["kvstore_disk_used_bytes", "0"]
        assert values["kvstore_evicted_blocks_total", "0"] > 0
        assert values["kvstore_disk_dirty_blocks", "0"] == values["kvstore_disk_dirty_bytes", "0"] == 0
        assert values["kvstore_index_bytes", "0"] > 0
        assert client.get(keys[:16]).hit == 16
        times = wait_until(lambda: (found := request_times(server))["get", "disk"][0] and found, what="a fresh scrape")
        values = scrape(server)
    assert times["get", "disk"][0] == 1 and times["get", "memory"][0] == 0
    assert times["set", "memory"][0] >= 16  # a slow call counts as several requests
    assert times["set", "disk"][0] == 0  # written later
    assert values["kvstore_disk_fetched_blocks_total", "0"] >= 16
    assert values["kvstore_disk_fetched_bytes_total", "0"] >= 16 * 65536
    for name in ("corrupt_blocks", "skipped_blocks", "evicted_blocks", "scrub_passes", "scrub_corrupt_blocks"):
        assert values[f"kvstore_disk_{name}_total", "0"] == 0, name


def test_a_scrape_counts_blocks_that_an_earlier_run_left_on_disk(
    start_server: StartServer, new_namespace: MakeNamespace, tmp_path: Path
) -> None:
    disk = ("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB")
    first = start_server(*disk)
    keys = make_keys(100)
    with KVStoreClient(first.endpoint, new_namespace(4096)) as client:
        client.set(keys, blocks_of(keys, 4096))
    assert first.stop() == 0
    server = start_server("--http", "127.0.0.1:0", *disk)
    values = wait_until(
        lambda: (found := scrape(server))["kvstore_disk_up", "0"] == 1 and found, what="the tier is recovered"
    )
    assert values["kvstore_disk_recovered_blocks", "0"] == 100
    assert values["kvstore_disk_recovery_seconds", "0"] > 0


def test_every_disk_tier_metric_is_in_the_manual(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--http", "127.0.0.1:0", "--disk", str(tmp_path / "disk"), "--disk-size", "64MiB")
    manual = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    served = {name for name, _ in scrape(server) if "disk" in name or "index" in name}
    assert len(served) > 20
    assert not {name for name in served if f"`{name}`" not in manual}


def test_every_node_metric_is_in_the_manual(start_server: StartServer, new_namespace: MakeNamespace) -> None:
    server = start_server("--http", "127.0.0.1:0")
    with KVStoreClient(server.endpoint, new_namespace(4096)) as client:
        client.set(make_keys(1), blocks_of(make_keys(1), 4096))
        with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    manual = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    served = {
        family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        for family in families
        if family.name.startswith("kvstore") and "disk" not in family.name and family.name != "kvstore_index_bytes"
    }
    assert len(served) > 40
    assert not {name for name in served if f"`{name}`" not in manual}
    limits = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert not {limit for limit in LIMITS if f"\n| `{limit}` | " not in limits}


def test_invented_namespaces_do_not_make_a_scrape_grow(
    start_server: StartServer,
) -> None:
    """Only the namespaces with the most memory have metrics of their own, and long model names are cut."""
    server = start_server("--http", "127.0.0.1:0", memory="1GiB", segment="1MiB")
    large = make_namespace(1 << 16, "large")
    with KVStoreClient(server.endpoint, large) as client:
        keys = make_keys(32)
        client.set(keys, blocks_of(keys, 1 << 16))
        for number in range(MOST_NAMESPACES + 20):
            model = f"{number:04}{'x' * 5000}"
            with KVStoreClient(server.endpoint, make_namespace(64, model), shared_memory=False) as other:
                other.set(keys[:1], [bytes(64)])
        text = scrape_text(server)
    rows = [line for line in text.splitlines() if line.startswith("kvstore_blocks{")]
    assert len(rows) == MOST_NAMESPACES and any('model="large"' in row for row in rows)
    assert "kvstore_namespaces_left_out 21.0" in text
    assert max(map(len, rows)) < 500


def test_without_a_disk_tier_its_metrics_are_absent(start_server: StartServer) -> None:
    values = scrape(start_server("--http", "127.0.0.1:0"))
    assert not [name for name, _ in values if name.startswith("kvstore_disk")]


def test_a_dead_shard_is_down_in_the_metrics_until_it_returns(start_server: StartServer) -> None:
    server = start_server("--shards", "2", "--http", "127.0.0.1:0")
    assert scrape(server)["kvstore_shard_up", "1"] == 1
    server.shards()[1].kill()
    values = wait_until(
        lambda: (found := scrape(server)).get(("kvstore_shard_restarts_total", "")) == 1 and found,
        what="the restart is counted",
    )
    assert values["kvstore_shard_up", "0"] == 1
    wait_until(lambda: scrape(server)["kvstore_shard_up", "1"] == 1, what="shard 1 answers again")
