"""Which settings of access and of clusters fit each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Final, Protocol

from kvstore.cluster.url import MAX_NAME, EtcdURL, is_name
from kvstore.node.settings import MAX_HOST, HostPort, Misfit

WILDCARDS: Final = ("0.0.0.0", "::", "")


class Access(Protocol):
    """The settings that say who reaches a server."""

    @property
    def host(self) -> str: ...
    @property
    def http(self) -> HostPort | None: ...
    @property
    def auth(self) -> str | None: ...
    @property
    def audit(self) -> str | None: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def nixl(self) -> bool: ...


class Cluster(Protocol):
    """The settings of a member of a cluster. `cluster_url`, None: no cluster. `cluster_node_id`, `advertised_host`:
    what was given, or the default."""

    @property
    def node_id(self) -> str | None: ...
    @property
    def zone(self) -> str: ...
    @property
    def advertise(self) -> str | None: ...
    @property
    def drain_seconds(self) -> int: ...
    @property
    def cluster_url(self) -> EtcdURL | None: ...
    @property
    def cluster_node_id(self) -> str: ...
    @property
    def advertised_host(self) -> str: ...


class NodeSettings(Access, Cluster, Protocol):
    """Both."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host: an address, or a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def access_misfits(config: Access) -> Iterator[Misfit]:
    """Yield why others could use the server without a login, although nobody has said that they may."""
    for name in ("auth", "audit"):
        if getattr(config, name) == "":
            yield Misfit(name, "expected a file")
    if config.insecure:
        return
    if config.auth is not None:
        if config.nixl:
            yield Misfit(
                "nixl",
                "NIXL's own ports ask nobody to log in: leave --nixl or --auth out, or give --insecure too if "
                "whoever reaches this host may read every block",
            )
        return
    for name, host in (("host", config.host), ("http", config.http.host if config.http is not None else "localhost")):
        if not is_loopback(host):
            yield Misfit(
                name,
                f"{host or 'every address'} is not this machine alone, and whoever reaches it may read, change and "
                "delete all blocks: give --auth FILE, or --insecure if every host in that network is trusted",
            )


def cluster_misfits(config: Cluster) -> Iterator[Misfit]:
    """Yield what does not fit of the settings of a cluster."""
    if config.node_id is not None and not is_name(config.node_id):
        yield Misfit(
            "node_id",
            f"expected 1 to {MAX_NAME} letters, digits, '.', '_' and '-', and another id for each node of the cluster",
        )
    if config.zone and not is_name(config.zone):
        yield Misfit("zone", f"expected up to {MAX_NAME} letters, digits, '.', '_' and '-'")
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
            f"the host name {config.cluster_node_id!r} cannot be the node's id: expected 1 to {MAX_NAME} letters, "
            "digits, '.', '_' and '-'; give --node-id",
        )
    host, name = config.advertised_host, "advertise" if config.advertise else "host"
    if host in WILDCARDS:
        yield Misfit(name, "others cannot connect to this address: give --advertise with one that they can reach")
    wrong = any(not "!" <= letter <= "~" or letter in "/[]@,?#" for letter in host)
    if wrong or len(host) > MAX_HOST or host.count(":") == 1:
        yield Misfit(name, "expected a host name or an address, without a port")


def tls_misfits(config: object) -> Iterator[Misfit]:
    """Yield which file of TLS was given without another that it needs."""
    needed = {"tls_cert": "tls_key", "tls_key": "tls_cert", "tls_client_ca": "tls_cert", "tls_ca": "tls_cert"}
    for name, needs in needed.items():
        if getattr(config, name) is not None and getattr(config, needs) is None:
            yield Misfit(name, f"TLS needs a certificate and its key: give --{needs.replace('_', '-')} too")


def metrics_address(config: NodeSettings, port: int) -> str:
    """-> HOST:PORT at which other members reach the metrics, which are served on `port`; empty: they cannot."""
    if config.http is None or not port:
        return ""
    host, others = config.http.host, config.advertised_host
    if host in WILDCARDS:
        host = others
    elif is_loopback(host) and not is_loopback(others):
        return ""
    return str(HostPort.of(host, port))
