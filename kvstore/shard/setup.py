"""The configuration that a node's supervisor passes to each of its shards at the start."""

from __future__ import annotations

import msgspec

from kvstore.disk.config import DiskConfig
from kvstore.store.rules import NamespaceRule
from kvstore.wire import ShardAddress


class ShardConfig(msgspec.Struct, frozen=True):
    """One shard's configuration; the supervisor sends it as JSON. `listen_fd` and `ready_fd` are inherited."""

    node: str
    shard: int
    listen_fd: int
    ready_fd: int
    memory_bytes: int
    segment_bytes: int
    shards: list[ShardAddress]
    log_level: str
    drain_s: float
    policy: str
    rules: list[NamespaceRule]
    disk: DiskConfig | None
    zone: str = ""
    log_format: str = "text"
    cookie: str = ""  # what members of the cluster show in HELLO; empty: nobody is one
