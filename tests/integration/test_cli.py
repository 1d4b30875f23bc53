"""The `kvstore` command line against real servers: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from kvstore.wire import DiskInfo
from kvstore_cli.main import COMMAND_GROUPS, app
from kvstore_client import KVStoreClient
from tests.support import forked
from tests.support.harness import (
    Server,
    StartServer,
    blocks_of,
    environment,
    make_keys,
    make_namespace,
    namespace_info,
    shard_info,
    wait_until,
)

NAMESPACE = '{"model":"cli","dtype":"uint8","block_tokens":16,"block_bytes":4096}'
KEY = "00112233445566778899aabbccddeeff"
OTHER_KEY = "ff" * 16
NOWHERE = "tcp://127.0.0.1:1"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvstore_cli", *arguments]


def kvstore(
    *arguments: str, status: int = 0, stdin: bytes = b"", **extra_environment: str
) -> subprocess.CompletedProcess[str]:
    variables = environment(**{"COLUMNS": "80", **extra_environment})
    done = forked.run("kvstore_cli", *arguments, stdin=stdin, env=variables)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def answer(*arguments: str, status: int = 0) -> Any:
    """Run a command with --json, and return the document that it prints."""
    done = kvstore(*arguments, "--json", status=status)
    document = json.loads(done.stdout)
    if status:
        assert document["error"]["message"] in done.stderr
    else:
        assert not done.stderr
    return document


@pytest.fixture
def block_file(tmp_path: Path) -> Path:
    file = tmp_path / "block"
    file.write_bytes(bytes(range(256)) * 16)
    return file


@pytest.fixture(scope="module")
def free_port() -> Iterator[int]:
    """A port on which no process listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def test_a_server_runs_its_own_code_from_any_working_directory(tmp_path: Path) -> None:
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


# ---- single blocks ---------------------------------------------------------------------------------------------------


def test_a_block_set_from_a_file_is_read_back_and_deleted(server: Server, block_file: Path, tmp_path: Path) -> None:
    common = ("--namespace", NAMESPACE, "--endpoint", server.endpoint)
    assert kvstore("set", KEY, str(block_file), *common).stdout == "created\n"
    assert kvstore("set", KEY, str(block_file), *common).stdout == "existed already\n"
    assert kvstore("set", KEY, str(block_file), "--force", *common).stdout == "replaced\n"
    out = tmp_path / "out"
    kvstore("get", KEY, "--output", str(out), *common)
    assert out.read_bytes() == block_file.read_bytes()
    assert answer("sync", "--endpoint", server.endpoint) == {"ok": True}
    assert answer("contains", KEY, OTHER_KEY, *common) == {"present": {KEY: True, OTHER_KEY: False}}
    assert answer("delete", KEY, OTHER_KEY, *common) == {"deleted": 1}


def test_a_miss_has_status_3_and_writes_no_file(server: Server, tmp_path: Path) -> None:
    common = ("--namespace", NAMESPACE, "--endpoint", server.endpoint, "--output", str(tmp_path / "out"))
    assert OTHER_KEY in kvstore("get", OTHER_KEY, *common, status=3).stderr
    assert answer("get", OTHER_KEY, *common, status=3)["error"]["kind"] == "not_found"
    assert not (tmp_path / "out").exists()


def test_a_block_is_set_and_read_through_pipes(server: Server) -> None:
    block = os.urandom(4096)
    common = ("--namespace", NAMESPACE, "--endpoint", server.endpoint)
    kvstore("set", "ab" * 16, "-", *common, stdin=block)
    done = subprocess.run(
        command("get", "ab" * 16, *common), capture_output=True, timeout=60, env=environment(), check=True
    )
    assert done.stdout == block


