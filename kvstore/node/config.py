"""Server configuration: one typed structure, filled from a TOML file, then the environment, then flags.

The same name everywhere: flag ``--log-level``, variable ``KVSTORE_SERVER_LOG_LEVEL``, key ``log_level``. A name nobody
knows is an error in each of the three; a value of the wrong kind says what was given and what is expected.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvstore._cext import BlockIndex
from kvstore.cluster.url import MAX_NAME, EtcdURL, is_name, parse_cluster_url
from kvstore.disk.config import DISK_WRITES
from kvstore.logs import LEVELS
from kvstore.sizes import format_size, parse_size
from kvstore.store.rules import MAX_TTL_SECONDS, NamespaceRule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX: Final = "KVSTORE_SERVER_"
MIN_SEGMENT_BYTES: Final = 1 << 20
MAX_SHARDS: Final = 256
MIN_DISK_BYTES: Final = 8 << 20
MIN_DISK_SEGMENT_BYTES: Final = 1 << 20
DISK_SEGMENT_BYTES: Final = 256 << 20
WILDCARDS: Final = ("0.0.0.0", "::", "")
MAX_HOST: Final = 255
DISK_SEGMENTS: Final = (16, 1024)  # at least, if they can be of any size; at most, where that takes larger ones


class ConfigError(Exception):
    """The configuration cannot be used. The message names the setting, its value and what is expected."""


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of `kvstore-server`, as given."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 7070
    shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)] = 1
    memory: str = "4GiB"
    segment: str = "32MiB"
    log_level: str = "info"
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    policy: str = "default"
    ttl_seconds: Annotated[int, msgspec.Meta(ge=0, le=MAX_TTL_SECONDS)] = 0
    disk: str | None = None
    disk_size: str = "50GiB"
    disk_write: str = "all"
    warm_start: bool = True
    scrub_mbps: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    cluster: str | None = None
    node_id: str | None = None
    advertise: str | None = None
    zone: str = ""
    drain_seconds: Annotated[int, msgspec.Meta(ge=0, le=86_400)] = 0
    grace_seconds: Annotated[int, msgspec.Meta(ge=0, le=86_400)] = 300
    lease_seconds: Annotated[int, msgspec.Meta(ge=2, le=60)] = 2
    namespaces: list[NamespaceRule] = []  # in the file only

    @property
    def cluster_url(self) -> EtcdURL | None:
        """The cluster that the node registers in. `ConfigError` for a URL that names none."""
        if self.cluster is None:
            return None
        try:
            url = parse_cluster_url(self.cluster)
        except ValueError as error:
            raise ConfigError(f"cluster {error}") from None
        if not isinstance(url, EtcdURL):
            raise ConfigError(
                f"cluster {self.cluster!r}: expected etcd://HOST:PORT[,HOST:PORT...]/NAME; nodes behind a DNS name do "
                "not register: leave --cluster out, only clients are given dns://"
            )
        return url

    @property
    def cluster_node_id(self) -> str:
        """The node's id in a cluster."""
        return self.node_id or socket.gethostname()

    @property
    def advertised_host(self) -> str:
        """Where the other members and the clients of a cluster reach the node."""
        return self.advertise or self.host

    @property
    def memory_bytes(self) -> int:
        """Block memory of the whole node."""
        return parse_size(self.memory)

    @property
    def segment_bytes(self) -> int:
        """What memory is handed to namespaces in."""
        return parse_size(self.segment)

    @property
    def shard_memory_bytes(self) -> int:
        """Block memory of one shard."""
        return self.memory_bytes // self.shards

    @property
    def shard_disk_bytes(self) -> int:
        """What one shard's folder may take on disk."""
        return parse_size(self.disk_size) // self.shards

    @property
    def disk_segment_bytes(self) -> int:
        """The size of a new disk tier's segment files: a power of two, some dozens to some hundreds of them."""
        size = MIN_DISK_SEGMENT_BYTES
        while size * DISK_SEGMENTS[0] <= self.shard_disk_bytes // 2 and (
            size < DISK_SEGMENT_BYTES or self.shard_disk_bytes // size > DISK_SEGMENTS[1]
        ):
            size *= 2
        return size

    def check(self) -> None:
        """Raise `ConfigError` where settings do not fit each other."""
        for name in ("memory", "segment", "disk_size"):
            try:
                parse_size(getattr(self, name))
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from None
        if self.log_level not in LEVELS:
            raise ConfigError(f"log_level {self.log_level!r}: expected one of {', '.join(LEVELS)}")
        if self.policy not in BlockIndex.POLICIES:
            raise ConfigError(f"policy {self.policy!r}: expected one of {', '.join(BlockIndex.POLICIES)}")
        if self.disk_write not in DISK_WRITES:
            raise ConfigError(f"disk_write {self.disk_write!r}: expected one of {', '.join(DISK_WRITES)}")
        if self.disk == "":
            raise ConfigError("disk is empty: expected the path of a folder")
        if self.shard_disk_bytes < MIN_DISK_BYTES:
            raise ConfigError(
                f"disk_size {self.disk_size!r} gives each of {self.shards} shard(s) {self.shard_disk_bytes} bytes: "
                f"expected at least {format_size(MIN_DISK_BYTES)}; raise --disk-size"
            )
        self._check_cluster()
        if not self.segment_bytes >= MIN_SEGMENT_BYTES or self.segment_bytes % 4096:
            raise ConfigError(
                f"segment {self.segment!r}: expected at least {format_size(MIN_SEGMENT_BYTES)}, a multiple of 4 KiB"
            )
        if self.shard_memory_bytes < self.segment_bytes:
            raise ConfigError(
                f"memory {self.memory!r} gives each of {self.shards} shard(s) {self.shard_memory_bytes} bytes: "
                f"expected at least one segment of {self.segment_bytes} bytes; raise --memory, or lower --shards or "
                "--segment"
            )

    def _check_cluster(self) -> None:
        if self.node_id is not None and not is_name(self.node_id):
            raise ConfigError(
                f"node_id {self.node_id!r}: expected 1 to {MAX_NAME} letters, digits, '.', '_' and '-', another for "
                "each node of the cluster"
            )
        if self.zone and not is_name(self.zone):
            raise ConfigError(f"zone {self.zone!r}: expected up to {MAX_NAME} letters, digits, '.', '_' and '-'")
        if self.cluster_url is None:
            for name in ("advertise", "drain_seconds"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name} {getattr(self, name)!r}: only a member of a cluster has one; expected --cluster too"
                    )
            return
        if not is_name(self.cluster_node_id):
            raise ConfigError(
                f"the host name {self.cluster_node_id!r} cannot be the node's id: expected 1 to {MAX_NAME} letters, "
                "digits, '.', '_' and '-'; give --node-id"
            )
        host = self.advertised_host
        if host in WILDCARDS:
            raise ConfigError(
                f"{'advertise' if self.advertise else 'host'} {host!r} is no address that others can connect to: "
                "expected --advertise with one"
            )
        wrong = any(not "!" <= letter <= "~" or letter in "/[]@,?#" for letter in host)
        if wrong or len(host) > MAX_HOST or host.count(":") == 1:
            raise ConfigError(f"advertise {host!r}: expected a host name or address, without a port")


