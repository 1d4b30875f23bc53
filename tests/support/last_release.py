"""The last release, for tests that run it together with this code: its source, packed in tests/data, and a disk tier
that its server has written.

After a new release, `python -m tests.support.last_release TAG` packs its source and a disk tier.
"""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore_client import KVStoreClient, Namespace
from tests.support.disk import disk_flags, wait_until_written
from tests.support.harness import ROOT, Server, blocks_of, make_keys

DATA: Final = ROOT / "tests" / "data"
SOURCE: Final = DATA / "last-release.tar.xz"
DISK: Final = DATA / "last-release-disk.tar.xz"
NAMESPACE: Final = Namespace(model="last-release", dtype="uint8", block_tokens=16, block_bytes=1024)
KEYS: Final = make_keys(40)  # the keys of the blocks on the disk; `blocks_of` makes their bytes
DISK_FLAGS: Final = ("--memory", "8MiB", "--segment", "1MiB")
DISK_SIZE: Final = "8MiB"
_PACKED: Final = ("kvstore", "kvstore_client", "cext", "setup.py", "pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Release:
    """A folder with the unpacked release, from which its programs can be run."""

    path: Path

    @property
    def environment(self) -> dict[str, str]:
        """Return an environment for a process that imports the release."""
        return {"PYTHONPATH": str(self.path)}

    @property
    def prefix(self) -> list[str]:
        """Return a command that runs another one in the release's folder, because `python -m` searches the working
        directory first."""
        return ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(self.path)]


THIS: Final = Release(ROOT)


def build(folder: Path) -> Release:
    """Unpack the last release and build its extension, which takes a minute."""
    with tarfile.open(SOURCE) as packed:
        packed.extractall(folder, filter="data")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ""},
        check=True,
    )
    return Release(folder)


def _pack(commit: str) -> None:
    archive = subprocess.run(["git", "archive", commit, *_PACKED], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    DATA.mkdir(exist_ok=True)
    SOURCE.write_bytes(lzma.compress(archive.stdout, preset=9 | lzma.PRESET_EXTREME))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        release = build(folder / "release")
        disk = folder / "disk"
        server = Server(
            folder / "log",
            *DISK_FLAGS,
            *disk_flags(disk, DISK_SIZE),
            prefix=release.prefix,
            **release.environment,
        )
        with KVStoreClient(server.endpoint, NAMESPACE) as client:
            client.set(KEYS, blocks_of(KEYS, NAMESPACE.block_bytes), deferred=False)
            wait_until_written(client)
        server.stop()
        with tarfile.open(DISK, "w:xz", preset=9) as packed_disk:
            packed_disk.add(disk, "disk")


if __name__ == "__main__":
    _pack(sys.argv[1])