def test_a_block_is_not_written_to_a_terminal_unless_forced(server: Server, block_file: Path) -> None:
    common = ("--namespace", NAMESPACE, "--endpoint", server.endpoint)
    kvstore("set", KEY, str(block_file), *common)
    shown = on_terminal("get", KEY, *common, status=2)
    assert b"--output FILE" in shown and b"--force" in shown and bytes(range(128, 256)) not in shown
    assert bytes(range(128, 256)) in on_terminal("get", KEY, *common, "--force")


def on_terminal(*arguments: str, typed: bytes = b"", status: int = 0) -> bytes:
    """Return the text that a command writes to a terminal, on standard output and standard error together."""
    ours, theirs = pty.openpty()
    with open(theirs, "r+b", buffering=0) as end:
        process = forked.start("kvstore_cli", arguments, stdin=end, stdout=end, stderr=end, env=environment())
    os.write(ours, typed)
    shown = b""
    with open(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                part = terminal.read(4096)
            except OSError:  # the other end is closed
                break
            shown += part
    assert process.wait(60) == status, shown
    return shown


def test_an_unwritable_file_is_named(server: Server, block_file: Path) -> None:
    common = ("--namespace", NAMESPACE, "--endpoint", server.endpoint)
    kvstore("set", KEY, str(block_file), *common)
    failed = kvstore("get", KEY, "--output", "/nosuch/x", *common, status=2)
    assert "/nosuch/x: No such file or directory" in failed.stderr


@pytest.mark.parametrize("size", [100, 4095, 4097, 100_000])
def test_a_file_of_the_wrong_size_is_bad_usage_with_both_sizes(tmp_path: Path, size: int) -> None:
    file = tmp_path / "wrong"
    file.write_bytes(b"x" * size)
    failed = kvstore("set", KEY, str(file), "--namespace", NAMESPACE, "--endpoint", NOWHERE, status=2)
    assert f"{file} has {size} bytes: expected 4096" in failed.stderr
    failed = kvstore("set", KEY, "-", "--namespace", NAMESPACE, status=2, stdin=b"x" * size)
    has = str(size) if size < 4096 else "more than 4096"
    assert f"standard input has {has} bytes: expected 4096" in failed.stderr


def test_the_namespace_may_come_from_a_file_or_the_environment(
    server: Server, block_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ns.json"
    file.write_text(NAMESPACE + "\n")
    kvstore("set", KEY, str(block_file), "--namespace", f"@{file}", "--endpoint", server.endpoint)
    for given in (NAMESPACE, f"@{file}"):
        found = kvstore("contains", KEY, "--endpoint", server.endpoint, KVSTORE_NAMESPACE=given)
        assert found.stdout == f"{KEY}  present\n"
    failed = kvstore("contains", KEY, "--namespace", "@/nosuch/ns.json", status=2)
    assert "@/nosuch/ns.json: No such file" in failed.stderr
    assert "@FILE" in kvstore("contains", KEY, "--namespace", str(file), status=2).stderr


# ---- addresses -------------------------------------------------------------------------------------------------------


def test_the_address_may_come_from_the_environment_and_options_win(server: Server) -> None:
    kvstore("ping", KVSTORE_ENDPOINT=server.endpoint)
    kvstore("ping", "-e", server.endpoint, KVSTORE_ENDPOINT=NOWHERE)
    two = kvstore("info", "--json", KVSTORE_ENDPOINT=f"{server.endpoint},{NOWHERE}", status=1)
    assert "1 of 2 shards did not answer" in two.stderr


@pytest.mark.parametrize("form", ["{0}", "{0}/", "tcp://{0}", "tcp://{0}/"])
def test_an_address_may_be_abbreviated(server: Server, form: str) -> None:
    assert "1 shard(s) answered" in kvstore("ping", "-e", form.format(f"{server.host}:{server.port}")).stdout


def test_an_unreachable_server_is_status_1_and_named(free_port: int) -> None:
    address = f"127.0.0.1:{free_port}"
    common = ("--endpoint", f"tcp://{address}", "--timeout", "1")
    for arguments in (("ping",), ("info",), ("bench",), ("contains", KEY, "--namespace", NAMESPACE)):
        error = answer(*arguments, *common, status=1)["error"]
        assert error["kind"] == "unreachable" and f"{address}: Connection refused" in error["message"], arguments
        failed = kvstore(*arguments, *common, status=1)
        assert failed.stderr.count("Connection refused") == 1 and not failed.stdout.strip(), failed


# ---- info ------------------------------------------------------------------------------------------------------------


def test_ping_and_info_show_shards_and_namespaces(server: Server, block_file: Path) -> None:
    kvstore("set", KEY, str(block_file), "--namespace", NAMESPACE, "--endpoint", server.endpoint)
    found = answer("ping", "--endpoint", server.endpoint)
    assert found["ok"] is True and found["shards"] == 1 and found["seconds"] > 0
    document = answer("info", "--endpoint", server.endpoint)
    (shard,) = document["shards"]
    assert document["silent"] == []
    assert any('"model":"cli"' in namespace["namespace"] for namespace in shard["namespaces"])
    summary = kvstore("info", "--endpoint", server.endpoint).stdout
    assert "cli" in summary and "kvstore info --shards" in summary and "resident" not in summary
    table = kvstore("info", "--shards", "--endpoint", server.endpoint).stdout
    assert "resident" in table and "lent         blocks that clients" in table


@pytest.mark.parametrize("columns", ["80", "200", None])
def test_info_fits_80_columns_and_a_pipe_gets_full_names(
    start_server: StartServer, tmp_path: Path, columns: str | None
) -> None:
    server = start_server("--shards", "2", "--disk", str(tmp_path / "disk"), "--disk-size", "128MiB")
    keys = make_keys(50)
    with KVStoreClient(server.endpoint, make_namespace(4096, "meta-llama/Llama-3.1-8B-Instruct")) as client:
        client.set(keys, blocks_of(keys, 4096))
        client.get(keys)
    extra = {"COLUMNS": columns} if columns else {}
    variables = {name: value for name, value in environment(**extra).items() if columns or name != "COLUMNS"}
    done = forked.run("kvstore_cli", "info", "--endpoint", server.endpoint, env=variables)
    assert done.returncode == 0, done.stderr
    most = int(columns or 80)
    assert max(map(len, done.stdout.splitlines())) <= most and "…" not in done.stdout, done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith(f"{server.host}:{server.port}"))
    assert "2/2" in row and "100.0%" in row and re.search(r"\d+% of \d", row), done.stdout
    assert ("set p99" in done.stdout.split("wider")[0]) is (most >= 200)
    done = forked.run("kvstore_cli", "info", "--shards", "--endpoint", server.endpoint, env=variables)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.partition("Shards")[2]
    legend = shown.index("resident     memory")
    assert max(map(len, shown[:legend].splitlines())) <= 80 and "…" not in shown, shown
    words = ("shard", "policy", "clients", "resident", "lookups", "received", "to be written", "recovered", "hit rate")
    assert all(word in shown for word in words), shown
    assert "meta-llama/Llama-3.1-8B-Instruct" in shown and "100.0%" in shown


def test_info_shows_both_tiers(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB", "--policy", "lru")
    assert "The store holds no blocks yet." in kvstore("info", "--endpoint", server.endpoint).stdout
    keys = make_keys(50)
    with KVStoreClient(server.endpoint, make_namespace(4096, "tiers")) as client:
        client.set(keys, blocks_of(keys, 4096))
        wait_until(lambda: (disk := client.info().shards[0].disk) and disk.blocks == 50, what="all is written")
    (shard,) = answer("info", "--endpoint", server.endpoint)["shards"]
    assert shard["policy"] == "lru" and shard["index_bytes"] > 0
    assert (shard["disk"]["state"], shard["disk"]["written_blocks"]) == ("on", 50)
    table = kvstore("info", "--shards", "--endpoint", server.endpoint).stdout
    assert "lru" in table and "64.0 MiB" in table and "on disk" in table and "50 (200.0 KiB)" in table


def test_info_gives_the_reason_why_a_disk_tier_is_off(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB")
    with KVStoreClient(server.endpoint, make_namespace(4096, "off")) as client:
        wait_until(lambda: (disk := client.info().shards[0].disk) and disk.state == "on", what="the tier is on")
        (tmp_path / "disk" / "shard-0" / "segments").rmdir()
        keys = make_keys(10)
        client.set(keys, blocks_of(keys, 4096))
        wait_until(lambda: (disk := client.info().shards[0].disk) and disk.state == "off", what="the tier is off")
        assert client.get(keys).hit == 10
    assert "its disk tier is off: [Errno 2]" in kvstore("info", "--endpoint", server.endpoint).stdout
    failed = kvstore("verify", "--endpoint", server.endpoint, status=1)
    assert "disk tier is off" in failed.stdout and "not complete" in failed.stderr


def test_info_without_a_disk_tier_shows_none(server: Server) -> None:
    (shard,) = answer("info", "--endpoint", server.endpoint)["shards"]
    assert shard["disk"] is None
    assert "to be written  " not in kvstore("info", "--shards", "--endpoint", server.endpoint).stdout


@pytest.mark.parametrize("order", [1, -1])
def test_info_shows_the_answering_node_and_names_the_other(server: Server, free_port: int, order: int) -> None:
    endpoints = [server.endpoint, f"tcp://127.0.0.1:{free_port}"][::order]
    arguments = ("info", "--endpoint", endpoints[0], "--endpoint", endpoints[1])
    shown = kvstore(*arguments, status=1)
    assert re.search(rf"^127.0.0.1:{free_port} +0/1 ", shown.stdout, re.MULTILINE), shown.stdout
    assert re.search(r"^all +1/2 ", shown.stdout, re.MULTILINE), shown.stdout
    reason = f"127.0.0.1:{free_port}: Connection refused"
    assert shown.stderr == f"error: 1 of 2 shards did not answer: {reason}\n"
    document = answer(*arguments, status=1)
    assert len(document["shards"]) == 1 and document["error"]["kind"] == "unreachable"
    assert document["silent"] == [
        {"node": f"127.0.0.1:{free_port}", "address": f"127.0.0.1:{free_port}", "reason": reason}
    ]
    kvstore("ping", "--endpoint", endpoints[0], "--endpoint", endpoints[1], status=1)


def test_info_shows_at_most_twenty_namespaces_and_counts_the_others(start_server: StartServer) -> None:
    server = start_server(memory="64MiB", segment="1MiB")
    for number in range(23):
        with KVStoreClient(server.endpoint, make_namespace(4096, f"model-{number:02}")) as client:
            keys = make_keys(1)
            client.set(keys, blocks_of(keys, 4096), deferred=False)
    shown = kvstore("info", "--endpoint", server.endpoint).stdout
    assert shown.count("model-") == 20 and "3 more namespaces use less memory" in shown, shown


# ---- bench -----------------------------------------------------------------------------------------------------------


def test_bench_reports_rates_and_latencies_and_removes_its_blocks(server: Server) -> None:
    arguments = ("bench", "--endpoint", server.endpoint, "--block-bytes", "65536", "--blocks", "64", "--rounds", "2")
    report = answer(*arguments)
    rows = {row["operation"]: row for row in report["operations"]}
    assert list(rows) == ["set", "get_into", "stream_get", "contains", "match_prefix"]
    assert rows["get_into"]["gb_s"] > 0 and 0 < rows["contains"]["p50_ms"] <= rows["contains"]["p99_ms"]
    assert report["removed_blocks"] == 64
    shown = kvstore(*arguments).stdout
    assert max(map(len, shown.splitlines())) <= 80 and "get_into" in shown
    assert "removed its 64 blocks" in " ".join(shown.split())
    assert not bench_blocks(server)


def bench_blocks(server: Server) -> int:
    with KVStoreClient(server.endpoint, make_namespace(4096, "operator")) as client:
        return sum(each.blocks for each in shard_info(client).namespaces if "kvstore-bench" in each.namespace)


def disk_of(client: KVStoreClient) -> DiskInfo:
    disk = shard_info(client).disk
    assert disk is not None
    return disk


@pytest.mark.parametrize("disk", [False, True])
def test_bench_refuses_to_evict_a_used_caches_blocks(start_server: StartServer, tmp_path: Path, disk: bool) -> None:
    """Without a disk tier, memory is full. With one, memory has free space, but the disk is full."""
    sizes = ("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB") if disk else ()
    server = start_server(*sizes, memory="128MiB" if disk else "64MiB", segment="4MiB")
    namespace = make_namespace(1 << 20, "in-use")
    keys = make_keys(56)
    with KVStoreClient(server.endpoint, namespace) as client:
        assert client.set(keys, blocks_of(keys, 1 << 20), deferred=False).created == len(keys)
        if disk:
            wait_until(lambda: disk_of(client).blocks and not disk_of(client).dirty_blocks, what="all is written")
            on_disk = disk_of(client).blocks
        arguments = ("bench", "--endpoint", server.endpoint, "--block-bytes", "1048576", "--rounds", "1", "--blocks")
        refused = answer(*arguments, "40", status=2)["error"]
        assert refused["kind"] == "usage" and "--evict" in refused["message"] and "--blocks" in refused["message"]
        assert client.contains(keys).all()
        assert namespace_info(client).evicted == 0
        if disk:
            assert namespace_info(client).disk_evicted == 0 and disk_of(client).blocks == on_disk
            assert "free memory and disk space" in refused["message"]
            (note,) = answer(*arguments, "40", "--evict")["notes"]
            lost = namespace_info(client).disk_evicted
            assert lost and note.endswith(f"evicted 0 blocks of other namespaces from memory and {lost} from disk.")
        else:
            # The number of blocks that the error suggests evicts nothing.
            fitting = refused["message"].split("--blocks ")[1].split(",")[0]
            answer(*arguments, fitting)
            assert client.contains(keys).all() and namespace_info(client).evicted == 0
            # With --evict, an operator can run the benchmark anyway.
            answer(*arguments, "40", "--evict")
            assert namespace_info(client).evicted > 0


def test_bench_takes_as_many_blocks_as_fit_unless_told_otherwise(start_server: StartServer) -> None:
    server = start_server(memory="64MiB", segment="4MiB")
    arguments = ("bench", "--endpoint", server.endpoint, "--block-bytes", "1048576", "--rounds", "1")
    report = answer(*arguments)
    assert 0 < report["blocks"] <= 64 and report["removed_blocks"] == report["blocks"]
    refused = answer(*arguments, "--blocks", "100", status=2)["error"]["message"]
    assert "do not fit" in refused and "others" not in refused


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_removes_its_blocks(server: Server, number: int) -> None:
    arguments = ("--block-bytes", "65536", "--blocks", "64", "--rounds", "100000")
    with forked.running("kvstore_cli", "bench", "--endpoint", server.endpoint, *arguments, env=environment()) as bench:
        wait_until(lambda: bench_blocks(server), what="the benchmark has set blocks")
        bench.send_signal(number)
        done = bench.finish(30)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert bench_blocks(server) == 0


@pytest.mark.parametrize("unix_socket", ["off", "kv.sock"], ids=["tcp", "shared-memory"])
def test_bench_on_too_small_a_server_says_what_to_change(
    start_server: StartServer, tmp_path: Path, unix_socket: str
) -> None:
    server = start_server(
        "--unix-socket", unix_socket if unix_socket == "off" else str(tmp_path / unix_socket), memory="32MiB"
    )
    arguments = ("--block-bytes", "1048576", "--blocks", "40", "--rounds", "1")  # the server has room for 32 blocks
    failed = kvstore("bench", "--endpoint", server.endpoint, *arguments, "--evict", status=1)
    assert "more memory" in failed.stderr and "--blocks" in failed.stderr


# ---- purge -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two shards with a disk tier; `fill` puts blocks of two namespaces on them."""
    folder = tmp_path_factory.mktemp("full")
    sizes = ("--memory", "64MiB", "--segment", "4MiB", "--disk", str(folder / "disk"), "--disk-size", "64MiB")
    server = Server(folder / "log", "--shards", "2", *sizes)
    yield server
    server.kill()


ONE, TWO = make_namespace(4096, "purge-one"), make_namespace(8192, "purge-two")
PURGED_KEYS = make_keys(100)


def fill(server: Server) -> None:
    for namespace in (ONE, TWO):
        with KVStoreClient(server.endpoint, namespace) as client:
            client.set(PURGED_KEYS, blocks_of(PURGED_KEYS, namespace.block_bytes), deferred=False)
            assert client.contains(PURGED_KEYS).all()
            wait_until(partial(all_on_disk, client), what="the blocks are on disk, too")


def all_on_disk(client: KVStoreClient) -> bool:
    found = [some for shard in client.info().shards for some in shard.namespaces if some.id == client.namespace.id]
    return sum(some.disk_blocks for some in found) == len(PURGED_KEYS)


def present(server: Server) -> list[int]:
    found = []
    for namespace in (ONE, TWO):
        with KVStoreClient(server.endpoint, namespace) as client:
            found.append(int(client.contains(PURGED_KEYS).sum()))
    return found


def test_purge_empties_one_namespace_or_all_in_both_tiers(full: Server, tmp_path: Path) -> None:
    fill(full)
    file = tmp_path / "ns.json"
    file.write_bytes(ONE.canonical())
    done = kvstore("purge", "--namespace", f"@{file}", "--yes", "--endpoint", full.endpoint)
    assert done.stdout == "100 blocks of 1 namespace(s) removed\n"
    assert present(full) == [0, 100]
    assert answer("purge", "--all", "--yes", "--endpoint", full.endpoint) == {"namespaces": 1, "blocks": 100}
    assert present(full) == [0, 0]
    namespaces = [some for shard in answer("info", "-e", full.endpoint)["shards"] for some in shard["namespaces"]]
    assert not any(some["blocks"] or some["disk_blocks"] for some in namespaces)
    assert answer("purge", "--all", "--yes", "--endpoint", full.endpoint) == {"namespaces": 0, "blocks": 0}


def test_purge_without_yes_lists_its_targets_and_asks_on_a_terminal(full: Server) -> None:
    fill(full)
    arguments = ("purge", "--all", "--endpoint", full.endpoint)
    error = answer(*arguments, status=2)["error"]
    assert "2 namespace(s) with 200 blocks (1.2 MiB) in memory" in error["message"] and "--yes" in error["message"]
    assert present(full) == [100, 100]
    shown = on_terminal(*arguments, typed=b"n\n", status=1).decode()
    assert "purge-one" in shown and "purge-two" in shown and "nothing was removed" in shown
    assert present(full) == [100, 100]
    assert "200 blocks" in on_terminal(*arguments, typed=b"y\n").decode()
    assert present(full) == [0, 0]


def test_purge_selects_namespaces_by_model_or_id_prefix(full: Server) -> None:
    fill(full)
    at = ("--yes", "--endpoint", full.endpoint)
    assert answer("purge", "--model", "purge-o*", *at) == {"namespaces": 1, "blocks": 100}
    assert present(full) == [0, 100]
    assert answer("purge", "--namespace-id", TWO.id[:9].upper(), *at) == {"namespaces": 1, "blocks": 100}
    fill(full)
    assert answer("purge", "--model", "purge-*", *at) == {"namespaces": 2, "blocks": 200}
    assert present(full) == [0, 0]


@pytest.mark.parametrize(
    "chosen",
    [
        ("--model", "no-such-*"),
        ("--namespace-id", "00000000000000000000000000000000"),
        ("--namespace", make_namespace(4096, "no-such-model").canonical().decode()),
    ],
)
def test_purging_an_unknown_namespace_is_status_3_and_lists_the_known_ones(
    full: Server, chosen: tuple[str, str]
) -> None:
    fill(full)
    error = answer("purge", *chosen, "--yes", "--endpoint", full.endpoint, status=3)["error"]
    assert error["kind"] == "not_found"
    for namespace in (ONE, TWO):
        assert namespace.id[:12] in error["message"] and namespace.model in error["message"]
    assert present(full) == [100, 100]


def test_purge_waits_for_clients_with_copies_and_names_late_ones(full: Server) -> None:
    fill(full)
    with KVStoreClient(full.endpoint, ONE, keeps_copies=True) as engine:
        engine.contains(PURGED_KEYS)  # to connect to both shards
        at = ("--model", "purge-one", "--yes", "--endpoint", full.endpoint)
        report = answer("purge", *at)
        assert report == {"namespaces": 1, "blocks": 100, "clients": {"told": 1, "silent": []}}
        assert engine.generation > 0
        assert "1 of 1 clients with copies of blocks have dropped them" in kvstore("purge", *at).stdout
        listener = engine._pool._listener
        assert listener is not None
        listener.stop()  # as if the client's process had stopped
        wait_until(lambda: all(thread.name != "kvstore-listen" for thread in threading.enumerate()))
        silent = answer("purge", *at, status=1)
        assert len(silent["clients"]["silent"]) == 2, "its connections to both shards"
        assert silent["clients"]["silent"][0] in silent["error"]["message"]


def test_purge_empties_the_answering_shards_and_fails_for_the_others(full: Server, start_server: StartServer) -> None:
    fill(full)
    other = start_server()
    other.stop()
    both = ("--endpoint", full.endpoint, "--endpoint", other.endpoint)
    report = answer("purge", "--all", "--yes", *both, status=1)
    assert report["blocks"] == 200 and report["shards_left"] == [other.endpoint.removeprefix("tcp://")]
    assert "run this again" in report["error"]["message"] and present(full) == [0, 0]
    assert answer("purge", "--all", "--yes", "--endpoint", other.endpoint, status=1)["error"]["kind"] == "unreachable"


# ---- options of a connection ---------------------------------------------------------------------------------------


def test_options_of_a_connection_stand_before_or_after_the_command(server: Server, tmp_path: Path) -> None:
    token = tmp_path / "a.token"
    token.write_text("kv_" + "x" * 40)  # a server without --auth ignores it
    at, log_in = ("--endpoint", server.endpoint), ("--token-file", str(token))
    for arguments in ((*at, *log_in, "ping"), ("ping", *at, *log_in), (*log_in, "ping", *at)):
        assert answer(*arguments)["ok"] is True
    assert answer("--endpoint", NOWHERE, "ping", *at)["ok"] is True  # the nearer one counts
    absent = answer("ping", *at, "--token-file", str(tmp_path / "none"), status=2)["error"]["message"]
    assert "--token-file" in absent and "no such file" in absent


def test_a_refused_connection_to_the_default_address_says_how_to_start_a_server() -> None:
    variables = environment()
    variables.pop("KVSTORE_ENDPOINT", None)
    with socket.socket() as sock:
        if sock.connect_ex(("127.0.0.1", 7070)) == 0:
            pytest.skip("a server listens at the default address")
    done = forked.run("kvstore_cli", "ping", "--timeout", "2", env=variables)
    assert done.returncode == 1 and "Start a server with kvstore-server" in done.stderr


# ---- bad usage, help, completion -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("ping", "--endpoint", "http://127.0.0.1:7070"), "tcp://HOST:PORT"),
        (("contains", "xyz", "--namespace", NAMESPACE), "xyz"),
        (("contains", "001122", "--namespace", NAMESPACE), "'001122' has 3 bytes: expected 8 to 64"),
        (("contains", KEY), "--namespace"),
        (("contains", KEY, "--namespace", "{}"), "model"),
        (("contains", KEY, "--namespace", '{"modle":"m"}'), "modle"),
        (("get", KEY, "--namespace", NAMESPACE, "--ouput", "f"), "--ouput"),
        (("set", KEY, "no-such-file", "--namespace", NAMESPACE), "no-such-file"),
        (("ping", "--timeout", "0"), "--timeout"),
        (("purge",), "--all"),
        (("purge", "--yes", "--all", "--namespace", NAMESPACE), "--all"),
        (("purge", "--yes", "--all", "--model", "*"), "--model GLOB"),
        (("purge", "--yes", "--model", " "), "--model is empty"),
        (("purge", "--yes", "--namespace-id", "0xyz"), "'0xyz': expected 1 to 32 hexadecimal digits"),
        (("plan", "search", "--nodes", "1"), "--profile, --slo-ttft, --slo-tpot, --gpus-per-node"),
        (("load",), "Missing option"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_bad_usage_is_status_2_and_names_the_mistake(arguments: tuple[str, ...], named: str) -> None:
    assert named in kvstore(*arguments, status=2).stderr
    error = answer(*arguments, status=2)["error"]
    assert error["kind"] == "usage" and named in error["message"]


COMMANDS = ("ping", "info", "sync", "purge", "contains", "get", "set", "delete")
COMMANDS += ("bench", "verify", "drain", "load", "size")


def test_help_lists_exit_statuses_and_an_example_for_every_command() -> None:
    shown = kvstore("-h").stdout
    assert shown == kvstore("--help").stdout
    for status in range(5):
        assert f"    {status}  " in shown
    for name in (*COMMANDS, "cluster status", "cluster where"):
        help_text = kvstore(*name.split(), "-h").stdout
        assert "Example:" in help_text and f"    kvstore {name}" in help_text
        assert name.split()[0] in shown


def test_help_lists_every_command_under_a_heading_in_80_columns() -> None:
    shown = kvstore("--help", COLUMNS="80").stdout
    listed = [name for commands in COMMAND_GROUPS.values() for name in commands]
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for heading, commands in COMMAND_GROUPS.items():
        assert f"\n{heading}:\n" in shown
        for name, line in commands.items():
            assert re.search(rf"^  {name} +{re.escape(line)}$", shown, re.MULTILINE), name
    assert max(map(len, shown.splitlines())) <= 80 and "..." not in shown.replace("COMMAND [ARGS]...", "")


def test_shell_completion_knows_commands_and_options() -> None:
    def completed(words: str) -> list[str]:
        complete = {"_KVSTORE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return kvstore(**complete).stdout.split()

    assert completed("kvstore pi") == ["ping"]
    assert "status" in completed("kvstore cluster ")
    assert "--endpoint" in completed("kvstore info --e")
    script = kvstore("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout
    assert "_KVSTORE_COMPLETE=complete_bash" in script


def test_control_characters_in_model_names_do_not_reach_the_terminal(server: Server) -> None:
    model = "x[/y]\x1b[2J[red]\u202e"
    with KVStoreClient(server.endpoint, make_namespace(64, model)) as client:
        client.set(make_keys(1), [bytes(64)])
        done = kvstore("info", "--endpoint", server.endpoint)
        assert "x[/y]\\x1b[2J[red]\\u202e" in "".join(done.stdout.split()) and "\x1b" not in done.stdout
        client.purge()
