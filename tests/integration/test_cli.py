"""The `kvstore` command line against a real server: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_client import KVStoreClient
from tests.support.harness import Server, StartServer, blocks_of, environment, make_keys, make_namespace, wait_until

NAMESPACE = '{"model":"cli","dtype":"uint8","block_tokens":16,"block_bytes":4096}'
KEY = "00112233445566778899aabbccddeeff"
OTHER_KEY = "ff" * 16


def kvstore(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(COLUMNS="200"),
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def block_file(tmp_path: Path) -> Path:
    file = tmp_path / "block"
    file.write_bytes(bytes(range(256)) * 16)
    return file


def test_a_server_runs_its_own_code_whatever_the_working_directory_holds(tmp_path: Path) -> None:
    decoy = tmp_path / "kvstore"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise SystemExit('the decoy was imported')")
    script = "import sys; sys.path.remove(''); from kvstore.node.cli import server_main; server_main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "--port", "0", "--memory", "64MiB"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(),
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
    assert line.startswith("kvstore-server ready tcp://127.0.0.1:"), line
    assert process.returncode == 0


def test_a_block_set_from_a_file_comes_back_and_can_be_deleted(
    server: Server, block_file: Path, tmp_path: Path
) -> None:
    common = ("--namespace", NAMESPACE, "--endpoint", server.endpoint)
    assert "created" in kvstore("set", KEY, str(block_file), *common).stdout
    assert "existed" in kvstore("set", KEY, str(block_file), *common).stdout
    assert "replaced" in kvstore("set", KEY, str(block_file), "--force", *common).stdout
    out = tmp_path / "out"
    kvstore("get", KEY, "--output", str(out), *common)
    assert out.read_bytes() == block_file.read_bytes()
    kvstore("flush", "--endpoint", server.endpoint)
    present = json.loads(kvstore("contains", KEY, OTHER_KEY, "--json", *common).stdout)
    assert present == {"present": {KEY: True, OTHER_KEY: False}}
    assert json.loads(kvstore("delete", KEY, OTHER_KEY, "--json", *common).stdout) == {"deleted": 1}
    missed = kvstore("get", KEY, *common, status=1)
    assert KEY in missed.stderr


def test_ping_and_info_tell_shards_and_namespaces(server: Server, block_file: Path) -> None:
    kvstore("set", KEY, str(block_file), "--namespace", NAMESPACE, "--endpoint", server.endpoint)
    answer = json.loads(kvstore("ping", "--json", "--endpoint", server.endpoint).stdout)
    assert answer["ok"] is True and answer["shards"] == 1 and answer["seconds"] > 0
    (shard,) = json.loads(kvstore("info", "--json", "--endpoint", server.endpoint).stdout)["shards"]
    assert any('"model":"cli"' in namespace["namespace"] for namespace in shard["namespaces"])
    table = kvstore("info", "--endpoint", server.endpoint).stdout
    assert "cli" in table and "resident" in table


def test_info_shows_both_tiers(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB", "--policy", "lru")
    keys = make_keys(50)
    with KVStoreClient(server.endpoint, make_namespace(4096, "tiers")) as client:
        client.set(keys, blocks_of(keys, 4096))
        wait_until(lambda: (disk := client.info().shards[0].disk) and disk.blocks == 50, what="all is written")
    (shard,) = json.loads(kvstore("info", "--json", "--endpoint", server.endpoint).stdout)["shards"]
    assert shard["policy"] == "lru" and shard["index_bytes"] > 0
    assert (shard["disk"]["state"], shard["disk"]["written_blocks"]) == ("on", 50)
    table = kvstore("info", "--endpoint", server.endpoint).stdout
    assert "lru" in table and "64.0 MiB" in table and "disk blocks" in table and "50 (200.0 KiB)" in table


def test_info_tells_why_a_disk_tier_is_off(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB")
    with KVStoreClient(server.endpoint, make_namespace(4096, "off")) as client:
        wait_until(lambda: (disk := client.info().shards[0].disk) and disk.state == "on", what="the tier is on")
        (tmp_path / "disk" / "shard-0" / "segments").rmdir()
        keys = make_keys(10)
        client.set(keys, blocks_of(keys, 4096))
        wait_until(lambda: (disk := client.info().shards[0].disk) and disk.state == "off", what="the tier is off")
        assert client.get(keys).hit == 10
    table = kvstore("info", "--endpoint", server.endpoint).stdout
    assert "off: [Errno 2]" in table
    failed = kvstore("verify", "--endpoint", server.endpoint, status=1)
    assert "disk tier is off" in failed.stdout


def test_info_of_a_server_without_a_disk_tier_shows_none(server: Server) -> None:
    (shard,) = json.loads(kvstore("info", "--json", "--endpoint", server.endpoint).stdout)["shards"]
    assert shard["disk"] is None
    assert "dirty" not in kvstore("info", "--endpoint", server.endpoint).stdout


def test_bench_reports_rates_and_latencies_and_leaves_nothing_behind(server: Server) -> None:
    arguments = ("bench", "--endpoint", server.endpoint, "--block-bytes", "65536", "--blocks", "64", "--rounds", "2")
    report = json.loads(kvstore(*arguments, "--json").stdout)
    rows = {row["operation"]: row for row in report["operations"]}
    assert {"set deferred", "set", "get_into", "stream_get", "contains", "match_prefix"} <= set(rows)
    assert rows["get_into"]["gb_s"] > 0 and 0 < rows["contains"]["p50_ms"] <= rows["contains"]["p99_ms"]
    assert "get_into" in kvstore(*arguments).stdout
    (shard,) = json.loads(kvstore("info", "--json", "--endpoint", server.endpoint).stdout)["shards"]
    assert all(ns["blocks"] == 0 for ns in shard["namespaces"] if "kvstore-bench" in ns["namespace"])


def test_bench_on_too_small_a_server_says_what_to_change(server: Server) -> None:
    arguments = ("--block-bytes", "1048576", "--blocks", "600", "--rounds", "1")
    failed = kvstore("bench", "--endpoint", server.endpoint, *arguments, status=1)
    assert "more memory" in failed.stderr and "--blocks" in failed.stderr


def test_a_server_that_is_not_there_is_status_1_and_names_the_address() -> None:
    failed = kvstore("ping", "--endpoint", "tcp://127.0.0.1:1", "--timeout", "1", status=1)
    assert "127.0.0.1:1" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("ping", "--endpoint", "127.0.0.1:7070"), "tcp://HOST:PORT"),
        (("contains", "xyz", "--namespace", NAMESPACE), "xyz"),
        (("contains", KEY, "--namespace", "{}"), "model"),
        (("contains", KEY, "--namespace", '{"modle":"m"}'), "modle"),
        (("get", KEY, "--namespace", NAMESPACE, "--ouput", "f"), "--ouput"),
        (("set", KEY, "no-such-file", "--namespace", NAMESPACE), "no-such-file"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_bad_usage_is_status_2_and_names_what_was_wrong(arguments: tuple[str, ...], named: str) -> None:
    assert named in kvstore(*arguments, status=2).stderr


def test_a_block_of_another_size_than_the_namespaces_is_bad_usage(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "short"
    file.write_bytes(b"x" * 100)
    failed = kvstore("set", KEY, str(file), "--namespace", NAMESPACE, "--endpoint", server.endpoint, status=2)
    assert "100" in failed.stderr and "4096" in failed.stderr
