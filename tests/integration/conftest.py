"""Fixtures of the tests of clusters."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.etcd import Etcd
from tests.support.fleet import Fleet, InBackground
from tests.support.harness import StartServer


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """An etcd for a module."""
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Etcd]:
    """For tests that stop it."""
    with Etcd(tmp_path / "etcd") as etcd:
        yield etcd


@pytest.fixture
def fleet(etcd: Etcd, start_server: StartServer, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A cluster of its own for a test, with no node yet."""
    fleet = Fleet(etcd.url(f"c{abs(hash(request.node.name)) % 10**9}"), start_server)
    yield fleet
    fleet.close()


@pytest.fixture
def in_background() -> Iterator[InBackground]:
    """`in_background(function, *arguments)` calls it on a thread of its own. -> a future"""
    with ThreadPoolExecutor(8, "test") as threads:
        yield threads.submit
