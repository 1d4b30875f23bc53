"""The disk tier's folder and its key, as the supervisor has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.disk.config import DiskConfig
from kvstore.disk.format import DiskFormatError, Layout, lock_shard, open_layout
from kvstore.node.children import StartError
from kvstore.node.config import ServerConfig

if TYPE_CHECKING:
    from kvstore.disk.encryption import DiskKey


def key_of(config: ServerConfig) -> DiskKey | None:
    """-> the key of the disk tier; None: it is not encrypted. Raises `ValueError` when it cannot be had."""
    if config.disk_key_file is None and config.disk_key_command is None:
        return None
    from kvstore.disk.encryption import read_key  # only where there is a key: it takes megabytes

    return read_key(config.disk_key_file, config.disk_key_command)


class DiskFolder:
    """A folder that is open for this node. `open` makes it."""

    def __init__(self, config: ServerConfig, layout: Layout, key: DiskKey | None) -> None:
        self._config = config
        self._layout = layout
        self._key = key

    @classmethod
    def open(cls, config: ServerConfig) -> DiskFolder | None:
        """-> the folder, made if it is new; None: no disk tier. Raises `StartError`, also when it is in use, or its key
        cannot be had or does not fit."""
        if config.disk is None:
            return None
        try:
            key = key_of(config)
            layout = open_layout(Path(config.disk).absolute(), config.shards, config.disk_segment_bytes, key)
            for shard in range(config.shards):
                os.close(lock_shard(layout.shard_directory(shard)))  # a check only: the shard locks it again
        except (DiskFormatError, ValueError) as error:
            raise StartError(f"disk tier: {error}") from None
        return cls(config, layout, key)

    @property
    def identity(self) -> str:
        """What placement names the shards by."""
        return self._layout.identity

    def shard_config(self, shard: int) -> DiskConfig:
        """-> what one shard is told."""
        config, layout, key = self._config, self._layout, b""
        if layout.encryption is not None and self._key is not None:
            key = self._key.shard_key(layout.encryption, shard)
        return DiskConfig(
            directory=str(layout.shard_directory(shard)),
            limit_bytes=config.shard_disk_bytes,
            segment_bytes=layout.segment_bytes,
            write=config.disk_write,
            scrub_bytes_per_s=config.scrub_mbps * 1_000_000 // config.shards,
            warm_start=config.warm_start,
            key=key,
        )
