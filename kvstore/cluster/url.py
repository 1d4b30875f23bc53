"""The URLs of clusters: `etcd://HOST:2379[,HOST:2379...]/NAME` and `dns://SERVICE:PORT`.

`etcds://` is etcd with TLS, and may have options: `?ca=FILE&cert=FILE&key=FILE&user=NAME&password_file=FILE`.

Pure functions; thread-safe.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

ETCD_SCHEME: Final = "etcd://"
ETCDS_SCHEME: Final = "etcds://"
DNS_SCHEME: Final = "dns://"
MAX_ID: Final = 64  # characters of a cluster's name or a node's id
_CLUSTER_ID: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_ID}}}")
_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^\s\[\]:/,@?#]+)):([0-9]{1,5})")


class EtcdOptions(NamedTuple):
    """How to reach etcd with TLS. The files are in PEM format. Empty options are taken from environment variables: see
    `etcd_access`."""

    ca: str = ""  # the CA of etcd's certificate
    cert: str = ""  # this side's certificate; `key` is its key
    key: str = ""
    user: str = ""
    password_file: str = ""


class EtcdURL(NamedTuple):
    """A cluster whose nodes register themselves in etcd."""

    endpoints: tuple[tuple[str, int], ...]  # all belong to the same etcd cluster
    name: str
    options: EtcdOptions | None = None  # None without TLS

    @property
    def certificate_name(self) -> str:
        return ""

    def __str__(self) -> str:
        where = f"{','.join(join_address(*endpoint) for endpoint in self.endpoints)}/{self.name}"
        if self.options is None:
            return f"{ETCD_SCHEME}{where}"
        from urllib.parse import quote  # imported only where it is needed

        given = "&".join(f"{name}={quote(value)}" for name, value in self.options._asdict().items() if value)
        return f"{ETCDS_SCHEME}{where}{'?' if given else ''}{given}"


class DnsURL(NamedTuple):
    """A cluster whose nodes are the addresses of one DNS name, such as a headless Kubernetes service."""

    host: str
    port: int  # the port of each node's first shard

    @property
    def certificate_name(self) -> str:
        return self.host  # every node has the certificate of the service by which it is found

    def __str__(self) -> str:
        return f"{DNS_SCHEME}{join_address(self.host, self.port)}"


def parse_etcd_url(url: str) -> EtcdURL:
    """Parse the URL of a cluster in etcd. Raises `ValueError`."""
    scheme = ETCD_SCHEME if url.startswith(ETCD_SCHEME) else ETCDS_SCHEME
    where, question, query = url[len(scheme) :].partition("?")
    addresses, _, name = where.removesuffix("/").partition("/")
    if not is_name(name):
        raise ValueError(
            f"{url!r}: the cluster's name {name!r} is not valid: expected {scheme}HOST:PORT[,HOST:PORT...]/NAME, with "
            f"1 to {MAX_ID} letters, digits, '.', '_' and '-' as NAME"
        )
    endpoints = tuple(parse_address(url, text) for text in addresses.split(","))
    if question and scheme == ETCD_SCHEME:
        raise ValueError(f"{url!r}: only URLs of etcd with TLS have options: expected {ETCDS_SCHEME}")
    options = None if scheme == ETCD_SCHEME else _parse_options(url, query)
    return EtcdURL(tuple(dict.fromkeys(endpoints)), name, options)


def parse_dns_url(url: str) -> DnsURL:
    """Parse the URL of a cluster behind a DNS name. Raises `ValueError`."""
    return DnsURL(*parse_address(url, url.removeprefix(DNS_SCHEME).removesuffix("/")))


def _parse_options(url: str, query: str) -> EtcdOptions:
    from urllib.parse import parse_qsl

    known = ", ".join(EtcdOptions._fields)
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise ValueError(
            f"{url!r}: the options {query!r} are not valid: expected NAME=VALUE&NAME=VALUE, with names from {known}"
        ) from None
    options = dict(given)
    if "password" in options:
        raise ValueError(
            "etcds://…: a password in the URL can be read by every user of this host: expected it in the environment "
            "variable KVSTORE_ETCD_PASSWORD, or in a file (password_file=FILE)"
        )
    unknown = [name for name in options if name not in EtcdOptions._fields]
    if unknown or len(options) < len(given):
        raise ValueError(
            f"{url!r}: unknown or repeated options {', '.join(unknown) or query}: expected each at most once, and only "
            f"{known}"
        )
    return EtcdOptions(**options)


def is_name(text: str) -> bool:
    """Return whether `text` can be a cluster's name or a node's id."""
    return _CLUSTER_ID.fullmatch(text) is not None


def parse_address(url: str, text: str) -> tuple[str, int]:
    """Return the host and the port in `text`, a part of `url` of the form HOST:PORT or [IPv6]:PORT. Raises
    `ValueError`."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise ValueError(f"{url!r}: the address {text!r} is not valid: expected HOST:PORT, PORT from 1 to 65535")
    return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, or [IPv6]:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
