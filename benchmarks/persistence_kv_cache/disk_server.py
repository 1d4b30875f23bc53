"""A `kvstore-server` with a disk tier, which a benchmark can start and stop repeatedly, and the state of its disk
tier."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from benchmarks.remote_kv_cache.processes import environment
from benchmarks.remote_kv_cache.transfers import connect
from kvstore.wire.status import TAKES_NO_BLOCKS
from kvstore_client import KVStoreClient

START_S: Final = 120.0
STOP_S: Final = 300.0  # a clean stop writes the blocks that are not on disk yet
SETTLE_S: Final = 600.0
_POLL_S: Final = 0.002


@dataclass(frozen=True)
class DiskState:
    """The sums of the disk tiers of all shards. `reads`: blocks read from disk since the start. `index_bytes`: memory
    of the indexes of both tiers."""

    blocks: int
    dirty_blocks: int
    dirty_bytes: int
    reads: int
    index_bytes: int


def disk_state(client: KVStoreClient) -> DiskState:
    """Return the server's state. Raises `RuntimeError` if a shard has no disk tier that takes blocks."""
    shards = client.info().shards
    disks = [shard.disk for shard in shards if shard.disk is not None]
    if not disks or len(disks) < len(shards) or any(disk.state in TAKES_NO_BLOCKS for disk in disks):
        raise RuntimeError("a shard of the server under measurement has no disk tier that takes blocks: see its log")
    return DiskState(
        blocks=sum(disk.blocks for disk in disks),
        dirty_blocks=sum(disk.dirty_blocks for disk in disks),
        dirty_bytes=sum(disk.dirty_bytes for disk in disks),
        reads=sum(disk.fetched_blocks for disk in disks),
        index_bytes=sum(shard.index_bytes for shard in shards),
    )


def wait_for(what: str, condition: Callable[[], bool], pause_s: float = _POLL_S) -> None:
    """Poll until the condition holds. Raises `TimeoutError` after ten minutes."""
    deadline = time.monotonic() + SETTLE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not finished within {SETTLE_S:g} s")
        time.sleep(pause_s)


def wait_until_clean(client: KVStoreClient) -> None:
    """Wait until all blocks that the server will write are on disk."""
    wait_for("write-behind", lambda: disk_state(client).dirty_blocks == 0)


class Server:
    """A server on a free port. If `disk` is None, it has memory only. `__init__` does not start it. As a
    context manager it leaves no process behind, and shows its log after an error."""

    def __init__(
        self, memory_bytes: int, disk: Path | None = None, disk_bytes: int = 0, arguments: Sequence[str] = ()
    ) -> None:
        self._command = [sys.executable, "-m", "kvstore", "--port", "0", "--memory", f"{memory_bytes}B"]
        if disk is not None:
            self._command += ["--disk", str(disk), "--disk-size", f"{disk_bytes}B", "--disk-write", "all", *arguments]
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.endpoint = ""

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and error is not None:
            self._process.kill()
        self.stop()
        if error is not None:
            print(self.log(), file=sys.stderr)
        self._log.close()

    def start(self) -> float:
        """Start the server. Return the seconds from the start of the process to its ready line. Raises `RuntimeError`
        with its log if it does not start."""
        begin = time.perf_counter()
        process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment()
        )
        self._process = process
        late = threading.Timer(START_S, process.kill)  # ends the wait for the ready line below
        late.start()
        try:
            assert process.stdout is not None
            ready = re.match(r"kvstore-server ready (tcp://\S+)", process.stdout.readline())
        finally:
            late.cancel()
        if ready is None:
            process.wait()
            raise RuntimeError(f"kvstore-server did not start:\n{self.log()}")
        self.endpoint = ready[1]
        return time.perf_counter() - begin

    def stop(self) -> None:
        """Stop the server cleanly; kill it if that takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def log(self) -> str:
        """The end of the server's stderr."""
        self._log.seek(0)
        return self._log.read()[-4000:].decode(errors="replace")

    def connect(self, name: str, block_bytes: int) -> KVStoreClient:
        """A client of the running server. A restart changes the port, so a new client is needed after it."""
        return connect(self.endpoint, name, block_bytes)
