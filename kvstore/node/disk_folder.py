"""Opens the disk tier's folder and reads its key, for the supervisor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.disk.config import DiskConfig, scrub_bytes_per_s
from kvstore.disk.format import DiskFormatError, Layout, lock_shard, open_layout
from kvstore.node.children import StartError
from kvstore.node.config import ServerConfig

if TYPE_CHECKING:
    from kvstore.disk.encryption import DiskKey


def key_of(config: ServerConfig) -> DiskKey | None:
    """Return the key of the disk tier, or None if the tier is not encrypted. Raises `ValueError` if the key cannot be
    read."""
    if config.disk_key_file is None and config.disk_key_command is None:
        return None
    from kvstore.disk.encryption import read_key  # imported only if there is a key, because it takes megabytes

    return read_key(config.disk_key_file, config.disk_key_command)


class DiskFolder:
    """The disk tier's folder, open for this node. Use `open` to make one."""

    def __init__(self, config: ServerConfig, layout: Layout, key: DiskKey | None) -> None:
        self._config = config
        self._layout = layout
        self._key = key

    @classmethod
    def open(cls, config: ServerConfig) -> DiskFolder | None:
        """Return the folder, or None without a disk tier. Creates the folder if it does not exist. Raises `StartError`,
        for example if the folder is in use, or if its key cannot be read or is wrong."""
        if config.disk is None:
            return None
        try:
            key = key_of(config)
            layout = open_layout(Path(config.disk).absolute(), config.shards, config.disk_segment_bytes, key)
            for shard in range(config.shards):
                os.close(lock_shard(layout.shard_directory(shard)))  # this only checks; the shard locks it again
        except (DiskFormatError, ValueError) as error:
            raise StartError(f"disk tier: {error}") from None
        return cls(config, layout, key)

    @property
    def identity(self) -> str:
        """The name from which the names of the shards in the placement are made."""
        return self._layout.identity

    def shard_config(self, shard: int) -> DiskConfig:
        """Return the disk configuration of one shard."""
        config, layout, key = self._config, self._layout, b""
        if layout.encryption is not None and self._key is not None:
            key = self._key.shard_key(layout.encryption, shard)
        return DiskConfig(
            directory=str(layout.shard_directory(shard)),
            limit_bytes=config.shard_disk_bytes,
            segment_bytes=layout.segment_bytes,
            write=config.disk_write,
            scrub_bytes_per_s=scrub_bytes_per_s(config.scrub_mbps, config.shards),
            warm_start=config.warm_start,
            key=key,
        )
