"""Which addresses of a store a client accepts, and the errors for others."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvstore_client import KVStoreClient, Namespace
from kvstore_client.endpoints import Endpoints, parse_endpoints

NAMESPACE = Namespace(model="m", dtype="uint8", block_tokens=1, block_bytes=1)


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        ("store:7070", [("store", 7070)]),
        ("tcp://store:7070", [("store", 7070)]),
        ("tcp://store:7070/", [("store", 7070)]),
        (" store:7070/ ", [("store", 7070)]),
        ("10.0.0.1:1", [("10.0.0.1", 1)]),
        ("[::1]:7070", [("::1", 7070)]),
        ("tcp://[fe80::1%eth0]:7070/", [("fe80::1%eth0", 7070)]),
        (["tcp://a:1", "tcp://b:2/"], [("a", 1), ("b", 2)]),
        (("a:1",), [("a", 1)]),
        ("tls://a:1, tls://b:2", [("a", 1), ("b", 2)]),
    ],
)
def test_nodes_are_named_by_address(given: str | list[str], nodes: list[tuple[str, int]]) -> None:
    assert (parse_endpoints(given).nodes, parse_endpoints(given).cluster) == (nodes, "")


@pytest.mark.parametrize(
    ("given", "cluster"),
    [
        ("etcd://a:2379,b:2379/prod", "etcd://a:2379,b:2379/prod"),
        ("etcd://a:2379/prod/", "etcd://a:2379/prod"),
        (["dns://store.default.svc:7070/"], "dns://store.default.svc:7070"),
    ],
)
def test_a_cluster_is_named_by_its_url(given: str | list[str], cluster: str) -> None:
    assert parse_endpoints(given) == Endpoints((), cluster)


def test_without_an_endpoint_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_ENDPOINT", "a:1,b:2")
    assert parse_endpoints(None).nodes == [("a", 1), ("b", 2)]
    monkeypatch.setenv("KVSTORE_ENDPOINT", "nonsense")
    with pytest.raises(ValueError, match="endpoint 'nonsense'"):
        KVStoreClient(namespace=NAMESPACE)
    for unset in (lambda: monkeypatch.setenv("KVSTORE_ENDPOINT", ""), lambda: monkeypatch.delenv("KVSTORE_ENDPOINT")):
        unset()
        with pytest.raises(ValueError, match="KVSTORE_ENDPOINT is not set: expected tcp://HOST:PORT"):
            KVStoreClient(namespace=NAMESPACE)


@pytest.mark.parametrize("fail_open", [True, False])
def test_a_cluster_without_its_package_is_an_import_error(monkeypatch: pytest.MonkeyPatch, fail_open: bool) -> None:
    monkeypatch.setitem(sys.modules, "requests", None)
    with pytest.raises(ImportError, match=r"needs the package requests .*pip install 'llm-kvstore\[cluster\]'"):
        KVStoreClient("etcd://127.0.0.1:1/without-requests", NAMESPACE, fail_open=fail_open)


@pytest.mark.parametrize(
    ("given", "error", "part"),
    [
        (b"a:1", TypeError, "endpoint=b'a:1' is of type bytes: expected tcp://HOST:PORT"),
        (7070, TypeError, "endpoint=7070 is of type int: expected"),
        (["a:1", 7070], TypeError, "7070 in the list is of type int"),
        (NAMESPACE, TypeError, "is of type Namespace: expected tcp://HOST:PORT"),
        ("", ValueError, "endpoint ''"),
        ("store", ValueError, "endpoint 'store': expected tcp://HOST:PORT"),
        ("http://a:1", ValueError, "endpoint 'http://a:1'"),
        ("tcp://a:1/x", ValueError, "endpoint 'tcp://a:1/x'"),
        ("a:0", ValueError, "endpoint 'a:0'"),
        ("a:65536", ValueError, "endpoint 'a:65536'"),
        ("::1:7070", ValueError, "endpoint '::1:7070'"),
        ([], ValueError, "an empty list"),
        (["a:1", "etcd://b:2/n"], ValueError, "a cluster's URL must be the only endpoint"),
        (["a:1", "b:1", "tcp://A:1/"], ValueError, "'tcp://A:1/' is named twice"),
        ("a:1,a:1", ValueError, "'a:1' is named twice"),
    ],
)
def test_an_invalid_endpoint_is_named_with_the_expected_form(given: Any, error: type[Exception], part: str) -> None:
    with pytest.raises(error) as caught:
        KVStoreClient(given, NAMESPACE)
    assert part in str(caught.value)
