"""The configuration that a node's supervisor passes to each of its shards at the start."""

from __future__ import annotations

import msgspec

from kvstore.disk.config import DiskConfig
from kvstore.store.rules import NamespaceRule
from kvstore.wire import ShardAddress


class SettingChange(msgspec.Struct, frozen=True):
    """A setting that was changed while the node runs. `instead_of`: the configured value at that time. If both are
    equal, the setting is as configured again. A shard sends it to the supervisor as a line of JSON."""

    name: str
    value: str
    instead_of: str


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
    transient_bytes: int = 0  # the most memory for transient blocks
    handed: bool = False  # `listen_fd` receives connections from other processes of the node (`kvstore.tls.handing`)
    heard_fd: int = -1  # the pipe on which the node's other shards send to this shard; -1: there are no others
    told_fds: list[int] = msgspec.field(default_factory=list)  # the pipes on which the other shards receive
    zone: str = ""
    unix_fd: int = -1  # the Unix socket for clients on this host; -1: none
    unix_path: str = ""
    unix_users: list[int] = msgspec.field(default_factory=list)  # ids of the users that may connect to `unix_fd`
    transport: str = ""  # how clients on other hosts may read the shard's memory; empty: they may not
    log_format: str = "text"
    slowlog_ms: int = 0  # the least time of a request in the slow log; 0: there is no slow log
    auth: str = ""  # the file of principals; empty: every client may do everything
    audit: str = ""  # where administrative acts are recorded (a file, "stderr" or "syslog"); empty: nowhere
    scrub_mbps: int = 0  # the speed of the scrubber for the whole server, in MB/s
    changes_fd: int = -1  # the pipe on which this shard informs the supervisor of changed settings; -1: there is none
    changed: list[SettingChange] = []  # the settings that were changed before this process started
    cookie: str = ""  # the secret that members of the cluster show in HELLO; empty: there are no members
