"""`kvstore verify` on a real disk tier: what it finds, what it leaves unchanged, and its exit status."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.disk.format import read_layout, segment_path
from kvstore_client import KVStoreClient
from tests.support import forked
from tests.support.clock import Clock
from tests.support.harness import (
    Server,
    block_of,
    blocks_of,
    environment,
    make_keys,
    make_namespace,
    put_into,
    shard_info,
    wait_until,
)

BLOCK_BYTES = 4096
COUNT = 200
KEYS = make_keys(COUNT)
NAMESPACE = make_namespace(BLOCK_BYTES, "verify")
DISK = ("--memory", "64MiB", "--segment", "4MiB", "--disk-size", "64MiB")


def verify(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = forked.run("kvstore_cli", "verify", *map(str, arguments), env=environment(COLUMNS="200"))
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def report_of(*arguments: str | Path, status: int = 0) -> dict[str, Any]:
    report = json.loads(verify(*arguments, "--json", status=status).stdout)
    assert isinstance(report, dict) and report["ok"] is (status == 0)
    assert not status or report["error"]["kind"] == "damaged"
    return report


def contents(path: Path) -> dict[str, tuple[str, int]]:
    """Return every file below the folder, with the digest of its bytes and its modification time."""
    return {
        str(file.relative_to(path)): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def stopped_tier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stopped server of two shards. Tests use a copy of it, `tier`."""
    folder = tmp_path_factory.mktemp("stopped")
    server = Server(folder / "log", *DISK, "--shards", "2", "--disk", str(folder / "tier"))
    try:
        put_into(server, NAMESPACE, KEYS)
        assert server.stop() == 0
    finally:
        server.kill()
    return folder / "tier"


@pytest.fixture
def tier(stopped_tier: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped_tier, tmp_path / "tier"))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Server]:
    """A running server with blocks on its disk."""
    server = Server(tmp_path / "log", *DISK, "--disk", str(tmp_path / "live"))
    put_into(server, NAMESPACE, KEYS)
    with KVStoreClient(server.endpoint, NAMESPACE) as client:
        wait_until(lambda: on_disk(client) == COUNT, what="all blocks are written")
    yield server
    server.kill()


def on_disk(client: KVStoreClient) -> int:
    disk = shard_info(client).disk
    assert disk is not None
    return disk.blocks


def place_of(path: Path, block: bytes) -> tuple[Path, int]:
    """Return the segment file below `path` that has a block, and the block's offset in the file."""
    for file in sorted(path.rglob("*.seg")):
        at = file.read_bytes().find(block)
        if at >= 0:
            return file, at
    raise AssertionError("the block is in no segment")


def damage(path: Path, key: bytes) -> None:
    """Change one byte of a block on disk."""
    file, at = place_of(path, block_of(key, BLOCK_BYTES))
    with file.open("r+b") as opened:
        opened.seek(at + 1234)
        byte = opened.read(1)[0]
        opened.seek(at + 1234)
        opened.write(bytes([byte ^ 1]))
        os.fsync(opened.fileno())


# ---- a folder ------------------------------------------------------------------------------------------------------


def test_an_intact_tier_is_checked_without_changes(tier: Path) -> None:
    before = contents(tier)
    report = report_of(tier)
    assert (report["shards"], report["blocks"], report["bytes"]) == (2, COUNT, COUNT * BLOCK_BYTES)
    assert f"{COUNT} blocks" in verify(tier).stdout
    assert contents(tier) == before


@pytest.mark.parametrize("block_bytes", [1000, 1 << 20])  # written through the page cache, and with direct I/O
def test_blocks_of_any_size_are_checked(tmp_path: Path, block_bytes: int) -> None:
    keys = make_keys(20)
    server = Server(tmp_path / "log", *DISK, "--disk", str(tmp_path / "tier"))
    try:
        with KVStoreClient(server.endpoint, make_namespace(block_bytes, "sizes")) as client:
            client.set(keys, blocks_of(keys, block_bytes))
        assert server.stop() == 0
    finally:
        server.kill()
    report = report_of(tmp_path / "tier")
    assert (report["blocks"], report["bytes"]) == (20, 20 * block_bytes)


