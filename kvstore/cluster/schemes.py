"""Opens the directories of clusters. The scheme of a cluster's URL determines which directory lists its members.

`etcd`, `etcds` and `dns` come with kvstore; other packages may add a `Scheme` of their own (`kvstore.plugins`,
docs/cluster.md). No state; thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kvstore.cluster.members import Membership
from kvstore.plugins import SCHEMES
from kvstore.tls import TLSOptions


class ClusterURL(Protocol):
    """The parsed URL of a cluster. Its `str` is the URL in normalized form."""

    @property
    def certificate_name(self) -> str:
        """The name in the certificates of all nodes; empty if each certificate is for its node's host."""


class Directory(Protocol):
    """The list of a cluster's members. Only one thread may use it, except that any thread may call `close`."""

    def membership(self) -> Membership:
        """Return all current members. Raises `DirectoryError`."""

    def wait_for_change(self, after_epoch: int, timeout_s: float) -> bool:
        """Block until the members may have changed, and return True. Return False if that does not happen within
        `timeout_s`."""

    def close(self) -> None:
        """Close the directory, and wake a thread in `wait_for_change`."""


class Scheme(NamedTuple):
    """A plug-in for one scheme.

    `parse`: the function that parses a URL of this scheme. It raises `ValueError`, which says what is expected.
    `open`: the function that opens the directory at a parsed URL. Its second argument says how to connect to nodes with
    TLS. It raises `DirectoryError`.
    """

    parse: Callable[[str], ClusterURL]
    open: Callable[[Any, TLSOptions | None], Directory]


def is_cluster_url(endpoint: str) -> bool:
    """Return whether `endpoint` is a cluster's URL and not a node's address."""
    scheme, found, _ = endpoint.partition("://")
    return bool(found) and scheme not in ("tcp", "tls") and SCHEMES.has(scheme)


def parse_cluster_url(url: str) -> ClusterURL:
    """Parse a cluster's URL. Raises `ValueError`, which says what was given and what is expected."""
    return _scheme_of(url).parse(url)


def directory_of(url: str, tls: TLSOptions | None = None) -> Directory:
    """Return the directory at a cluster's URL.

    `tls`: how to connect to the nodes, for a directory that queries them.
    Raises `ValueError` if `url` is not a cluster's URL, and `DirectoryError` if the directory needs a package that is
    missing.
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
