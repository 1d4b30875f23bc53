"""Which URLs name a cluster, and the errors for other URLs."""

from __future__ import annotations

import pytest

from kvstore.cluster.schemes import is_cluster_url, parse_cluster_url
from kvstore.cluster.url import DnsURL, EtcdURL


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("etcd://10.0.0.1:2379/prod", EtcdURL((("10.0.0.1", 2379),), "prod")),
        (
            "etcd://a:1,b.example:2,[fd00::1]:3/x.Y_z-1",
            EtcdURL((("a", 1), ("b.example", 2), ("fd00::1", 3)), "x.Y_z-1"),
        ),
        ("dns://kvstore.default.svc:7070", DnsURL("kvstore.default.svc", 7070)),
    ],
)
def test_a_cluster_url_reads_back_as_it_was_written(url: str, parsed: EtcdURL | DnsURL) -> None:
    assert is_cluster_url(url)
    assert parse_cluster_url(url) == parsed
    assert str(parsed) == url


def test_an_endpoint_named_twice_counts_once() -> None:
    assert parse_cluster_url("etcd://a:1,b:2,a:1/n") == EtcdURL((("a", 1), ("b", 2)), "n")


def test_a_nodes_address_is_not_a_cluster_url() -> None:
    assert not is_cluster_url("tcp://127.0.0.1:7070")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("", ["''", "etcd://HOST:PORT", "dns://SERVICE:PORT"]),
        ("tcp://127.0.0.1:7070", ["tcp://127.0.0.1:7070", "etcd://HOST:PORT"]),
        ("etcd://a:2379", ["name ''", "/NAME"]),
        ("etcd://a:2379/", ["name ''", "/NAME"]),
        ("etcd://a:2379/a/b", ["'a/b'", "letters, digits"]),
        ("etcd://a:2379/" + "n" * 65, ["1 to 64"]),
        ("etcd://a:2379/sm\N{LATIN SMALL LETTER O WITH DIAERESIS}r", ["letters"]),
        ("etcd://a/n", ["'a'", "HOST:PORT"]),
        ("etcd:///n", ["''", "HOST:PORT"]),
        ("etcd://a:2379,/n", ["''", "HOST:PORT"]),
        ("etcd://a:0/n", ["'a:0'", "1 to 65535"]),
        ("etcd://a:65536/n", ["'a:65536'", "65535"]),
        ("etcd://me:secret@a:2379/n", ["HOST:PORT"]),
        ("etcd://fd00::1:2379/n", ["HOST:PORT"]),
        ("etcd://a b:2379/n", ["'a b:2379'"]),
        ("dns://service", ["'service'", "HOST:PORT"]),
        ("dns://a:1,b:2", ["HOST:PORT"]),
        ("dns://a:1/n", ["HOST:PORT"]),
    ],
)
def test_a_url_that_names_no_cluster_says_what_it_expects(url: str, parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_cluster_url(url)
    assert all(part in str(caught.value) for part in parts), caught.value