def test_expired_blocks_are_counted_and_not_checked(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in clock.environment.items():  # the command uses the test's clock, too
        monkeypatch.setenv(name, value)
    server = Server(tmp_path / "log", *DISK, "--disk", str(tmp_path / "tier"), "--ttl-seconds", "600")
    try:
        put_into(server, NAMESPACE, KEYS)
        assert server.stop() == 0
    finally:
        server.kill()
    tier = tmp_path / "tier"
    assert report_of(tier)["expired_blocks"] == 0
    clock.advance(601.5)
    report = report_of(tier)
    assert (report["expired_blocks"], report["blocks"]) == (COUNT, 0)
    assert f"{COUNT} expired" in verify(tier).stdout


def test_a_damaged_block_is_status_4_and_named_without_changes(tier: Path) -> None:
    damage(tier, KEYS[17])
    before = contents(tier)
    report = report_of(tier, status=4)
    assert report["blocks"] == COUNT
    (block,) = report["damaged"]
    assert (block["key"], block["model"], block["namespace"]) == (KEYS[17].hex(), "verify", NAMESPACE.id)
    file = segment_path(read_layout(tier).shard_directory(block["shard"]), block["segment"])
    assert block_of(KEYS[17], BLOCK_BYTES)[:1000] == file.read_bytes()[block["place"] * BLOCK_BYTES :][:1000]
    shown = verify(tier, status=4).stdout
    assert KEYS[17].hex() in shown and "1 damaged" in shown and "nothing was changed" in shown
    assert contents(tier) == before


def test_some_of_many_damaged_blocks_are_shown_and_json_has_all(tier: Path) -> None:
    for key in KEYS[:30]:
        damage(tier, key)
    assert {block["key"] for block in report_of(tier, status=4)["damaged"]} == {key.hex() for key in KEYS[:30]}
    shown = verify(tier, status=4).stdout
    assert sum(key.hex() in shown for key in KEYS) == 20
    assert "10 more" in shown and "--json" in shown


@pytest.mark.parametrize("how", ["gone", "short"])
def test_blocks_of_an_unusable_segment_are_counted(tier: Path, how: str) -> None:
    file, _ = place_of(tier, block_of(KEYS[0], BLOCK_BYTES))
    if how == "gone":
        file.unlink()
    else:
        os.truncate(file, 8192)
    report = report_of(tier, status=4)
    (missing,) = report["missing_segments"]
    assert missing["segment"] == int(file.stem) and report["blocks"] + missing["blocks"] == COUNT
    assert missing["blocks"] > 0 and missing["reason"]
    assert f"segment {missing['segment']}" in verify(tier, status=4).stdout


def test_an_entry_whose_guard_fails_is_counted(tier: Path) -> None:
    for index in tier.glob("shard-*/index/data.mdb"):
        data = index.read_bytes()
        key = next(key for key in KEYS if key in data)
        # The entry's value does not belong to the changed key. Pages of earlier commits also contain the key.
        index.write_bytes(data.replace(key, bytes([key[0] ^ 1]) + key[1:]))
    assert report_of(tier, status=4)["bad_entries"] == 2
    assert "entries of the index are damaged" in verify(tier, status=4).stdout


def test_an_unreadable_index_is_reported(tier: Path) -> None:
    index = tier / "shard-0" / "index" / "data.mdb"
    index.write_bytes(os.urandom(index.stat().st_size))
    report = report_of(tier, status=4)
    assert 0 < report["blocks"] < COUNT  # the other shard's blocks
    (sentence,) = report["index_damage"]
    assert "shard 0" in sentence


def test_a_missing_shard_folder_is_reported(tier: Path) -> None:
    shutil.rmtree(tier / "shard-1")
    (sentence,) = report_of(tier, status=4)["index_damage"]
    assert "shard-1" in sentence and "missing" in sentence


def test_a_folder_in_use_is_refused_with_the_right_command(live: Server, tmp_path: Path) -> None:
    failed = verify(tmp_path / "live", status=2)
    assert "in use" in failed.stderr and "--endpoint" in failed.stderr
    with KVStoreClient(live.endpoint, NAMESPACE) as client:
        assert client.contains(KEYS).all()


def test_a_folder_without_a_disk_tier_is_bad_usage(tier: Path, tmp_path: Path) -> None:
    assert "no such folder" in verify(tmp_path / "none", status=2).stderr
    (tmp_path / "empty").mkdir()
    assert "is empty" in verify(tmp_path / "empty", status=2).stderr
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    assert "not a disk tier" in verify(tmp_path / "foreign", status=2).stderr
    assert "--disk" in verify(tier / "shard-0", status=2).stderr
    file = tmp_path / "file"
    file.write_text("x")
    assert "not a directory" in verify(file, status=2).stderr


def test_a_tier_of_a_newer_version_is_bad_usage(tier: Path) -> None:
    from kvstore.disk import format as disk_format

    for mark in (tier / "FORMAT", *tier.glob("shard-*/FORMAT")):
        fields = json.loads(mark.read_bytes())
        del fields["guard"]
        fields["version"] = 99
        mark.write_bytes(disk_format._dump({**fields, "guard": disk_format._guard(fields)}))
    assert "version 99" in verify(tier, status=2).stderr


@pytest.mark.parametrize("arguments", [(), ("somewhere", "--endpoint", "tcp://127.0.0.1:1")])
def test_either_a_folder_or_an_endpoint_is_required(arguments: tuple[str, ...]) -> None:
    failed = verify(*arguments, status=2)
    assert "PATH" in failed.stderr and "--endpoint" in failed.stderr


# ---- a running server ----------------------------------------------------------------------------------------------


def test_a_running_server_checks_itself(live: Server) -> None:
    (shard,) = report_of("--endpoint", live.endpoint)["shards"]
    assert (shard["blocks"], shard["damaged"], shard["failure"]) == (COUNT, 0, "")
    assert f"{COUNT} blocks" in verify("--endpoint", live.endpoint).stdout
    with KVStoreClient(live.endpoint, NAMESPACE) as client:
        disk = shard_info(client).disk
    assert disk is not None and disk.scrub_passes == 2


def test_a_running_server_drops_damaged_blocks(live: Server, tmp_path: Path) -> None:
    damage(tmp_path / "live", KEYS[3])
    (shard,) = report_of("--endpoint", live.endpoint, status=4)["shards"]
    assert shard["damaged"] == 1
    assert "damaged block(s) dropped" in live.log_text() and KEYS[3].hex() in live.log_text()
    assert ", 0 damaged" in verify("--endpoint", live.endpoint).stdout
    with KVStoreClient(live.endpoint, NAMESPACE) as client:
        assert on_disk(client) == COUNT - 1


def test_a_server_without_a_disk_tier_is_bad_usage(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--memory", "64MiB")
    try:
        assert "--disk" in verify("--endpoint", server.endpoint, status=2).stderr
    finally:
        server.kill()


def test_an_unreachable_server_is_status_1() -> None:
    assert "127.0.0.1:1" in verify("--endpoint", "tcp://127.0.0.1:1", "--timeout", "1", status=1).stderr


def test_a_client_makes_all_shards_scrub(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", *DISK, "--shards", "2", "--disk", str(tmp_path / "tier"))
    try:
        with KVStoreClient(server.endpoint, NAMESPACE) as client:
            wait_until(
                lambda: all(shard.disk and shard.disk.state == "on" for shard in client.info().shards),
                what="both tiers are on",
            )
            passes = client.scrub()
            assert passes == {shard.name: 1 for shard in client.info().shards}
            wait_until(
                lambda: all(shard.disk and shard.disk.scrub_passes >= 1 for shard in client.info().shards),
                what="both passes are complete",
            )
    finally:
        server.kill()
