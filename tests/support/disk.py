"""Helpers for tests of the disk tier: its flags, its state, its folder, and blocks whose bytes can be checked.

Clients here do not verify checksums (`checksum=False`), so that only the server can detect a wrong byte.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import xxhash

from kvstore import wire
from kvstore.disk.format import SEGMENT_SUFFIX
from kvstore.disk.keeper_process import COMMIT_DELAY_S
from kvstore_client import KVStoreClient, Namespace
from tests.support import forked
from tests.support.harness import Server, block_of, blocks_of, shard_info, wait_until

KiB, MiB = 1 << 10, 1 << 20
BLOCK = 64 * KiB  # the block size of the fixture `namespace`
IO_ERRORS = Path(__file__).parents[1] / "chaos" / "io_errors.c"
BATCH_BYTES = 1 * MiB  # a fraction of the smallest memory that a test gives a server


def disk_flags(folder: Path, size: str = "256MiB", *more: str, write: str = "all") -> list[str]:
    return ["--disk", str(folder), "--disk-size", size, "--disk-write", write, *more]


def open_client(server: Server, namespace: Namespace, timeout_s: float = 20.0) -> KVStoreClient:
    return KVStoreClient(server.endpoint, namespace, timeout_s=timeout_s, checksum=False)


# ---- the tier's state ------------------------------------------------------------------------------------------


def disk_info(client: KVStoreClient) -> wire.DiskInfo:
    """Return the state of the disk tier of a server with one shard."""
    info = shard_info(client).disk
    assert info is not None
    return info


def wait_until_on(client: KVStoreClient, deadline_s: float = 30.0) -> wire.DiskInfo:
    """Wait until the tier has recovered the blocks of earlier runs, and the hottest of them are in memory."""

    def settled() -> wire.DiskInfo | None:
        info = disk_info(client)
        assert info.state != "off", info.reason
        return info if info.state == "on" and not info.warming else None

    found: wire.DiskInfo = wait_until(settled, deadline_s, "the disk tier is on")
    return found


def wait_until_off(client: KVStoreClient, deadline_s: float = 20.0) -> wire.DiskInfo:
    """Wait until the tier is off, because its disk has failed."""

    def off() -> wire.DiskInfo | None:
        info = disk_info(client)
        return info if info.state == "off" else None

    found: wire.DiskInfo = wait_until(off, deadline_s, "the disk tier is off")
    return found


def wait_until_out_of_space(client: KVStoreClient, deadline_s: float = 20.0) -> wire.DiskInfo:
    """Wait until the tier has found its file system full, and no write is in progress any more."""

    def out() -> wire.DiskInfo | None:
        info = disk_info(client)
        assert info.state != "off", info.reason
        return info if info.state == "out of space" and not info.dirty_blocks else None

    found: wire.DiskInfo = wait_until(out, deadline_s, "the disk tier is out of space")
    return found


def wait_until_written(client: KVStoreClient, deadline_s: float = 30.0) -> wire.DiskInfo:
    """Wait until no block is dirty."""

    def clean() -> wire.DiskInfo | None:
        info = disk_info(client)
        assert info.state != "off", info.reason
        return info if not info.dirty_blocks else None

    found: wire.DiskInfo = wait_until(clean, deadline_s, "what is dirty is written")
    return found


def wait_until_durable(client: KVStoreClient) -> None:
    """Wait until all blocks would survive a crash: they are written, and the disk's index is committed."""
    wait_until_written(client)
    time.sleep(2 * COMMIT_DELAY_S)


def keeper_of(shard: psutil.Process) -> psutil.Process:
    """Return the process that keeps a shard's persistent index."""
    (keeper,) = shard.children()
    return keeper


def held_by(shard: psutil.Process) -> tuple[int, int, int]:
    """Return how many descriptors, threads and keepers a shard has. Segment files stay open, so they do not count."""
    segments = sum(file.path.endswith(SEGMENT_SUFFIX) for file in shard.open_files())
    return shard.num_fds() - segments, shard.num_threads(), len(shard.children())


# ---- a device with errors --------------------------------------------------------------------------------------


def compile_io_errors(folder: Path) -> Path:
    """Compile tests/chaos/io_errors.c into a library in `folder`. Skips the test if that is not possible."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: errors of a device cannot be made")
    library = folder / "io_errors.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(IO_ERRORS), "-ldl"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"the C compiler does not compile {IO_ERRORS.name}: {done.stderr[:500]}")
    return library


def io_errors_in(folder: Path, trigger: Path, library: Path) -> dict[str, str]:
    """Return variables for a server's environment. System calls for files below `folder` fail when the file `trigger`
    names them."""
    variables = {"LD_PRELOAD": str(library), "IO_ERRORS_FOLDER": str(folder), "IO_ERRORS_TRIGGER": str(trigger)}
    return {**variables, forked.FORKED: "1"}


# ---- blocks ----------------------------------------------------------------------------------------------------


def fill(client: KVStoreClient, keys: Sequence[bytes], block_bytes: int, version: int = 0, force: bool = False) -> None:
    """Set the blocks of `keys`, at most 1 MiB at a time; fail if the server does not accept all of them."""
    step = max(1, min(wire.MAX_KEYS, BATCH_BYTES // block_bytes))
    for at in range(0, len(keys), step):
        some = keys[at : at + step]
        result = client.set(some, blocks_of(some, block_bytes, version), force=force)
        assert result.error == 0, result


def read(client: KVStoreClient, keys: Sequence[bytes], block_bytes: int, version: int = 0) -> list[bool]:
    """Return which of `keys` exist. Fails if a byte of their blocks is wrong."""
    present = []
    step = max(1, min(wire.MAX_KEYS, BATCH_BYTES // block_bytes))
    for at in range(0, len(keys), step):
        some = keys[at : at + step]
        for key, block in zip(some, client.get(some).blocks, strict=True):
            assert block is None or bytes(block) == block_of(key, block_bytes, version), f"wrong bytes of {key.hex()}"
            present.append(block is not None)
    return present


# ---- the folder ------------------------------------------------------------------------------------------------


def allocated_bytes(folder: Path) -> int:
    """Return the bytes that all files of a folder take on the file system."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:  # the index is being replaced
                continue
    return total


def snapshot(folder: Path) -> dict[str, str]:
    """Return every path below a folder, with a digest of the file's content."""
    return {
        str(path.relative_to(folder)): xxhash.xxh3_64_hexdigest(path.read_bytes()) if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*/segments/*.seg"))


def index_file(folder: Path) -> Path:
    return folder / "shard-0" / "index" / "data.mdb"


def flip(path: Path, offset: int, mask: int) -> None:
    """Change the bits of `mask` in one byte of a file."""
    with path.open("r+b") as opened:
        opened.seek(offset)
        (value,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([value ^ mask]))


def mount_tmpfs(folder: Path, size: str) -> bool:
    """Mount a tmpfs of `size` on `folder`. Returns False if this user may not mount file systems."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)
