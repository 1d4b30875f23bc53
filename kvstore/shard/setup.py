"""The configuration that a node's supervisor passes to each of its shards at the start."""

from __future__ import annotations

import msgspec

from kvstore.disk.config import DiskConfig
from kvstore.store.rules import NamespaceRule
from kvstore.wire import ShardAddress


class ShardConfig(msgspec.Struct, frozen=True):
    """One shard's configuration; the supervisor sends it as JSON. The descriptors are inherited."""

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
    transient_bytes: int = 0  # the most that transient blocks may take
    handed: bool = False  # `listen_fd` is where other processes of the node hand it connections (`kvstore.tls.handing`)
    heard_fd: int = -1  # the pipe on which other shards of the node tell this one something; -1: there are no others
    told_fds: list[int] = msgspec.field(default_factory=list)  # theirs
    zone: str = ""
    unix_fd: int = -1  # the Unix socket on which it listens for clients on this host; -1: there is none
    unix_path: str = ""
    unix_users: list[int] = msgspec.field(default_factory=list)  # ids of the users who may connect there
    transport: str = ""  # how clients on other hosts may read its memory; empty: they may not
    log_format: str = "text"
    auth: str = ""  # the file of principals; empty: everybody may do everything
    audit: str = ""  # where administrative acts are recorded: a file, "stderr", "syslog"; empty: nowhere
    cookie: str = ""  # what members of the cluster show in HELLO; empty: nobody is one
