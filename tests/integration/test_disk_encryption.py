"""An encrypted disk tier: its files contain no byte of a block, and only the right key opens it."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path

import pytest

from kvstore.disk.encryption import read_key
from kvstore.disk.format import DiskFormatError
from kvstore.disk.verify import verify
from kvstore.node.children import StartError
from kvstore.node.config import ServerConfig
from kvstore.node.disk_folder import DiskFolder
from kvstore.node.settings import Size
from kvstore_client import Namespace
from tests.support import forked
from tests.support.disk import (
    KiB,
    MiB,
    disk_flags,
    disk_info,
    fill,
    flip,
    open_client,
    read,
    segment_files,
    snapshot,
    wait_until_durable,
    wait_until_on,
)
from tests.support.forked import environment
from tests.support.harness import MakeNamespace, Server, StartServer, block_of, make_keys

COUNT = 60


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_key(tmp_path / "key", secrets.token_hex(32))


def write_key(file: Path, text: str) -> Path:
    file.write_text(text + "\n")
    file.chmod(0o600)
    return file


def encrypted(folder: Path, key_file: Path) -> list[str]:
    return disk_flags(folder, "64MiB", "--disk-key-file", str(key_file))


def open_folder(folder: Path, file: Path | None = None, command: str | None = None) -> DiskFolder | None:
    """Open the folder as a server does at its start."""
    config = ServerConfig(
        disk=str(folder),
        disk_size=Size(64 * MiB),
        disk_key_file=None if file is None else str(file),
        disk_key_command=command,
    )
    return DiskFolder.open(config)


def crash_with(server: Server, namespace: Namespace, keys: list[bytes]) -> None:
    """Set blocks, wait until they are on disk, and kill the server."""
    with open_client(server, namespace) as client:
        fill(client, keys, namespace.block_bytes)
        wait_until_durable(client)
    server.kill()


def test_files_contain_no_block_bytes_and_blocks_survive_a_restart(
    start_server: StartServer, folder: Path, key_file: Path, new_namespace: MakeNamespace
) -> None:
    server = start_server(*encrypted(folder, key_file))
    sizes = (20, 1000, 64 * KiB, 917_504)  # written through the page cache, and with direct I/O
    namespaces, keys = [new_namespace(size) for size in sizes], make_keys(20)
    for namespace in namespaces:
        with open_client(server, namespace) as client:
            fill(client, keys, namespace.block_bytes)
    assert server.stop() == 0
    contents = [file.read_bytes().rstrip(b"\0") for file in folder.rglob("*") if file.is_file()]
    assert sum(map(len, contents)) > 20 * sum(sizes)
    for size in sizes:
        for key in keys[::7]:
            block = block_of(key, size)
            pieces = {block[:16], block[size // 2 : size // 2 + 16], block[-16:]}
            assert not any(piece in data for piece in pieces if len(piece) == 16 for data in contents)
    server.restart()
    for namespace in namespaces:
        with open_client(server, namespace) as client:
            wait_until_on(client)
            assert all(read(client, keys, namespace.block_bytes))


@pytest.mark.parametrize("block_bytes", [1000, 64 * KiB])
def test_flipped_and_swapped_blocks_are_detected_and_miss(
    start_server: StartServer, folder: Path, key_file: Path, new_namespace: MakeNamespace, block_bytes: int
) -> None:
    """Some blocks are replaced by the ciphertext of another namespace that has the same keys at the same places in its
    file."""
    server, keys = start_server(*encrypted(folder, key_file)), make_keys(COUNT)
    mine, other = new_namespace(block_bytes), new_namespace(block_bytes)
    with open_client(server, other) as client:
        fill(client, keys, block_bytes)
        wait_until_durable(client)
    crash_with(server, mine, keys)
    key = read_key(str(key_file), None)
    report = verify(folder, lambda done, total: None, key)
    assert report.ok and report.blocks == 2 * COUNT and report.bytes == 2 * COUNT * block_bytes
    used = [file for file in segment_files(folder) if any(file.read_bytes()[: 4 * KiB])]
    slot = 1028 if block_bytes == 1000 else 68 * KiB
    one, *others = (file.read_bytes() for file in used)
    with used[0].open("r+b") as file:
        file.write(others[-1][: 20 * slot])  # from the other namespace
        file.write(one[30 * slot : 40 * slot])  # swapped
        file.write(one[20 * slot : 30 * slot])
    for row in range(40, 45):
        flip(used[0], row * slot + (row - 40) * block_bytes // 4, 1)  # the last change is in the tag
    damaged = verify(folder, lambda done, total: None, key).damaged
    assert sorted(block.place for block in damaged) == list(range(45))
    server.restart()
    with open_client(server, mine) as client, open_client(server, other) as neighbour:
        wait_until_on(client)
        assert sum(read(client, keys, block_bytes)) + sum(read(neighbour, keys, block_bytes)) == 2 * COUNT - 45
        assert disk_info(client).corrupt_blocks == 45


def test_only_the_right_key_opens_a_folder_and_others_change_nothing(
    start_server: StartServer, folder: Path, key_file: Path, namespace: Namespace, tmp_path: Path
) -> None:
    """The server gets the key from a command first, and later from a file."""
    server, keys = start_server(*disk_flags(folder, "64MiB", "--disk-key-command", f"cat {key_file}")), make_keys(COUNT)
    crash_with(server, namespace, keys)
    before = snapshot(folder)
    wrong = write_key(tmp_path / "wrong", secrets.token_hex(32))
    with pytest.raises(StartError, match="is encrypted with another key than the one given"):
        open_folder(folder, wrong)
    with pytest.raises(StartError, match="is encrypted: give its key with --disk-key-file"):
        open_folder(folder)
    with pytest.raises(DiskFormatError, match="is encrypted: give its key with --disk-key-file"):
        verify(folder, lambda done, total: None)
    done = forked.run("kvstore", *encrypted(folder, wrong), env=environment())
    assert done.returncode == 1 and "disk tier: " in done.stderr and "with another key" in done.stderr, done.stderr
    assert snapshot(folder) == before
    arguments = ("verify", str(folder), "--disk-key-file", str(key_file), "--json")
    checked = forked.run("kvstore_cli", *arguments, env=environment())
    assert json.loads(checked.stdout)["blocks"] == COUNT, checked.stderr
    server = start_server(*encrypted(folder, key_file))
    with open_client(server, namespace) as client:
        wait_until_on(client)
        assert all(read(client, keys, namespace.block_bytes))


def test_an_unencrypted_folder_stays_so(folder: Path, key_file: Path) -> None:
    open_folder(folder)
    before = snapshot(folder)
    with pytest.raises(StartError, match="holds blocks that are not encrypted, and a key was given"):
        open_folder(folder, key_file)
    assert snapshot(folder) == before


def test_a_missing_key_stops_the_start_and_is_never_printed(folder: Path, key_file: Path, tmp_path: Path) -> None:
    script, junk = tmp_path / "fails", write_key(tmp_path / "junk", "secret-output")
    script.write_text("#!/bin/sh\necho secret-output; echo secret-error >&2; exit 3\n")
    script.chmod(stat.S_IRWXU)
    for file, command, said in (
        (None, str(script), "fails ended with status 3"),
        (None, f"cat {junk}", "what it printed is not a key: expected 64 hexadecimal digits"),
        (junk, None, "is not a key: expected 64 hexadecimal digits"),
        (key_file, f"cat {key_file}", "both --disk-key-file and --disk-key-command"),
    ):
        with pytest.raises(StartError, match=said) as error:
            open_folder(folder, file, command)
        assert "secret-" not in str(error.value)
    key_file.chmod(0o644)
    with pytest.raises(StartError, match="its mode is 0644, so every user"):
        open_folder(folder, key_file)
    assert not os.path.exists(folder)
