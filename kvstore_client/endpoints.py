"""Parses the endpoint that a client is given: addresses of nodes, or the URL of a cluster.

No other module parses endpoints. This one has no state, so any thread may use it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.cluster.schemes import is_cluster_url, parse_cluster_url
from kvstore.cluster.url import parse_address
from kvstore.plugins import SCHEMES
from kvstore.tls import SYSTEM, TLSOptions

ENDPOINT_VARIABLE: Final = "KVSTORE_ENDPOINT"  # the environment variable that is used when no endpoint is given
TLS_VARIABLES: Final = {"tls_ca": "KVSTORE_TLS_CA", "tls_cert": "KVSTORE_TLS_CERT", "tls_key": "KVSTORE_TLS_KEY"}
_SCHEME: Final = re.compile(r"(?:(tcp|tls)://)?(.*?)/?", re.DOTALL)
_ENDPOINT_EXPECTED: Final = (
    "expected tcp://HOST:PORT, tls://HOST:PORT or HOST:PORT, a list of those, etcd://HOST:PORT/NAME, "
    "etcds://HOST:PORT/NAME or dns://HOST:PORT"
)


class Endpoints(NamedTuple):
    """Either `nodes`, the host and port of each node, or `cluster`, the URL of the directory that lists the nodes.

    * `scheme`: "tls" or "tcp" if the addresses of the nodes begin with that word, else empty.
    * `tls`: How to connect to nodes with TLS. It is None until `with_tls` sets it, and for connections without TLS.
    """

    nodes: Sequence[tuple[str, int]]
    cluster: str = ""
    scheme: str = ""
    tls: TLSOptions | None = None


def with_tls(endpoints: Endpoints, tls_ca: str | None, tls_cert: str | None, tls_key: str | None) -> Endpoints:
    """Return the endpoints with their TLS options set.

    TLS is used if the endpoints were given as ``tls://``, or if a file is given here or in the environment. A client
    that uses TLS never falls back to a plain connection. Raises `TypeError` and `ValueError`.
    """
    given = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    files = {}
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: expected the path of a PEM file")
        file = os.environ.get(TLS_VARIABLES[name], "") if value is None else value
        origin = TLS_VARIABLES[name] if value is None else name
        if file and not (name == "tls_ca" and file == SYSTEM):
            if endpoints.scheme == "tcp":
                raise ValueError(f"{origin}={file!r}, but tcp:// asks for a plain connection: expected tls://HOST:PORT")
            try:
                with open(file, "rb"):
                    pass
            except OSError as error:
                raise ValueError(f"{origin}={file!r}: {error.strerror}: expected a PEM file") from None
        files[name] = file
    if bool(files["tls_cert"]) != bool(files["tls_key"]):
        raise ValueError(f"tls_cert={files['tls_cert']!r} and tls_key={files['tls_key']!r}: expected both, or none")
    if endpoints.scheme != "tls" and not any(files.values()):
        return endpoints
    name = parse_cluster_url(endpoints.cluster).certificate_name if endpoints.cluster else ""
    return endpoints._replace(tls=TLSOptions(files["tls_ca"], files["tls_cert"], files["tls_key"], name))


def parse_endpoints(endpoint: str | Sequence[str] | None) -> Endpoints:
    """Return the nodes or the cluster that `endpoint` names. If it is None, `KVSTORE_ENDPOINT` is read instead.

    A node is ``HOST:PORT``, ``tcp://HOST:PORT`` or ``tls://HOST:PORT``, with an IPv6 address in brackets. Several nodes
    are given as a list, or as one string with commas. A cluster is ``etcd://HOST:PORT[,HOST:PORT...]/NAME``,
    ``etcds://`` or ``dns://SERVICE:PORT``. A ``/`` at the end is ignored. Raises `TypeError` for a value that is not a
    string. Raises `ValueError` for an invalid endpoint, for a node that is named twice, and if no endpoint is given.
    """
    given: object = endpoint
    if given is None:
        given = os.environ.get(ENDPOINT_VARIABLE, "")
        if not given:
            raise ValueError(f"endpoint: none given, and {ENDPOINT_VARIABLE} is not set: {_ENDPOINT_EXPECTED}")
    if isinstance(given, str):
        given = given.strip()
        if is_cluster_url(given):
            return Endpoints((), str(parse_cluster_url(given)))
        return _parse_nodes(given.split(","))
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise TypeError(f"endpoint={given!r} is of type {type(given).__name__}: {_ENDPOINT_EXPECTED}")
    for each in given:
        if not isinstance(each, str):
            raise TypeError(f"endpoint: {each!r} in the list is of type {type(each).__name__}: {_ENDPOINT_EXPECTED}")
    if len(given) == 1:
        return parse_endpoints(given[0])
    return _parse_nodes(given)


def _parse_nodes(texts: Sequence[str]) -> Endpoints:
    if not texts:
        raise ValueError(f"endpoint: an empty list: {_ENDPOINT_EXPECTED}")
    nodes: list[tuple[str, int]] = []
    known: set[tuple[str, int]] = set()
    schemes: set[str] = set()
    for text in texts:
        if is_cluster_url(text):
            raise ValueError(
                f"endpoint {text!r} is in a list of {len(texts)}, but a cluster's URL must be the only endpoint: "
                f"{_ENDPOINT_EXPECTED}"
            )
        parts = _SCHEME.fullmatch(text.strip())
        assert parts is not None
        schemes.add(parts[1] or "")
        try:
            host, port = parse_address(text, parts[2])
        except ValueError:
            others = f"; schemes of clusters are {', '.join(SCHEMES.names())}" if "://" in text else ""
            raise ValueError(f"endpoint {text!r}: {_ENDPOINT_EXPECTED}{others}") from None
        if (host.lower(), port) in known:
            raise ValueError(f"endpoint {text!r} is named twice: expected each node once")
        known.add((host.lower(), port))
        nodes.append((host, port))
    if "tls" in schemes and len(schemes) > 1:
        raise ValueError(f"endpoint {', '.join(texts)}: expected tls:// before each of the nodes, or before none")
    return Endpoints(nodes, scheme=max(schemes))  # "tls" or "tcp" if some node has it, else empty