def load(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> ServerConfig:
    """The configuration from all three sources; a flag that is None was not given. Raises `ConfigError`."""
    settings: dict[str, Any] = {}
    if file is not None:
        settings.update(_from_file(file))
    settings.update(_from_environment(environment))
    settings.update({name: value for name, value in flags.items() if value is not None})
    for name, value in settings.items():
        try:
            msgspec.convert({name: value}, ServerConfig)
        except msgspec.ValidationError as error:
            expected = str(error).partition(" - at ")[0]
            raise ConfigError(f"{name}={value!r}: {expected[:1].lower()}{expected[1:]}") from None
    config = msgspec.convert(settings, ServerConfig)
    config.check()
    return config


def _known(names: list[str], unknown: list[str], where: str) -> None:
    if unknown:
        raise ConfigError(f"{where}: unknown {', '.join(map(repr, unknown))}; known are {', '.join(names)}")


def _from_file(file: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {str(file)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(file)!r} is no TOML: {error}") from None
    names = list(ServerConfig.__struct_fields__)
    _known(names, sorted(set(settings) - set(names)), f"configuration file {str(file)!r}")
    return settings


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = [ENVIRONMENT_PREFIX + name.upper() for name in ServerConfig.__struct_fields__ if name != "namespaces"]
    given = {name: value for name, value in environment.items() if name.startswith(ENVIRONMENT_PREFIX)}
    if f"{ENVIRONMENT_PREFIX}NAMESPACES" in given:
        raise ConfigError(
            f"environment: {ENVIRONMENT_PREFIX}NAMESPACES: rules for namespaces are [[namespaces]] tables of the "
            "configuration file (--config); no variable sets them"
        )
    _known(names, sorted(set(given) - set(names)), "environment")
    settings: dict[str, Any] = {}
    for name, value in given.items():
        field = name[len(ENVIRONMENT_PREFIX) :].lower()
        if ServerConfig.__annotations__[field] == "bool":
            if value not in ("true", "false"):
                raise ConfigError(f"environment: {name}={value!r}: expected true or false")
            settings[field] = value == "true"
        elif "int" not in ServerConfig.__annotations__[field]:
            settings[field] = value
        else:
            try:
                settings[field] = int(value)
            except ValueError:
                raise ConfigError(f"environment: {name}={value!r}: expected a whole number") from None
    return settings
