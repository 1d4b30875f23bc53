"""The folder of a node's disk tier, at its start."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.disk.format import DiskFormatError, Layout, lock_shard, open_layout
from kvstore.node.children import StartError
from kvstore.node.config import ServerConfig


def open_disk(config: ServerConfig) -> Layout | None:
    """-> the disk tier's folder, made if it is new; None: no disk tier. Raises `StartError`, also when it is in use."""
    if config.disk is None:
        return None
    try:
        layout = open_layout(Path(config.disk).absolute(), config.shards, config.disk_segment_bytes)
        for shard in range(config.shards):
            os.close(lock_shard(layout.shard_directory(shard)))  # a check only: the shard locks it again
    except DiskFormatError as error:
        raise StartError(f"disk tier: {error}") from None
    return layout
