"""How a cluster is found: the scheme of its URL says which directory lists its members.

`etcd`, `etcds` and `dns` come with kvstore; other packages may add a `Scheme` of their own (`kvstore.plugins`,
docs/cluster.md). No state; any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kvstore.cluster.members import Membership
from kvstore.plugins import SCHEMES
from kvstore.tls import TLSOptions


class ClusterURL(Protocol):
    """The parsed URL of a cluster. Its `str` is the URL again, in one spelling."""

    @property
    def certificate_name(self) -> str:
        """The name that the certificates of all nodes are for; empty: each is for its node's host."""


class Directory(Protocol):
    """The list of a cluster's members. One thread, except for `close`."""

    def membership(self) -> Membership:
        """-> all members now. Raises `DirectoryError`."""

    def wait_for_change(self, after_epoch: int, timeout_s: float) -> bool:
        """Blocks until the members may have changed (True) or `timeout_s` have passed (False)."""

    def close(self) -> None:
        """Close the directory, and wake a thread in `wait_for_change`."""


class Scheme(NamedTuple):
    """What a plug-in is. `parse`: a URL with this scheme; raises `ValueError`, which says what is expected. `open`: the
    directory at a parsed URL; its second argument says how to ask nodes with TLS. Raises `DirectoryError`."""

    parse: Callable[[str], ClusterURL]
    open: Callable[[Any, TLSOptions | None], Directory]


def is_cluster_url(endpoint: str) -> bool:
    """Whether `endpoint` is a cluster's URL and not a node's address."""
    scheme, found, _ = endpoint.partition("://")
    return bool(found) and scheme not in ("tcp", "tls") and SCHEMES.has(scheme)


def parse_cluster_url(url: str) -> ClusterURL:
    """Parse a cluster's URL. Raises `ValueError`, which says what was given and what is expected."""
    return _scheme_of(url).parse(url)


def directory_of(url: str, tls: TLSOptions | None = None) -> Directory:
    """-> the directory at a cluster's URL. `tls`: how to ask nodes, where that tells who is there.

    Raises `ValueError` when `url` is not a cluster's URL, `DirectoryError` when a package that it needs is missing.
    """
    scheme = _scheme_of(url)
    return scheme.open(scheme.parse(url), tls)


def _scheme_of(url: str) -> Scheme:
    if not is_cluster_url(url):
        raise ValueError(
            f"{url!r}: expected etcd://HOST:PORT[,HOST:PORT...]/NAME, dns://SERVICE:PORT, or another URL with one of "
            f"the schemes {', '.join(SCHEMES.names())}"
        )
    scheme: Scheme = SCHEMES.find(url.partition("://")[0])
    return scheme
