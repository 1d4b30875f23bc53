"""A cluster for the scenarios, and the load on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.cluster_clients import Clients
from tests.chaos.scenario import GRACE_S, LATE_S, NODES, TIMEOUT_S, Copies
from tests.support.network import need, unavailable


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    need(unavailable())
    folder = tmp_path_factory.mktemp("cluster")
    with Copies(folder, nodes=len(NODES), grace_seconds=GRACE_S, drain_seconds=5) as site:
        site.replicas = request.param
        yield site


@pytest.fixture
def clients(site: Copies, request: pytest.FixtureRequest) -> Iterator[Clients]:
    """The load. When the test ends, this fixture checks the conditions that hold for every test."""
    site.mend()
    # With two copies no block may be lost, and setting a block again would hide a loss.
    recompute = site.replicas == 1
    with Clients(site, request.node.name, site.replicas, timeout_s=TIMEOUT_S, recompute=recompute) as clients:
        yield clients
    latest = clients.latest()
    print(f"{len(clients.calls())} calls, the latest a {latest.op}, {latest.late_s:+.3f} s from its deadline")
    assert not clients.wrong()
    assert not clients.raised()
    assert latest.late_s <= LATE_S, latest
    for node in site.cluster.nodes.values():
        assert "Traceback" not in node.log_text(), node.log_text()[-3000:]
