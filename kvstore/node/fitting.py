"""Finds settings that do not fit each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Final

from kvstore.cluster.url import MAX_ID, is_name
from kvstore.node.config import MAX_PORT, ServerConfig
from kvstore.node.settings import MAX_HOST, HostPort, Misfit
from kvstore.plugins import TRANSPORTS
from kvstore.sizes import spell_size

MIN_SEGMENT_BYTES: Final = 1 << 20
MIN_DISK_BYTES: Final = 8 << 20
WILDCARDS: Final = ("0.0.0.0", "::", "")


def misfits(config: ServerConfig) -> Iterator[Misfit]:
    """Yield the settings that do not fit each other, although each is valid by itself."""
    if config.disk == "":
        yield Misfit("disk", "expected the path of a folder")
    if config.shard_disk_bytes < MIN_DISK_BYTES:
        yield Misfit(
            "disk_size",
            f"this gives each of {config.shards} shard(s) {config.shard_disk_bytes} bytes: expected at least "
            f"{spell_size(MIN_DISK_BYTES)} for each shard; raise --disk-size",
        )
    for name in ("disk_key_file", "disk_key_command"):
        if getattr(config, name) is not None and config.disk is None:
            yield Misfit(name, "a key needs a disk tier: expected --disk as well")
    yield from _cluster(config)
    chosen, setting = config.reads_with
    if config.transport not in ("", chosen):
        yield Misfit("transport", f"--{setting} chooses a transport already: expected one of the two settings")
    yield from _access(config)
    yield from _tls(config)
    if config.segment < MIN_SEGMENT_BYTES or config.segment % 4096:
        yield Misfit("segment", f"expected at least {spell_size(MIN_SEGMENT_BYTES)}, and a multiple of 4KiB")
    if config.shard_memory_bytes < config.segment:
        yield Misfit(
            "memory",
            f"this gives each of {config.shards} shard(s) {config.shard_memory_bytes} bytes: expected at least one "
            f"segment of {config.segment}; raise --memory, or lower --shards or --segment",
        )
    if config.transient_memory.of(config.memory) > config.memory:
        yield Misfit("transient_memory", f"expected at most the memory of all shards, {config.memory}")
    last = config.port + config.shards - 1
    if config.port and last > MAX_PORT:
        yield Misfit("port", f"{config.shards} shards need the ports up to {last}: the last port is {MAX_PORT}")
    http = config.http
    meets = http is not None and (http.host == config.host or {http.host, config.host} & {*WILDCARDS})
    if http is not None and meets and 0 < config.port <= http.port <= last:
        yield Misfit("http", f"shard {http.port - config.port} listens on this port: choose another port")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host. The host is an address or a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _access(config: ServerConfig) -> Iterator[Misfit]:
    """Yield a misfit if clients on other machines could use the server without a login although no setting allows
    that."""
    for name in ("auth", "audit"):
        if getattr(config, name) == "":
            yield Misfit(name, "expected a file")
    if config.insecure:
        return
    if config.auth is not None:
        transport, setting = config.reads_with
        if transport:
            yield Misfit(
                setting,
                f"reads by this transport need no login: leave --{setting} or --auth out, or give --insecure too if "
                "every host that reaches this one may read every block",
            )
        return
    for name, host in (("host", config.host), ("http", config.http.host if config.http is not None else "localhost")):
        if not is_loopback(host):
            yield Misfit(
                name,
                f"other machines reach {host or 'every address'} and may read, change and delete all blocks: "
                "give --auth FILE, or --insecure if every host in that network is trusted",
            )


def transport_misfits(config: ServerConfig) -> Iterator[Misfit]:
    """Yield the reasons why clients cannot read by the chosen transport. This imports the transport."""
    transport, setting = config.reads_with
    try:
        if transport:
            TRANSPORTS.find(transport)()
    except (ValueError, ImportError) as error:
        yield Misfit(setting, str(error))


def _cluster(config: ServerConfig) -> Iterator[Misfit]:
    """Yield cluster settings that do not fit."""
    if config.node_id is not None and not is_name(config.node_id):
        yield Misfit(
            "node_id",
            f"expected 1 to {MAX_ID} letters, digits, '.', '_' and '-', and a different id for each of the nodes",
        )
    if config.zone and not is_name(config.zone):
        yield Misfit("zone", f"expected up to {MAX_ID} letters, digits, '.', '_' and '-'")
    try:
        url = config.cluster_url
    except Misfit as misfit:
        yield misfit
        return
    if url is None:
        for name in ("advertise", "drain_seconds"):
            if getattr(config, name):
                yield Misfit(name, "only a member of a cluster has this setting: give --cluster too")
        return
    if config.node_id is None and not is_name(config.cluster_node_id):
        yield Misfit(
            "node_id",
            f"the host name {config.cluster_node_id!r} cannot be the node's id: expected 1 to {MAX_ID} letters, "
            "digits, '.', '_' and '-'; give --node-id",
        )
    host, name = config.advertised_host, "advertise" if config.advertise else "host"
    if host in WILDCARDS:
        yield Misfit(
            name, "other machines cannot connect to this address: give --advertise with one that they can reach"
        )
    wrong = any(not "!" <= letter <= "~" or letter in "/[]@,?#" for letter in host)
    if wrong or len(host) > MAX_HOST or host.count(":") == 1:
        yield Misfit(name, "expected a host name or an address, without a port")


def _tls(config: ServerConfig) -> Iterator[Misfit]:
    """Yield each TLS file that was given without another file that it needs."""
    needed = {"tls_cert": "tls_key", "tls_key": "tls_cert", "tls_client_ca": "tls_cert", "tls_ca": "tls_cert"}
    for name, needs in needed.items():
        if getattr(config, name) is not None and getattr(config, needs) is None:
            yield Misfit(name, f"TLS needs a certificate and its key: give --{needs.replace('_', '-')} too")


def metrics_address(config: ServerConfig, port: int) -> str:
    """Return HOST:PORT at which other members reach the metrics, or an empty string if they cannot.
    `port`: the port on which the metrics are served."""
    if config.http is None or not port:
        return ""
    host, others = config.http.host, config.advertised_host
    if host in WILDCARDS:
        host = others
    elif is_loopback(host) and not is_loopback(others):
        return ""
    return str(HostPort.of(host, port))
