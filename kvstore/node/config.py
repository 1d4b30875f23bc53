"""All settings of `kvstore-server` in one struct, from which the flags, the variables, the keys of the file and the
manual are generated.

Over 400 lines because every setting is described in one place.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvstore._policies import POLICIES
from kvstore.cluster.url import ETCD_SCHEME, ETCDS_SCHEME, EtcdURL, parse_etcd_url
from kvstore.disk.config import DISK_WRITES, MAX_SCRUB_MBPS
from kvstore.logs import LEVELS, LOG_FORMATS
from kvstore.node.settings import HostPort, Misfit, Portion, Setting, Size, Sources
from kvstore.store.rules import NamespaceRule
from kvstore.wire import MAX_TTL_S

ENVIRONMENT_PREFIX: Final = "KVSTORE_SERVER_"
CONFIG_VARIABLE: Final = f"{ENVIRONMENT_PREFIX}CONFIG"
MAX_SHARDS: Final = 256
MIN_DISK_SEGMENT_BYTES: Final = 1 << 20
DISK_SEGMENT_BYTES: Final = 256 << 20
# The smallest and the largest number of segments of each shard's new disk tier. There are fewer if segments would
# otherwise be smaller than `MIN_DISK_SEGMENT_BYTES`. A tier that would need more gets segments larger than
# `DISK_SEGMENT_BYTES`.
DISK_SEGMENTS: Final = (16, 1024)
MAX_SECONDS: Final = 86_400
MAX_PORT: Final = 65_535
MAX_SLOWLOG_MS: Final = 600_000

SERVER: Final = "Server"
MEMORY_GROUP: Final = "Memory"
DISK: Final = "Disk"
ACCESS: Final = "Access"
CLUSTER: Final = "Cluster"
LOG: Final = "Log"
NAMESPACES_GROUP: Final = "Namespaces"
OFF: Final = "off"


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of `kvstore-server`; `fitting.misfits` finds settings that do not fit each other."""

    host: Annotated[str, Setting(SERVER, "Address to listen on.", "HOST")] = "127.0.0.1"
    port: Annotated[
        int,
        msgspec.Meta(ge=0, le=MAX_PORT),
        Setting(
            SERVER,
            "First port; shard i listens on port + i. 0 picks free ports. Clients need only the first port.",
            "PORT",
        ),
    ] = 7070
    shards: Annotated[
        int,
        msgspec.Meta(ge=1, le=MAX_SHARDS),
        Setting(SERVER, "Shard processes. One shard uses about one core at full speed."),
    ] = 1
    http: Annotated[
        HostPort | None,
        Setting(
            SERVER,
            "Serve a page, /metrics, /healthz and /readyz over HTTP on this address. Port 0 picks a free port.",
            unset="off",
            more="monitoring.md#http",
        ),
    ] = None

    unix_socket: Annotated[
        str,
        Setting(
            SERVER,
            "Unix socket for clients on this host, which read blocks in shared memory. Shard i appends .i. off: none.",
            "PATH|off",
            unset="in a private folder, named after the port",
            more="performance.md#engines-on-the-servers-host",
        ),
    ] = ""
    unix_users: Annotated[
        str,
        Setting(
            SERVER,
            "Other users that may connect to the Unix socket: names or ids, separated by commas.",
            "USER,...",
            unset="no other user",
        ),
    ] = ""

    tls_cert: Annotated[
        str | None,
        Setting(
            SERVER,
            "Speak only TLS 1.3, also for HTTP. This PEM file has the certificate, and then those up to its CA.",
            "FILE",
            unset="no TLS",
            more="security.md#tls",
        ),
    ] = None
    tls_key: Annotated[str | None, Setting(SERVER, "PEM file of the private key of --tls-cert.", "FILE")] = None
    tls_client_ca: Annotated[
        str | None,
        Setting(
            SERVER,
            "Clients must have a certificate that a CA in this PEM file signed. HTTP does not ask for one.",
            "FILE",
            unset="clients need no certificate",
        ),
    ] = None
    tls_ca: Annotated[
        str | None,
        Setting(
            SERVER,
            "PEM file of the CA that signed the certificates of the cluster's other nodes.",
            "FILE",
            unset="the value of --tls-client-ca, else the CAs that the system trusts",
        ),
    ] = None

    nixl: Annotated[
        bool,
        Setting(
            SERVER,
            "Let clients read blocks with NIXL (RDMA). Only for trusted networks: its ports have no authentication.",
            more="transports.md#nixl",
        ),
    ] = False
    transport: Annotated[
        str,
        Setting(
            SERVER,
            "Let clients read blocks with this transport of an installed package. Only for trusted networks.",
            "NAME",
            unset="none",
            more="transports.md#a-transport-of-ones-own",
        ),
    ] = ""

    memory: Annotated[Size, Setting(MEMORY_GROUP, "Block memory of all shards together, split evenly.")] = Size(4 << 30)
    segment: Annotated[Size, Setting(MEMORY_GROUP, "Unit in which namespaces get memory. No block can be larger.")] = (
        Size(32 << 20)
    )
    transient_memory: Annotated[
        Portion,
        Setting(
            MEMORY_GROUP,
            "The most memory for transient blocks, in whole segments of each shard. 0: no transient blocks.",
            more="operations.md#transient-blocks",
        ),
    ] = Portion("10%")
    policy: Annotated[
        str,
        Setting(
            MEMORY_GROUP,
            "Which blocks are evicted first.",
            choices=POLICIES,
            more="persistence.md#eviction-policies",
        ),
    ] = "default"
    ttl_seconds: Annotated[
        int,
        msgspec.Meta(ge=0, le=MAX_TTL_S),
        Setting(
            MEMORY_GROUP,
            "Blocks expire this long after they were set. 0: never. For times by model, see [[namespaces]].",
            "SECONDS",
            more="persistence.md#what-stays-ttl-priorities-pins",
        ),
    ] = 0

    disk: Annotated[
        str | None, Setting(DISK, "Folder of the disk tier.", "FOLDER", unset="no disk tier", more="persistence.md")
    ] = None
    disk_size: Annotated[Size, Setting(DISK, "The most disk space for all shards together.")] = Size(50 << 30)
    disk_key_file: Annotated[
        str | None,
        Setting(
            DISK,
            "File with the key that encrypts blocks on disk: 64 hexadecimal digits.",
            "FILE",
            unset="not encrypted",
            more="security.md#encryption-at-rest",
        ),
    ] = None
    disk_key_command: Annotated[
        str | None,
        Setting(
            DISK,
            "Command that prints that key, such as that of a key manager. It is run without a shell.",
            "COMMAND",
            unset="not encrypted",
            more="security.md#encryption-at-rest",
        ),
    ] = None
    disk_write: Annotated[
        str,
        Setting(
            DISK,
            "Which blocks are written to disk.",
            choices=DISK_WRITES,
            more="persistence.md#which-blocks-are-written",
        ),
    ] = "all"
    warm_start: Annotated[
        bool, Setting(DISK, "After a start, bring the hottest blocks from disk to memory.", more="persistence.md#start")
    ] = True
    scrub_mbps: Annotated[
        int,
        msgspec.Meta(ge=0, le=MAX_SCRUB_MBPS),
        Setting(
            DISK,
            "Check the blocks on disk in the background, at this speed for the whole server. 0: never.",
            "MB/S",
            more="persistence.md#checking-verify-and-scrub",
        ),
    ] = 0

    auth: Annotated[
        str | None,
        Setting(
            ACCESS,
            "File of principals with hashed tokens, from `kvstore auth add`. It is read again when it changes.",
            "FILE",
            unset="any client may do everything",
            more="security.md#logins",
        ),
    ] = None
    insecure: Annotated[
        bool,
        Setting(
            ACCESS,
            "Listen on an address that others can reach, without logins. Only for trusted networks.",
            more="security.md#logins",
        ),
    ] = False
    audit: Annotated[
        str | None,
        Setting(
            ACCESS,
            "Record administrative acts, failed logins and refusals as JSON lines.",
            "FILE|stderr|syslog",
            unset="off",
            more="security.md#audit-log",
        ),
    ] = None

    cluster: Annotated[
        str | None,
        Setting(
            CLUSTER,
            "Cluster that the node joins: etcd://HOST:PORT[,HOST:PORT...]/NAME, or etcds:// with TLS.",
            "URL",
            unset="no cluster",
            more="cluster.md",
        ),
    ] = None
    node_id: Annotated[
        str | None,
        Setting(
            CLUSTER, "Id of the node: unique in the cluster, and the same after a restart.", "ID", unset="the host name"
        ),
    ] = None
    advertise: Annotated[
        str | None,
        Setting(CLUSTER, "Host at which clients and other nodes reach this node.", "HOST", unset="the value of --host"),
    ] = None
    zone: Annotated[
        str,
        Setting(
            CLUSTER,
            "Zone of the node: nodes that may fail together, such as a rack. Copies of a block go to different zones.",
            "ZONE",
        ),
    ] = ""
    drain_seconds: Annotated[
        int,
        msgspec.Meta(ge=0, le=MAX_SECONDS),
        Setting(
            CLUSTER,
            "At SIGTERM, move the hottest blocks to other nodes, for at most this long.",
            "SECONDS",
            more="cluster.md#what-a-node-goes-through",
        ),
    ] = 0
    grace_seconds: Annotated[
        int,
        msgspec.Meta(ge=0, le=MAX_SECONDS),
        Setting(CLUSTER, "How long a node that joined is filled from the old owners of its keys.", "SECONDS"),
    ] = 300
    lease_seconds: Annotated[
        int,
        msgspec.Meta(ge=2, le=60),
        Setting(CLUSTER, "A node that does not renew its etcd lease for this long counts as dead.", "SECONDS"),
    ] = 2

    log_level: Annotated[str, Setting(LOG, "Log lines of this level and above, on standard error.", choices=LEVELS)] = (
        "info"
    )
    log_format: Annotated[
        str,
        Setting(
            LOG,
            "Log lines as text for people, or as one JSON object each.",
            choices=LOG_FORMATS,
            more="monitoring.md#log",
        ),
    ] = "text"

    slowlog_ms: Annotated[
        int,
        msgspec.Meta(ge=0, le=MAX_SLOWLOG_MS),
        Setting(
            LOG,
            "Each shard keeps its last 128 requests that took at least this long. 0: none.",
            "MS",
            more="operations.md#slow-requests",
        ),
    ] = 100

    namespaces: Annotated[
        list[NamespaceRule],
        Setting(
            NAMESPACES_GROUP,
            "Rules for models, with * ? [seq]. The first match sets ttl_seconds, and the least priority of a "
            "block, 0 to 3.",
            more="persistence.md#what-stays-ttl-priorities-pins",
            file_only=True,
            example='match = "Qwen/*"\nttl_seconds = 3600\npriority = 1',
        ),
    ] = []

    @property
    def cluster_url(self) -> EtcdURL | None:
        """The cluster in which the node registers, or None without a cluster. Raises `Misfit` for an invalid URL."""
        if self.cluster is None:
            return None
        if not self.cluster.startswith((ETCD_SCHEME, ETCDS_SCHEME)):
            raise Misfit(
                "cluster",
                f"expected {ETCD_SCHEME}HOST:PORT[,HOST:PORT...]/NAME, or {ETCDS_SCHEME}. Nodes behind a DNS name do "
                "not register: leave --cluster out; dns:// is for clients only",
            )
        try:
            return parse_etcd_url(self.cluster)
        except ValueError as error:
            raise Misfit("cluster", str(error).removeprefix(f"{self.cluster!r}: ")) from None

    @property
    def reads_with(self) -> tuple[str, str]:
        """The transport by which clients on other hosts may read, or an empty string, and the name of the setting that
        chooses it."""
        return ("nixl", "nixl") if self.nixl else (self.transport, "transport")

    @property
    def cluster_node_id(self) -> str:
        """The node's id in a cluster."""
        return self.node_id or socket.gethostname()

    @property
    def advertised_host(self) -> str:
        """The host at which the cluster's other members and its clients reach the node."""
        return self.advertise or self.host

    @property
    def shard_memory_bytes(self) -> int:
        """Block memory of one shard, in bytes."""
        return self.memory // self.shards

    @property
    def shard_transient_bytes(self) -> int:
        """The most bytes of memory that transient blocks of one shard may take."""
        return self.transient_memory.of(self.memory) // self.shards

    @property
    def shard_disk_bytes(self) -> int:
        """The most bytes that one shard's folder may take on disk."""
        return self.disk_size // self.shards

    @property
    def disk_segment_bytes(self) -> int:
        """The size of a new disk tier's segment files in bytes. It is a power of two, chosen so that there are from
        some dozens to some hundreds of files."""
        size = MIN_DISK_SEGMENT_BYTES
        while size * DISK_SEGMENTS[0] <= self.shard_disk_bytes // 2 and (
            size < DISK_SEGMENT_BYTES or self.shard_disk_bytes // size > DISK_SEGMENTS[1]
        ):
            size *= 2
        return size


def read(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> tuple[ServerConfig, Sources[ServerConfig]]:
    """Return the settings from all sources, and the `Sources`, which know where each setting comes from and all
    problems.

    `file`: the TOML file. If `file` is None, the file that KVSTORE_SERVER_CONFIG names is read. If this variable is not
    set, no file is read.
    `flags`: the values of the flags. None means that a flag was not given.
    """
    sources = Sources(ServerConfig, ENVIRONMENT_PREFIX)
    if file is not None:
        sources.read_file(file)
    elif CONFIG_VARIABLE in environment:
        sources.read_file(Path(environment[CONFIG_VARIABLE]), CONFIG_VARIABLE)
    sources.read_environment(environment, (CONFIG_VARIABLE,))
    sources.read_flags(flags)
    return sources.config(), sources
