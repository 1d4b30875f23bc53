"""Parses the endpoint that a client is given: addresses of nodes, or the URL of a cluster.

This is the only place that parses endpoints. No state; usable in any thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.cluster.url import is_cluster_url, parse_address, parse_cluster_url

ENDPOINT_VARIABLE: Final = "KVSTORE_ENDPOINT"  # the environment variable that is used when no endpoint is given
_SCHEME: Final = "tcp://"
_EXPECTED: Final = "expected tcp://HOST:PORT or HOST:PORT, a list of those, etcd://HOST:PORT/NAME or dns://HOST:PORT"


class Endpoints(NamedTuple):
    """Either `nodes`, the host and port of each node, or `cluster`, the URL of the directory that lists the nodes."""

    nodes: Sequence[tuple[str, int]]
    cluster: str = ""


def parse_endpoints(endpoint: str | Sequence[str] | None) -> Endpoints:
    """The nodes or the cluster that `endpoint` names. None: use the environment's `KVSTORE_ENDPOINT`.

    A node is ``HOST:PORT`` or ``tcp://HOST:PORT``, with an IPv6 address in brackets. Several nodes are a list, or one
    string with commas. A cluster is ``etcd://HOST:PORT[,HOST:PORT...]/NAME`` or ``dns://SERVICE:PORT``. A ``/`` at the
    end is ignored. Raises `TypeError` for a value that is not a string, `ValueError` for an invalid endpoint, a node
    that is named twice, or no endpoint at all.
    """
    given: object = endpoint
    if given is None:
        given = os.environ.get(ENDPOINT_VARIABLE, "")
        if not given:
            raise ValueError(f"endpoint: none given, and {ENDPOINT_VARIABLE} is not set: {_EXPECTED}")
    if isinstance(given, str):
        given = given.strip()
        if is_cluster_url(given):
            return Endpoints((), str(parse_cluster_url(given)))
        return Endpoints(_parse_nodes(given.split(",")))
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise TypeError(f"endpoint={given!r}: a {type(given).__name__}: {_EXPECTED}")
    for each in given:
        if not isinstance(each, str):
            raise TypeError(f"endpoint: {each!r} in the list: a {type(each).__name__}: {_EXPECTED}")
    if len(given) == 1:
        return parse_endpoints(given[0])
    return Endpoints(_parse_nodes(given))


def _parse_nodes(texts: Sequence[str]) -> Sequence[tuple[str, int]]:
    if not texts:
        raise ValueError(f"endpoint: an empty list: {_EXPECTED}")
    nodes: list[tuple[str, int]] = []
    known: set[tuple[str, int]] = set()
    for text in texts:
        if is_cluster_url(text):
            raise ValueError(f"endpoint {text!r} in a list of {len(texts)}: a cluster's URL stands alone; {_EXPECTED}")
        try:
            host, port = parse_address(text, text.strip().removeprefix(_SCHEME).removesuffix("/"))
        except ValueError:
            raise ValueError(f"endpoint {text!r}: {_EXPECTED}") from None
        if (host.lower(), port) in known:
            raise ValueError(f"endpoint {text!r} is named twice: expected each node once")
        known.add((host.lower(), port))
        nodes.append((host, port))
    return nodes
