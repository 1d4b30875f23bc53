"""Fixtures for the tests of clusters, logins and planning."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, cluster_name
from tests.support.endpoint import Behaviour, Endpoint
from tests.support.etcd import Etcd
from tests.support.faults import InBackground
from tests.support.logins import Guarded


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """An etcd shared by a module's tests."""
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd for tests that stop it."""
    with Etcd(tmp_path / "etcd") as etcd:
        yield etcd


@pytest.fixture
def cluster(etcd: Etcd, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of the test's own, still without nodes."""
    with Cluster(etcd.url(cluster_name(request)), tmp_path) as cluster:
        yield cluster


@pytest.fixture
def in_background() -> Iterator[InBackground]:
    """`in_background(function, *arguments)` calls the function on a thread of its own. Returns a future."""
    with ThreadPoolExecutor(8, "test") as threads:
        yield threads.submit


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server with ``--auth`` for a module's tests."""
    guarded = Guarded(tmp_path_factory.mktemp("auth"))
    yield guarded
    guarded.stop()


@pytest.fixture
def paced_endpoint() -> Iterator[Endpoint]:
    """An endpoint that prefills in 50 ms and then sends a token every 20 ms, however many requests it serves."""
    with Endpoint(lambda number: Behaviour(first_s=0.05, gap_s=0.02)) as endpoint:
        yield endpoint
